"""Guided diffusion against the plain reference beside this file, and what a perfect and a useless guide do to it."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.data.vocabulary_map import VocabularyMap, identity
from dlm_jax.decode import Autoregressive, api, generate, guided_model, loop, stream
from dlm_jax.decode import guided_rules as rules
from dlm_jax.decode.guided import Guided
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.nn import cache as kv_cache
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.decode.guided_reference import Reference

V, EOS, MASK = 12, 1, 11
PROMPTS = [[3, 5, 4], [2, 9, 8, 7, 6, 5, 4, 3, 2], [6], [7, 7, 2, 9, 4]]
LIMITS = [21, 14, 24, 1]


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
    return guided_model.join(*drafter, *guide, some_map() if mapping is None else mapping)


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
        hidden, cache = score.hidden(tokens, Pass(index, see, jnp.where(inside, index, 64)), cache)
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


def reference(prompt, length, decoder, shift=1, eos=EOS):
    drafter, guide = plain_once(shift)
    mapping = some_map()
    options = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)
               if f.name not in ("temperature", "literal_mask")}
    return Reference(drafter(), guide, prompt, length=length, eos=eos, mask=MASK, to_guide=mapping.to_guide,
                     to_draft=mapping.to_draft, placeholder=mapping.placeholder, shift=shift,
                     **{name: value for name, value in options.items() if value is not None})


plain_once = functools.cache(plain)


def alone(prompt, length, shift):
    """What the drafter answers without a guide, one token a forward, first to last."""
    return reference(prompt, length, Guided(cache="none", acceptance="top_k", top_k=0), shift, eos=-1).run()


CASES = {
    "none_speculative": (0, Guided(cache="none", rule="speculative", verify_batch_size=0)),
    "prompt": (1, Guided(acceptance="top_k", top_k=3, verify_batch_size=2)),
    "free": (1, Guided(cache="free", block_length=4, acceptance="top_k", top_k=4, verify_batch_size=3)),
    "aggressive": (1, Guided(cache="aggressive", acceptance="top_k_relative", top_k=4, relative_probability=0.05)),
    "delayed": (1, Guided(cache="delayed", block_length=3, acceptance="top_k", top_k=4, draft_threshold=0.3)),
    "sliding_speculative": (1, Guided(cache="sliding", window_size=5, rule="speculative", acceptance="top_k")),
    "block_boundary": (1, Guided(cache="block_boundary", block_length=4, acceptance="logit_threshold", top_k=5,
                                 logit_threshold=0.4, verify_batch_size=5)),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("aggressive", "block_boundary"))) for name in CASES])
def test_equals_the_plain_reference(name):
    shift, decoder = CASES[name]
    for eos in (EOS, -1):
        out = generate(*pair(shift), PROMPTS, decoder, max_new_tokens=LIMITS, eos_id=eos)
        agreed = []
        for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
            plain = reference(prompt, limit, decoder, shift, eos)
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


def test_rows_do_not_depend_on_neighbours_or_padding():
    shift, decoder = CASES["free"]
    decoder = dataclasses.replace(decoder, temperature=0.7)
    model, params = pair(shift)
    together = generate(model, params, PROMPTS, decoder, max_new_tokens=LIMITS, seed=5)
    for i, capacity in ((0, 48), (1, 16)):  # longer and shorter canvas, wider prompt bucket, batch of one
        request = api.make_request([PROMPTS[i]], max_new_tokens=LIMITS[i], capacity=capacity, eos_id=EOS, mask_id=MASK,
                                   seed=5, first_row=i, prompt_capacity=20)
        alone = api._run(model, params, decoder, request, 1, LIMITS[i], EOS)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        for kind in alone.ledger.forwards:
            assert alone.ledger.forwards[kind][0] == together.ledger.forwards[kind][i], kind
            assert alone.ledger.positions[kind][0] == together.ledger.positions[kind][i], kind


def test_streaming_equals_the_compiled_loop():
    model, params = pair()
    decoder = CASES["prompt"][1]
    compiled = generate(model, params, PROMPTS, decoder, max_new_tokens=LIMITS)
    streamed = np.full_like(compiled.canvas, -1)
    for event in stream(model, params, PROMPTS, decoder, max_new_tokens=LIMITS):
        assert event.kind == ("guide" if event.committed else "draft")
        if event.committed:
            streamed[event.row, event.positions] = event.tokens
            assert (compiled.committed_at[event.row, event.positions] == event.forward).all()
    np.testing.assert_array_equal(streamed, np.where(compiled.committed_at >= 0, compiled.canvas, -1))


@pytest.mark.slow
def test_compiled_loop_equals_the_python_loop():
    model, params = pair()
    decoder = CASES["prompt"][1]
    compiled = generate(model, params, PROMPTS, decoder, max_new_tokens=LIMITS)
    request = api.make_request(PROMPTS, max_new_tokens=LIMITS, capacity=24, eos_id=EOS, mask_id=MASK)
    state = loop.python_loop(model.scorer(params), decoder.resolved(), request)
    np.testing.assert_array_equal(compiled.committed_at, np.asarray(decoder.finish(request, state).committed_at))
    np.testing.assert_array_equal(compiled.canvas, np.asarray(decoder.finish(request, state).tokens))


def test_unmapped_tokens_are_never_agreed_upon():
    """A guide that knows no draft agrees with none, whatever the test: every round commits the drafter's own token."""
    shift, decoder = CASES["none_speculative"]
    nothing = VocabularyMap(np.full(V, -1, np.int32), np.full(V, -1, np.int32), 0, V, V)
    lenient = dataclasses.replace(decoder, acceptance="top_k", top_k=V)
    out = generate(*pair(shift, nothing), PROMPTS, lenient, max_new_tokens=LIMITS, eos_id=-1)
    assert (out.ledger.forwards["draft"] == LIMITS).all() and (out.origin <= 0).all()
    assert [t.tolist() for t in out.tokens] == [alone(p, n, shift) for p, n in zip(PROMPTS, LIMITS)]
    # where the vocabulary is the same, the same lenient test agrees with everything at once
    out = generate(*pair(shift, identity(V)), PROMPTS, lenient, max_new_tokens=LIMITS, eos_id=-1)
    assert (out.ledger.forwards["draft"] == 1).all()


def test_a_drafter_that_must_be_certain_goes_on_alone():
    """No probability of this model is 1: whatever the guide says, every round commits the drafter's own token."""
    shift, decoder = CASES["none_speculative"]
    certain = dataclasses.replace(decoder, rule="paper", acceptance="top_k", top_k=V, draft_threshold=1.0)
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


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A guide that knows the answer by position: its parameters are the token that follows each index."""

    config = types.SimpleNamespace(vocab_size=V, bidirectional=False, max_position_embeddings=64, family="oracle")

    def scorer(self, params):
        hidden = lambda tokens, positions, visibility, cache=None, slots=None: (
            jax.nn.one_hot(params[positions], V) * 9.0, cache)
        empty = lambda batch, capacity: kv_cache.init(1, batch, capacity, 1, 2)
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
    for rule in ("paper", "speculative"):
        model, params = guided_model.join(*drafter, Oracle(), jnp.array(follows))
        out = generate(model, params, [prompt], Guided(cache="none", rule=rule), max_new_tokens=length, eos_id=-1)
        assert out.tokens[0].tolist() == answer
        assert out.ledger.forwards["draft"][0] <= rounds < length
        if rule == "paper":
            assert out.ledger.forwards["draft"][0] == rounds


@pytest.mark.parametrize("acceptance", ["exact", "top_k", "top_k_relative", "logit_threshold"])
def test_acceptance_matches_the_reference(acceptance):
    rng = np.random.default_rng(3)
    mapping = some_map()
    logits = rng.normal(size=(40, 6, V)).astype(np.float32).round(1)  # with ties
    draft, draft_logit = rng.integers(0, V - 1, (40, 6)), rng.normal(size=(40, 6)).astype(np.float32)
    decoder = Guided(acceptance=acceptance, top_k=None if acceptance == "exact" else 3).resolved()
    place, logit, likeliest = rules.standing(jnp.array(logits), jnp.array(mapping.to_draft), jnp.array(draft))
    ours = np.asarray(rules.accepts(place, logit, logits.max(-1), draft_logit, decoder.top_k,
                                    decoder.relative_probability, decoder.logit_threshold))
    np.testing.assert_array_equal(likeliest[..., 0], logits.argmax(-1))
    plain = Reference(None, None, [2], length=1, eos=EOS, mask=MASK, to_guide=mapping.to_guide, shift=0,
                      to_draft=mapping.to_draft, placeholder=0, acceptance=acceptance, top_k=3)
    theirs = np.array([[plain.accepted(*x) for x in zip(*row)] for row in zip(draft, draft_logit, logits)])
    np.testing.assert_array_equal(ours, theirs)
    assert 0.02 < ours.mean() < 0.9


@pytest.mark.parametrize("rule, agreed, correction, count, guided", [
    ("paper", 0, 5, 1, False), ("paper", 3, 5, 3, False), ("assisted", 0, 5, 1, False),
    ("speculative", 0, 5, 1, True), ("speculative", 3, 5, 4, True), ("speculative", 3, -1, 3, False),
    ("speculative", 0, -1, 1, False),
])
def test_what_is_committed(rule, agreed, correction, count, guided):
    got = rules.commits(rule, jnp.array([agreed]), jnp.array([correction]))
    assert (int(got[0][0]), bool(got[1][0])) == (count, guided)


def test_one_program_serves_every_acceptance_test():
    model, params = pair()
    base = Guided(verify_batch_size=2)
    generate(model, params, PROMPTS, base, max_new_tokens=20)
    count = api.EXECUTABLES.compiled
    for changes in ({"acceptance": "top_k", "top_k": 5}, {"acceptance": "top_k_relative"}, {"rule": "assisted"},
                    {"acceptance": "logit_threshold", "logit_threshold": 1}, {"draft_threshold": 0.5},
                    {"temperature": 0.5}):
        generate(model, params, PROMPTS, dataclasses.replace(base, **changes), max_new_tokens=24)
    assert api.EXECUTABLES.compiled == count


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
    one = generate(*guided_model.join(model, params, guide, half, some_map()), PROMPTS, decoder, max_new_tokens=20)
    spread = jax.device_put(params, sharding.params(model, mesh))
    everywhere = jax.device_put(half, NamedSharding(mesh, PartitionSpec()))
    on_one = jax.device_put(half, jax.devices()[3])
    backwards = jax.sharding.Mesh(mesh.devices[..., ::-1], mesh.axis_names, axis_types=mesh.axis_types)
    reversed_ = jax.device_put(half, NamedSharding(backwards, PartitionSpec()))
    for theirs in (everywhere, on_one, reversed_):
        joined, both = guided_model.join(model, spread, guide, theirs, some_map())
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
        guided_model.join(model, params, guide, guide_params)
    with pytest.raises(ValueError, match=f"vocabulary_map is for {V} and {V} ids, .* draft_size={V}, guide_size=9"):
        guided_model.join(model, params, guide, guide_params, identity(V))
    with pytest.raises(ValueError, match="the drafter is a causal qwen2"):
        guided_model.join(guide, guide_params, guide, guide_params)
    with pytest.raises(ValueError, match="the guide is a bidirectional a2d-qwen3"):
        guided_model.join(model, params, model, params)


@pytest.mark.parametrize("options, message", [
    ({"rule": "greedy"}, "rule = 'greedy': accepted are"),
    ({"acceptance": "close"}, "acceptance = 'close'"),
    ({"cache": "dual"}, "cache = 'dual'"),
    ({"window_size": 1}, "window_size = 1"),
    ({"verify_batch_size": -1}, "verify_batch_size = -1"),
    ({"top_k": 2}, "top_k = 2 means nothing to acceptance = 'exact'"),
    ({"acceptance": "top_k", "relative_probability": 0.5}, "relative_probability = 0.5 means nothing"),
    ({"acceptance": "top_k", "top_k": 0}, "top_k = 0"),
    ({"acceptance": "logit_threshold", "logit_threshold": 1.5}, "logit_threshold = 1.5"),
    ({"temperature": -1.0}, "temperature"),
    ({"draft_threshold": 1.5}, "draft_threshold = 1.5"),
    ({"draft_threshold": 0.5, "rule": "speculative"}, "draft_threshold = 0.5 with rule = 'speculative'"),
])
def test_bad_hyperparameters_are_named_before_any_compile(options, message):
    count = api.EXECUTABLES.compiled
    with pytest.raises(ValueError, match=message):
        generate(*pair(), PROMPTS, Guided(**options), max_new_tokens=4)
    assert api.EXECUTABLES.compiled == count


def test_a_model_without_a_guide_is_refused():
    with pytest.raises(ValueError, match="Guided needs a guide"):
        generate(*models()[0], PROMPTS, Guided(), max_new_tokens=4)
    with pytest.raises(ValueError, match="64"):  # the guide knows fewer positions than are asked for
        drafter = network("a2d-qwen3", 0)
        longer = dataclasses.replace(drafter[0], config=drafter[0].config.replace(max_position_embeddings=999))
        generate(*guided_model.join(longer, drafter[1], *models()[1], some_map()), PROMPTS, Guided(),
                 max_new_tokens=60)
