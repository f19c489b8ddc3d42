"""Guided diffusion against the plain reference beside this file, and what a perfect and a useless guide do to it."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dlm_jax.data.vocabulary_map import VocabularyMap, identity
from dlm_jax.decode import Autoregressive, Guided, Pair, Runner, Sampler, generate, guided, join, stream
from dlm_jax.decode import request as requests
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.decode.guided import (
    Aggressive, Agreed, BlockBoundary, Exact, Proposal, Relative, Relaxed, Sliding, Speculative, Sure, TopK, reading)
from dlm_jax.decode.masked import CachePolicy, Delayed, Dual, Free, NoCache, Prompt
from dlm_jax.decode.parts import static
from dlm_jax.decode.runner import python_loop
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.decode.guided_reference import Reference, softmax

V, EOS, MASK = 12, 1, 11
PROMPTS = [[3, 5, 4], [2, 9, 8, 7, 6, 5, 4, 3, 2], [6], [7, 7, 2, 9, 4]]
LIMITS = [21, 14, 24, 1]
# as a guide of another chat template reads them: other lengths, other ids
RETOLD = [[9, 3, 6, 4, 5], [2, 9], [10, 4, 5, 0, 7, 7, 3], [6, 6, 2, 9, 4, 1, 1]]
PAIRS = [Pair(*both) for both in zip(PROMPTS, RETOLD)]


def network(family, seed, size=V, **changes):
    config = TransformerConfig(
        family=family, vocab_size=size, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, rope_theta=1e4, initializer_range=0.3, max_position_embeddings=64,
        eos_token_id=EOS, mask_token_id=MASK if family == "a2d-qwen3" else None, **changes)
    model = build.build(config)
    return model, build.init_params(model, jax.random.key(seed))


@functools.cache
def models(shift=1):
    return network("a2d-qwen3", 0, logit_shift=shift), network("qwen2", 1)


def some_map():
    """Draft ids 7 and MASK have no counterpart, nor have guide ids 8 and 11; guide ids 1 and 0 end a sequence."""
    to_guide = np.array([3, 1, 2, 4, 5, 6, 7, -1, 3, 9, 10, -1], np.int32)
    to_draft = np.array([1, 1, 2, 0, 3, 4, 5, 6, -1, 9, 10, -1], np.int32)
    return VocabularyMap(to_guide, to_draft, placeholder=8, draft_tokens=V, guide_tokens=V)


def pair(shift=1, mapping=None):
    drafter, guide = models(shift)
    return join(*drafter, *guide, some_map() if mapping is None else mapping)


def plain(shift=1):
    """The two callables that the reference needs, compiled once: tokens lie at their own index, 64 of them."""
    (model, params), (guide, guide_params) = models(shift)
    index = jnp.arange(64, dtype=jnp.int32)[None]

    @jax.jit
    def drafted(tokens, start, stop, seen, cache):
        score = model.scorer(params)
        rank = jnp.where(index < seen, 0, vis.NONE)
        inside = (index >= start) & (index < stop)
        see = vis.by_rank(jnp.zeros_like(index), jnp.where(inside, 0, vis.NONE), rank)
        slots = jnp.where(inside, index, 64)
        hidden, cache = score.hidden(tokens, Pass(index, see, slots), cache)
        return score.head(hidden)[0], cache

    @jax.jit
    def guided(tokens):
        return guide.scorer(guide_params)(tokens)[0]

    def drafter():
        memory = [model.scorer(params).init_cache(1, 64)]

        def run(tokens, start, stop, seen):
            logits, memory[0] = drafted(padded(tokens), start, stop, seen, memory[0])
            return np.asarray(logits)[start:stop]

        return run

    padded = lambda tokens: jnp.array([tokens + [0] * (64 - len(tokens))])
    return drafter, lambda tokens: np.asarray(guided(padded(tokens)))[: len(tokens)]


def plainly(decoder):
    """The words of the reference for a decoder's parts."""
    words = {"NoCache": "none", "TopK": "top_k", "BlockBoundary": "boundary"}
    accept, threshold = decoder.accept, 0.0
    if isinstance(accept, Sure):
        accept, threshold = accept.accept, accept.threshold
    word = lambda part: words.get(type(part).__name__, type(part).__name__.lower())
    rule = "one_free" if decoder.rule == Agreed(one_free=True) else word(decoder.rule)
    return dict(rule=rule, accept=word(accept), cache=word(decoder.cache), threshold=threshold,
                verify_batch_size=decoder.verify_batch_size, **vars(accept),
                **{name: value for name, value in vars(decoder.cache).items() if name in ("block_length", "reach")})


def reference(prompt, length, decoder, shift=1, eos=EOS, kind=Reference, retold=None):
    drafter, guide = plain_once(shift)
    mapping = some_map()
    return kind(drafter(), guide, prompt, length=length, eos=eos, mask=MASK, to_guide=mapping.to_guide,
                to_draft=mapping.to_draft, placeholder=mapping.placeholder, shift=shift, guide_prompt=retold,
                **plainly(decoder))


plain_once = functools.cache(plain)


def alone(prompt, length, shift):
    """What the drafter answers without a guide, one token a forward, first to last."""
    nothing = Guided(cache=NoCache(), accept=Sure(Exact(), 1.0))
    return reference(prompt, length, nothing, shift, eos=-1).run()


CASES = {
    "none_speculative": (0, Guided(cache=NoCache(), rule=Speculative(), verify_batch_size=0)),
    "one_free": (1, Guided(cache=NoCache(), rule=Agreed(one_free=True), verify_batch_size=4)),
    "prompt": (1, Guided(accept=TopK(3), verify_batch_size=2)),
    "free": (1, Guided(cache=Free(block_length=4), accept=Relaxed(0.7), verify_batch_size=3)),
    "aggressive": (1, Guided(cache=Aggressive(), accept=Relative(4, 0.05))),
    "delayed": (1, Guided(cache=Delayed(block_length=3), accept=Sure(TopK(4), 0.3))),
    "sliding_speculative": (1, Guided(cache=Sliding(5), rule=Speculative(), accept=TopK())),
    "block_boundary": (1, Guided(cache=BlockBoundary(4), accept=Relative(5, 0.1), verify_batch_size=5)),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("aggressive", "block_boundary"))) for name in CASES])
def test_equals_the_plain_reference(name):
    shift, decoder = CASES[name]
    # the guide reads prompts of its own in one case
    prompts, retold = (PAIRS, RETOLD) if name == "free" else (PROMPTS, [None] * len(PROMPTS))
    for eos in (EOS, -1):
        out = generate(*pair(shift), prompts, decoder, max_new_tokens=LIMITS, eos_id=eos)
        agreed = []
        for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
            plain = reference(prompt, limit, decoder, shift, eos, retold=retold[row])
            tokens = plain.run()
            assert out.tokens[row].tolist() == tokens
            assert MASK not in tokens
            assert out.committed_at[row, : len(tokens)].tolist() == plain.at
            assert (out.committed_at[row, len(tokens):] == -1).all()
            assert out.origin[row, : len(tokens)].tolist() == plain.origin
            for kind in ("draft", "guide"):
                assert out.ledger.forwards[kind][row] == plain.forwards[kind], kind
                assert out.ledger.positions[kind][row] == plain.positions[kind], kind
            assert out.ledger.after_prefill()[row] == plain.forwards["draft"]
            agreed += plain.agreed
        assert 0 in agreed and max(agreed) > 0  # both outcomes were walked


def test_rows_depend_neither_on_neighbours_nor_on_padding():
    shift, decoder = CASES["free"]
    decoder = dataclasses.replace(decoder, sampler=decoder.sampler.replace(temperature=0.7))
    model, params = pair(shift)
    together = generate(model, params, PAIRS, decoder, max_new_tokens=LIMITS, seed=5)
    runner = Runner(model, params, decoder)
    for i, capacity in ((0, 48), (1, 16)):  # longer and shorter canvas, wider prompt buckets, batch of one
        request = runner.request([PAIRS[i]], max_new_tokens=LIMITS[i], capacity=capacity, seed=5, first_row=i,
                                 prompt_capacity=20, guide_capacity=30)
        assert request.prompt.shape == (1, 24) and request.guide_prompt.shape == (1, 32)
        alone = runner.read(runner.run(runner.start(request)), [0])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        for kind in alone.ledger.forwards:
            assert alone.ledger.forwards[kind][0] == together.ledger.forwards[kind][i], kind
            assert alone.ledger.positions[kind][0] == together.ledger.positions[kind][i], kind


def test_rows_come_and_go_beside_others():
    shift, decoder = CASES["free"]
    decoder = dataclasses.replace(decoder, sampler=decoder.sampler.replace(temperature=0.7))
    model, params = pair(shift)
    together = generate(model, params, PAIRS, decoder, max_new_tokens=LIMITS, seed=5)
    runner = Runner(model, params, decoder)
    rows = runner.start(runner.request(PAIRS, max_new_tokens=LIMITS, seed=5))
    rows = runner.step(rows)
    _, rows = runner.release(rows, [0, 3])
    rows = runner.step(rows)
    rows = runner.admit(rows, 3, PAIRS[0], max_new_tokens=LIMITS[0], seed=5, number=0)
    rows = runner.run(rows)
    out = runner.read(rows, [1, 2, 3])
    for got, row in zip(out.tokens, (1, 2, 0)):
        np.testing.assert_array_equal(got, together.tokens[row])
    with pytest.raises(ValueError, match="pairs of prompts or plain ones"):
        runner.admit(runner.release(rows, [0])[1], 0, PROMPTS[0], max_new_tokens=4)
    with pytest.raises(ValueError, match="the guide's prompt: 17 tokens do not fit a batch made for 16"):
        runner.admit(rows, 0, Pair(PROMPTS[0], [3] * 17), max_new_tokens=4)


def test_drafts_are_drawn_at_the_sampler_s_temperature_each_with_its_own_noise():
    B, G = 64, 32
    logits = jnp.array([0.0, 1.5, -1.0, 3.0, 9.0])  # the last is the mask
    score = types.SimpleNamespace(head=lambda hidden: hidden + logits)
    request = requests.make([[2]] * B, max_new_tokens=G, capacity=G, mask_id=4, seed=3)
    within = jnp.broadcast_to(jnp.arange(G), (B, G))

    def drawn(forward, **sampler):
        drafts = reading.Drafts(jnp.zeros((B, G, 5)), *(jnp.full(B, n, jnp.int32) for n in (0, G, forward)))
        own, draft = reading.draw(score, request, drafts, Sampler(**sampler), within, within)
        assert (own[..., 4] == -jnp.inf).all()
        return np.asarray(draft)

    assert (drawn(1) == 3).all()
    once, again = drawn(1, temperature=1.5), drawn(2, temperature=1.5)
    seen = lambda draft: np.bincount(draft.ravel(), minlength=5) / draft.size
    share = lambda temperature: softmax(np.append(logits[:4], -np.inf) / temperature)
    assert np.abs(seen(once) - share(1.5)).max() < 0.04
    assert min(np.abs(share(other) - share(1.5)).max() for other in (0.75, 3.0, 4.5)) > 0.1
    assert set(drawn(1, temperature=1.5, top_k=2).ravel()) == {1, 3}
    independent = np.square(share(1.5)).sum()  # chance that two draws agree
    for a, b in ((once, again), (once[:, 1:], once[:, :-1]), (once[1:], once[:-1])):  # forwards, numbers, rows
        assert abs((a == b).mean() - independent) < 0.05


def test_the_temperature_reaches_the_drafts():
    """Where one token is asked for, it is the drafter's own draft: its frequencies are a softmax of known logits."""
    shift, prompt, temperature, count = 1, PROMPTS[1], 1.5, 512
    logits = np.array(plain_once(shift)[0]()(prompt + [MASK], 0, len(prompt) + 1, len(prompt) + 1))[-1 - shift]
    logits[MASK] = -np.inf
    out = generate(*pair(shift), [prompt] * count, Guided(temperature=temperature), max_new_tokens=1)
    seen = np.bincount(np.concatenate(out.tokens), minlength=V) / count
    assert np.abs(seen - softmax(logits / temperature)).max() < 0.07
    for other in (temperature / 2, 3 * temperature):  # what the test can tell apart
        assert np.abs(softmax(logits / other) - softmax(logits / temperature)).max() > 0.12


@struct.dataclass
class Beyond(CachePolicy):
    """A window of the user's that reaches beyond the row on both sides, or holds nothing to draft."""

    blind: bool = static(False)

    def window(self, now):
        return (now.first, now.first + 1) if self.blind else (now.first - 9, now.stop + 9)


@pytest.mark.parametrize("blind", [False, True])
def test_windows_of_users_are_cut_to_the_row_and_hold_what_is_drafted(blind):
    run = lambda cache: generate(*pair(), PROMPTS[:2], Guided(cache=cache), max_new_tokens=LIMITS[:2])
    ours, plain = run(Beyond(blind=blind)), run(NoCache())
    np.testing.assert_array_equal(ours.canvas, plain.canvas)
    np.testing.assert_array_equal(ours.ledger.positions["draft"], plain.ledger.positions["draft"])


def test_streaming_equals_the_compiled_loop():
    model, params = pair()
    decoder = CASES["prompt"][1]
    compiled = generate(model, params, PROMPTS, decoder, max_new_tokens=LIMITS)
    streamed = np.full_like(compiled.canvas, -1)
    for event in stream(model, params, PROMPTS, decoder, max_new_tokens=LIMITS):
        assert event.kind == ("guide" if event.committed else "draft")
        if event.committed:
            streamed[event.row, event.numbers] = event.tokens
            assert (compiled.committed_at[event.row, event.numbers] == event.forward).all()
    np.testing.assert_array_equal(streamed, np.where(compiled.committed_at >= 0, compiled.canvas, -1))


@pytest.mark.slow
def test_compiled_loop_equals_the_python_loop():
    model, params = pair()
    decoder = CASES["prompt"][1]
    compiled = generate(model, params, PROMPTS, decoder, max_new_tokens=LIMITS)
    request = Runner(model, params, decoder).request(PROMPTS, max_new_tokens=LIMITS)
    canvas = python_loop(model.scorer(params), decoder, request).canvas
    np.testing.assert_array_equal(compiled.committed_at, np.asarray(canvas.committed_at))
    np.testing.assert_array_equal(compiled.canvas, np.asarray(canvas.tokens))


def test_unmapped_tokens_are_never_agreed_upon():
    """A guide that knows no draft agrees with none, whatever the test: every round commits the drafter's own token."""
    shift, decoder = CASES["none_speculative"]
    nothing = VocabularyMap(np.full(V, -1, np.int32), np.full(V, -1, np.int32), 0, V, V)
    lenient = dataclasses.replace(decoder, accept=TopK(V))
    out = generate(*pair(shift, nothing), PROMPTS, lenient, max_new_tokens=LIMITS, eos_id=-1)
    assert (out.ledger.forwards["draft"] == LIMITS).all() and (out.origin <= 0).all()
    assert [t.tolist() for t in out.tokens] == [alone(p, n, shift) for p, n in zip(PROMPTS, LIMITS)]
    # where the vocabulary is the same, the same lenient test agrees with everything at once
    out = generate(*pair(shift, identity(V)), PROMPTS, lenient, max_new_tokens=LIMITS, eos_id=-1)
    assert (out.ledger.forwards["draft"] == 1).all()


def test_a_drafter_that_must_be_certain_goes_on_alone():
    """No probability of this model is 1: whatever the guide says, every round commits the drafter's own token."""
    shift, decoder = CASES["none_speculative"]
    certain = dataclasses.replace(decoder, rule=Agreed(), accept=Sure(TopK(V), 1.0))
    out = generate(*pair(shift, identity(V)), PROMPTS, certain, max_new_tokens=LIMITS, eos_id=-1)
    assert [t.tolist() for t in out.tokens] == [alone(p, n, shift) for p, n in zip(PROMPTS, LIMITS)]
    assert (out.ledger.forwards["draft"] == LIMITS).all()


def test_speculative_decoding_is_the_guide_s_own_answer():
    """Exact match with the guide's correction leaves nothing of the drafter but the number of rounds."""
    shift, decoder = CASES["none_speculative"]
    out = generate(*pair(shift, identity(V)), PROMPTS, decoder, max_new_tokens=24)
    own = generate(*models()[1], PROMPTS, Autoregressive(), max_new_tokens=24)
    compared = 0
    for a, b in zip(out.tokens, own.tokens):
        b = b[: list(b).index(MASK)] if MASK in b else b  # the guide alone may say what is no answer here
        np.testing.assert_array_equal(a[: len(b)], b)
        compared += len(b)
    assert compared > 20


@struct.dataclass
class Tally:
    """A cache that holds nothing but how many tokens have been read for good, as a recurrent state would."""

    settled: jax.Array
    capacity: int = struct.field(pytree_node=False)

    def grow(self, capacity):
        return self.replace(capacity=capacity)

    def commit(self, accepted):
        return self.replace(settled=self.settled + accepted)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A guide that knows the answer by position: its parameters are the token that follows each index."""

    config = types.SimpleNamespace(vocab_size=V, bidirectional=False, max_position_embeddings=64, family="oracle")

    def scorer(self, params):
        def hidden(tokens, told, cache=None, wanted=None):
            told = told if wanted is None else told.take(wanted)
            return jax.nn.one_hot(params[told.positions], V) * 9.0, cache

        empty = lambda batch, capacity, window: Tally(jnp.zeros(batch, jnp.int32), capacity)
        return types.SimpleNamespace(hidden=hidden, head=lambda x: x, init_cache=empty, shift=1, bidirectional=False)


def test_an_oracle_of_the_answer_emits_it_in_the_fewest_rounds():
    """The answer that the drafter gives alone, token by token, comes in as few rounds as its drafts allow."""
    shift, prompt, length = 1, PROMPTS[1], 18
    drafter, _ = models(shift)
    answer = alone(prompt, length, shift)
    rounds, done, ask = 0, 0, plain_once(shift)[0]()
    while done < length:  # every round takes as much of the answer as is drafted
        known = prompt + answer[:done]
        logits = np.array(ask(known + [MASK] * (length - done), 0, len(prompt) + length, len(prompt) + length))
        logits[:, MASK] = -np.inf
        drafts = logits.argmax(-1)[len(known) - shift: len(prompt) + length - shift]
        same = drafts == np.array(answer[done:])
        done += length - done if same.all() else int(same.argmin())
        rounds += 1
    follows = np.zeros(64, np.int32)
    follows[len(prompt) - 1: len(prompt) - 1 + length] = answer
    for rule in (Agreed(), Speculative()):
        model, params = join(*drafter, Oracle(), jnp.array(follows))
        runner = Runner(model, params, Guided(cache=NoCache(), rule=rule, verify_batch_size=4))
        rows = runner.run(runner.start(runner.request([prompt], max_new_tokens=length, eos_id=-1)))
        out = runner.read(rows, [0])
        assert rows.state.guide_cache.settled[0] == len(prompt) + length - 1  # all but the newest token
        assert out.tokens[0].tolist() == answer
        assert out.ledger.forwards["draft"][0] <= rounds < length
        if rule == Agreed():
            assert out.ledger.forwards["draft"][0] == rounds


def proposals(rng, mapping):
    """Random proposals with ties, and the same as arrays."""
    logits = rng.normal(size=(40, 6, V)).astype(np.float32).round(1)
    own = (0.5 * rng.normal(size=(40, 6, V))).astype(np.float32)
    draft = rng.integers(0, V - 1, (40, 6))
    return draft, own, logits, Proposal(*map(jnp.asarray, (draft, own, logits, mapping.to_draft)))


@pytest.mark.parametrize("accept", [
    Exact(), TopK(), TopK(3), Relative(), Relative(4, 0.3), Relaxed(), Relaxed(1.0), Sure(TopK(3), 0.08)])
def test_acceptance_matches_the_reference(accept):
    mapping = some_map()
    draft, own, logits, proposal = proposals(np.random.default_rng(3), mapping)
    plain = Reference(None, None, [2], length=1, eos=EOS, mask=MASK, to_guide=mapping.to_guide, shift=0,
                      to_draft=mapping.to_draft, placeholder=0, **plainly(Guided(accept=accept)))
    theirs = np.array([[plain.accepted(*x) for x in zip(*row)] for row in zip(draft, own, logits)])
    ours = np.asarray(accept.accepts(proposal))
    np.testing.assert_array_equal(ours, theirs)
    assert 0.02 < ours.mean() < 0.9
    np.testing.assert_array_equal(proposal.choice(), mapping.to_draft[logits.argmax(-1)])


def test_the_relaxed_rules_by_hand():
    """Guide: 0.5, 0.3, 0.2 for tokens 0, 1, 2; the drafter: 0.3, 0.4, 0.3."""
    both = [jnp.log(jnp.array([[p]])) for p in ([0.3, 0.4, 0.3], [0.5, 0.3, 0.2])]
    stays = lambda accept, draft: bool(accept.accepts(Proposal(jnp.array([[draft]]), *both, jnp.arange(3)))[0, 0])
    assert [stays(Relaxed(0.79), draft) for draft in range(3)] == [True] * 3  # 0.4 > 0.79 * 0.5, whatever is drafted
    assert [stays(Relaxed(0.81), draft) for draft in range(3)] == [True, False, False]
    assert [stays(Relative(2, 0.59), draft) for draft in range(3)] == [True, True, False]
    assert [stays(Relative(2, 0.61), draft) for draft in range(3)] == [True, False, False]
    assert [stays(Relative(3, 1.0), draft) for draft in range(3)] == [True, False, False]
    assert [stays(Relative(3, 0.39), draft) for draft in range(3)] == [True] * 3


@struct.dataclass
class Surprise:
    """An acceptance that the library does not know: what the guide finds likely enough, whatever else is."""

    least: float = 0.1

    def accepts(self, proposal):
        mass = jax.nn.softmax(proposal.guide_logits, axis=-1)
        named = proposal.to_draft == proposal.draft[..., None]
        return jnp.max(jnp.where(named, mass, 0.0), axis=-1) >= self.least


class Surprised(Reference):
    def accepted(self, draft, own, logits):
        return bool((softmax(logits)[self.to_draft == draft] >= 0.15).any())


def test_an_acceptance_of_the_user_s_own_runs_like_ours():
    decoder = Guided(accept=Surprise(0.15), verify_batch_size=0)
    plain = dataclasses.replace(decoder, accept=Exact())
    out = generate(*pair(), PROMPTS, decoder, max_new_tokens=LIMITS)
    assert [t.tolist() for t in out.tokens] == [
        reference(p, n, plain, kind=Surprised).run() for p, n in zip(PROMPTS, LIMITS)]
    count = EXECUTABLES.compiled
    other = generate(*pair(), PROMPTS, dataclasses.replace(decoder, accept=Surprise(0.9)), max_new_tokens=LIMITS)
    assert EXECUTABLES.compiled == count and (other.ledger.forwards["draft"] > out.ledger.forwards["draft"]).any()


@pytest.mark.parametrize("rule, agreed, correction, count, guided", [
    (Agreed(), 0, 5, 1, False), (Agreed(), 3, 5, 3, False), (Agreed(), 1, -1, 1, False),
    (Agreed(one_free=True), 0, 5, 1, True), (Agreed(one_free=True), 1, 5, 1, False),
    (Agreed(one_free=True), 0, -1, 1, False),
    (Speculative(), 0, 5, 1, True), (Speculative(), 3, 5, 4, True), (Speculative(), 3, -1, 3, False),
    (Speculative(), 0, -1, 1, False),
])
def test_what_is_committed(rule, agreed, correction, count, guided):
    got = rule.commits(jnp.array([agreed]), jnp.array([correction]))
    assert (int(got[0][0]), bool(got[1][0])) == (count, guided)


def test_presets_are_the_table_and_the_released_script():
    paper = Guided(rule=Agreed(), accept=Exact(), cache=Free(block_length=256), verify_batch_size=32)
    assert guided.flash_dlm() == paper and guided.flash_dlm(accept=TopK(5)).accept == TopK(5)
    assert guided.flash_dlm_relaxed() == dataclasses.replace(paper, accept=Relaxed(0.5))
    released = dataclasses.replace(paper, cache=Prompt())
    assert guided.flash_dlm_released() == released
    assert guided.flash_dlm_released_relaxed() == dataclasses.replace(released, accept=Relative(5, 0.95))


def test_numbers_compile_nothing():
    model, params = pair()
    base = CASES["free"][1]
    generate(model, params, PAIRS, base, max_new_tokens=LIMITS)
    count = EXECUTABLES.compiled
    for other in (base.replace(accept=Relaxed(1.0)), base.replace(cache=Free(block_length=7)),
                  base.replace(sampler=base.sampler.replace(temperature=0.5, top_k=3, top_p=0.9))):
        generate(model, params, PAIRS, other, max_new_tokens=24)
    assert EXECUTABLES.compiled == count


def test_a_guide_of_another_dtype_and_sharding():
    from jax.sharding import NamedSharding, PartitionSpec

    from dlm_jax.train import sharding
    from dlm_jax.train.config import MeshConfig

    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    (model, params), (guide, guide_params) = models()
    decoder = Guided(verify_batch_size=0)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), guide_params)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    one = generate(*join(model, params, guide, half, some_map()), PROMPTS, decoder, max_new_tokens=20)
    spread = jax.device_put(params, sharding.params(model, mesh))
    everywhere = jax.device_put(half, NamedSharding(mesh, PartitionSpec()))
    on_one = jax.device_put(half, jax.devices()[3])
    backwards = jax.sharding.Mesh(mesh.devices[..., ::-1], mesh.axis_names, axis_types=mesh.axis_types)
    reversed_ = jax.device_put(half, NamedSharding(backwards, PartitionSpec()))
    for theirs in (everywhere, on_one, reversed_):
        joined, both = join(model, spread, guide, theirs, some_map())
        assert both["guide"]["embed"].dtype == jnp.bfloat16 and both["draft"]["embed"].dtype == jnp.float32
        many = generate(joined, both, PROMPTS, decoder, max_new_tokens=20)
        for a, b in zip(one.tokens, many.tokens):
            np.testing.assert_array_equal(a, b)
        assert one.ledger.totals() == many.ledger.totals()


def test_prompts_hold_no_mask_unless_asked_for():
    with pytest.raises(ValueError, match=f"prompt 0 holds the mask token {MASK}.*literal_mask"):
        generate(*pair(), [[3, MASK, 4]], Guided(), max_new_tokens=4)


def test_bad_pairs_are_named():
    (model, params), (guide, guide_params) = models()[0], network("qwen2", 1, size=9)
    with pytest.raises(ValueError, match=rf"drafter has {V} ids and the guide 9.*vocabulary_map.build"):
        join(model, params, guide, guide_params)
    with pytest.raises(ValueError, match=f"vocabulary_map is for {V} and {V} ids, .* draft_size={V}, guide_size=9"):
        join(model, params, guide, guide_params, identity(V))
    with pytest.raises(ValueError, match="the drafter is a causal qwen2"):
        join(guide, guide_params, guide, guide_params)
    with pytest.raises(ValueError, match="the guide is a bidirectional a2d-qwen3"):
        join(model, params, model, params)


@struct.dataclass
class Causal(NoCache):
    def limit(self, request, number, block_length):
        return number


@pytest.mark.parametrize("make, message", [
    (lambda: Sliding(1), "reach = 1"),
    (lambda: BlockBoundary(0), "block_length = 0"),
    (lambda: Guided(rule="speculative"), r"rule = 'speculative': expected a GuideRule, such as Agreed"),
    (lambda: Guided(accept=TopK), "expected an Acceptance, such as Exact"),
    (lambda: Guided(cache=Dual()), "cache = Dual.*everything anew now and then"),
    (lambda: Guided(cache=Prompt(8)), "cache = Prompt.*everything anew now and then"),
    (lambda: Guided(verify_batch_size=-1), "verify_batch_size = -1"),
    (lambda: TopK(0), "top_k = 0"),
    (lambda: Relative(2, 1.5), "share = 1.5"),
    (lambda: Relaxed(-0.5), "tau = -0.5"),
    (lambda: Sure(Exact(), 1.5), "threshold = 1.5"),
    (lambda: Guided(temperature=-1.0), "temperature"),
    (lambda: Guided(cache=Causal()), "cache = Causal.*what tokens see.*which Guided never asks"),
    (lambda: Guided(accept=Sure(), rule=Speculative()), "Sure.*Speculative.*nothing is gained"),
])
def test_bad_hyperparameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("prompts, message", [
    ([PROMPTS[0], PAIRS[1]], "prompt 0 is a plain list and prompt 1 a Pair"),
    ([Pair([3], [])], "the guide's prompt 0 is empty"),
    ([Pair([3], [3, V])], f"the guide's prompt 0 holds token id {V}, outside"),
    ([Pair([3], [3] * 62)], "the guide's prompt and answer reach 66 tokens"),
])
def test_bad_pairs_of_prompts_are_named_before_any_compile(prompts, message):
    count = EXECUTABLES.compiled
    with pytest.raises(ValueError, match=message):
        generate(*pair(), prompts, Guided(), max_new_tokens=4)
    with pytest.raises(ValueError, match="Autoregressive asks no guide"):
        generate(*models()[1], PAIRS, Autoregressive(), max_new_tokens=4)
    assert EXECUTABLES.compiled == count


def test_a_model_without_a_guide_is_refused():
    with pytest.raises(ValueError, match="Guided needs a guide"):
        generate(*models()[0], PROMPTS, Guided(), max_new_tokens=4)
    with pytest.raises(ValueError, match="64"):  # the guide knows fewer positions than are asked for
        drafter = network("a2d-qwen3", 0)
        longer = dataclasses.replace(drafter[0], config=drafter[0].config.replace(max_position_embeddings=999))
        generate(*join(longer, drafter[1], *models()[1], some_map()), PROMPTS, Guided(),
                 max_new_tokens=60)
