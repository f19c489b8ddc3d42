"""Masked-diffusion decoding against a plain loop, and what its schedules, rules and caches promise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import MaskedDiffusion, Runner, executables, generate, parts, stream
from dlm_jax.decode import request as requests
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.decode.runner import python_loop
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.scoring import Pass
from tests.decode import masked_reference as reference
from tests.decode.masked_settings import made

V, MASK, EOS = 64, 63, 1
LIMITS = [20, 19, 13]
MODELS = {"llada": dict(family="llada"), "dream": dict(family="a2d-qwen3", logit_shift=1)}
RULES = {
    "threshold": dict(rule="threshold", threshold=0.3),
    "sure": dict(rule="threshold", threshold=0.6, early_stop="none"),
    "entropy": dict(rule="threshold", confidence="entropy", threshold=1.5),
    "margin": dict(rule="threshold", confidence="margin", threshold=0.1, early_stop="run"),
    "factor": dict(rule="factor", factor=2.0, early_stop="none"),
    "quota": dict(rule="quota", steps=12, early_stop="none"),
    "quota_fill": dict(rule="quota", confidence="margin", steps=6),
    "one_by_one": dict(rule="quota", early_stop="run"),
    "timesteps": dict(rule="timesteps", steps=12, confidence="entropy", early_stop="none"),
    "timesteps_run": dict(rule="timesteps", early_stop="run", eos_run=2),
    "block_timesteps": dict(rule="block_timesteps", steps=12, confidence="entropy", early_stop="none"),
    "first_token": dict(rule="threshold", threshold=0.3, first_token=True, early_stop="none"),
    "shares": dict(rule="shares", steps=18, early_stop="block"),
    "shares_few": dict(rule="shares", steps=6, early_stop="none"),
    "budget": dict(rule="budget", steps=6, threshold=0.3, early_stop="none"),
}
MULTI = {
    "early": dict(block_add_threshold=0.1, decoded_token_threshold=0.5, early_stop="none"),
    "forced": dict(block_add_threshold=0.3, decoded_token_threshold=0.3, threshold=0.2, early_stop="none"),
    "late_fill": dict(block_add_threshold=0.1, decoded_token_threshold=0.1, early_stop="late_fill"),
    "fill": dict(block_add_threshold=0.5, decoded_token_threshold=0.9, early_stop="fill"),
}
STREAMED = made(block_length=8, cache="dual", threshold=0.3, temperature=0.5, early_stop="none")
CACHES = ("prefix", "dual", "free", "delayed", "prompt", "block")


def peaked(**changes):
    """A random model whose confidences spread over (0, 1), so that every branch of a decoder is walked."""
    model = build.build(TransformerConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        rope_theta=1e4, initializer_range=0.35, max_position_embeddings=512, eos_token_id=EOS, mask_token_id=MASK,
        **changes))
    return model, build.init_params(model, jax.random.key(5))


def prompts(seed: int, count: int):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, V - 1, rng.integers(1, 14)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def networks():
    return {name: peaked(**changes) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def common(networks):
    """Per model, a token that comes often: as EOS it walks every early stop."""
    def often(model, params):
        out = generate(model, params, prompts(1, 3), made(block_length=8), max_new_tokens=LIMITS, eos_id=-1)
        return int(np.bincount(np.concatenate(out.tokens)).argmax())
    return {name: often(*network) for name, network in networks.items()}


def predictor(model, params, size=40):
    """Returns the reference's view of a model: outputs of ids under a mask, padded to one shape."""
    @jax.jit
    def forward(tokens, mask):
        score = model.scorer(params)
        return score.head(score.hidden(tokens, Pass(jnp.arange(size)[None], mask))[0])

    def predict(ids, visible):
        tokens, mask = np.zeros((1, size), int), np.eye(size, dtype=bool)[None]
        tokens[0, :len(ids)], mask[0, :len(ids), :len(ids)] = ids, visible
        return np.asarray(forward(jnp.array(tokens), jnp.array(mask)))[0, :len(ids)]

    return predict


def check_against_reference(model, params, decoder, eos, **settings):
    rows, predict = prompts(1, 3), predictor(model, params)
    out = generate(model, params, rows, decoder, max_new_tokens=LIMITS, eos_id=eos)
    for i, (row, limit) in enumerate(zip(rows, LIMITS)):
        tokens, at, forwards = reference.decode(
            predict, row, length=limit, mask=MASK, eos=eos, shift=model.config.shift, **settings)
        assert out.canvas[i, :limit].tolist() == tokens
        assert out.committed_at[i, :limit].tolist() == at
        assert out.ledger.after_prefill()[i] == forwards


def one_block(settings):
    """Returns settings for whole answers, in which no EOS can end what follows its block."""
    return settings | ({"early_stop": "none"} if settings.get("early_stop") == "block" else {})


# every rule on one of the models here, and on the other as a whole answer
@pytest.mark.parametrize("rule, name", zip(RULES, itertools.cycle(MODELS)))
def test_blocks_equal_the_plain_loop(networks, common, rule, name):
    check_against_reference(*networks[name], made(block_length=8, **RULES[rule]), common[name], block=8, **RULES[rule])


@pytest.mark.parametrize("rule, name", zip(RULES, itertools.cycle([*MODELS][::-1])))
def test_whole_answers_equal_the_plain_loop(networks, common, rule, name):
    settings = one_block(RULES[rule])
    check_against_reference(*networks[name], made(block_length=0, **settings), common[name], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("rule, name", zip(RULES, itertools.cycle([*MODELS][::-1])))
def test_blocks_of_the_other_model_equal_the_plain_loop(networks, common, rule, name):
    check_against_reference(*networks[name], made(block_length=8, **RULES[rule]), common[name], block=8, **RULES[rule])


@pytest.mark.parametrize("case", MULTI)
def test_several_open_blocks_equal_the_plain_loop(networks, common, case):
    settings = dict(multi_block=True, rule="threshold", confidence="entropy", threshold=1.2) | MULTI[case]
    check_against_reference(*networks["llada"], made(block_length=4, **settings), common["llada"], block=4,
                            **settings)


def test_guidance_without_the_prompt_equals_the_plain_loop(networks, common):
    settings = dict(rule="threshold", threshold=0.5, cfg_scale=0.7)
    check_against_reference(*networks["dream"], made(block_length=8, **settings), common["dream"], block=8,
                            **settings)


@pytest.mark.parametrize("rule", ["threshold", "shares", "quota", "first_token"])
def test_cached_blocks_equal_the_plain_loop(networks, common, rule):
    """Block diffusion's cache is exact: a finished block's keys and values never change."""
    check_against_reference(*networks["dream"], made(block_length=8, cache="block", **RULES[rule]),
                            common["dream"], block=8, cache="block", **RULES[rule])


REFRESHED = [*zip([c for c in CACHES if c != "block"], itertools.cycle(["threshold", "first_token", "timesteps"]))]


@pytest.mark.parametrize("cache, rule", [
    *REFRESHED, *(pytest.param(cache, rule, marks=pytest.mark.slow) for cache, rule in itertools.product(
        [c for c in CACHES if c != "block"], ["threshold", "first_token", "timesteps"])
        if (cache, rule) not in REFRESHED)])
def test_refreshing_every_forward_equals_no_cache(networks, cache, rule):
    network, rows = networks["dream"], prompts(1, 3)
    plain = made(block_length=8, **RULES[rule])
    fresh = made(block_length=8, cache=cache, refresh_every=1, **RULES[rule])
    without, with_cache = (generate(*network, rows, d, max_new_tokens=LIMITS, eos_id=-1) for d in (plain, fresh))
    np.testing.assert_array_equal(without.canvas, with_cache.canvas)
    np.testing.assert_array_equal(without.committed_at, with_cache.committed_at)
    np.testing.assert_array_equal(without.ledger.positions["denoise"], with_cache.ledger.positions["refresh"])
    assert not with_cache.ledger.forwards["denoise"].any()


@pytest.mark.parametrize("cache", CACHES)
def test_what_a_cache_saves(networks, cache):
    """The positions evaluated are the policy's windows, to the last one."""
    rows = prompts(1, 3)
    decoder = made(block_length=8, rule="quota", early_stop="none", cache=cache)
    out = generate(*networks["dream"], rows, decoder, max_new_tokens=LIMITS, eos_id=-1)
    for i, limit in enumerate(LIMITS):
        at, total, block = out.committed_at[i, :limit], len(rows[i]) + limit, -1
        fed = {"prefill": len(rows[i]) if cache == "block" else 0, "denoise": 0, "refresh": 0}
        for t in range(1, at.max() + 1):
            masked = np.flatnonzero(at >= t)
            opens, block = masked[0] // 8 != block, masked[0] // 8
            start = 0 if cache == "prompt" else block * 8
            if cache == "delayed":
                start = min(start, np.flatnonzero(at == t - 1)[0] // 8 * 8) if t > 1 else start
            # outputs are shifted: the token before predicts the first
            early = cache in ("free", "delayed") or start in masked
            size = min(8, limit - start) if cache in ("dual", "block") else limit - start
            if opens and (t == 1 and cache != "block" or cache in ("prefix", "dual")):
                fed["refresh"] += total
            elif opens and cache == "block" and t > 1:
                fed["refresh"] += 8
            else:
                fed["denoise"] += size + early
        assert {kind: out.ledger.positions[kind][i] for kind in fed} == fed
        assert out.ledger.after_prefill()[i] == limit + (cache == "block") * ((limit - 1) // 8)


def test_refreshes_come_after_as_many_forwards_as_asked(networks):
    """One token a forward: of the forwards 1, 2, 3, ... every third is a full pass, the first included."""
    rows = prompts(1, 3)
    decoder = made(block_length=8, rule="quota", early_stop="none", cache="free", refresh_every=3)
    out = generate(*networks["dream"], rows, decoder, max_new_tokens=LIMITS, eos_id=-1)
    for i, limit in enumerate(LIMITS):
        assert out.ledger.forwards["refresh"][i] == -(-limit // 3)
        assert out.ledger.positions["refresh"][i] == -(-limit // 3) * (len(rows[i]) + limit)


def rows_alone(networks, decoder, chosen=(0, 2), limits=LIMITS):
    """A batch of ragged rows is each row's own run in another bucket."""
    network, rows = networks["dream"], prompts(1, 3)
    together = generate(*network, rows, decoder, max_new_tokens=limits, seed=5)
    for i in chosen:
        runner = Runner(*network, decoder)
        alone = runner.request([rows[i]], max_new_tokens=limits[i], seed=5, first_row=i, prompt_capacity=20,
                               capacity=48 if i else 32)
        alone = runner.read(runner.run(runner.start(alone)), [0])
        np.testing.assert_array_equal(alone.canvas[0], together.canvas[i, :limits[i]])
        np.testing.assert_array_equal(alone.committed_at[0], together.committed_at[i, :limits[i]])
        for kind in alone.ledger.forwards:
            assert alone.ledger.forwards[kind][0] == together.ledger.forwards[kind][i], kind
            assert alone.ledger.positions[kind][0] == together.ledger.positions[kind][i], kind


@pytest.mark.parametrize("cache", ["free"])
def test_rows_do_not_depend_on_neighbours_or_padding(networks, cache):
    for rule in ("threshold", "timesteps", "margin"):
        rows_alone(networks, made(block_length=8, cache=cache, temperature=0.7, **RULES[rule]), chosen=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, cache", [
    *itertools.product(["blocks"], ["none", *CACHES]), *itertools.product(["whole"], ["none", "prompt"]),
    *itertools.product(["several"], ["none", *CACHES[:-1]])])
def test_every_combination_row_by_row(networks, schedule, cache):
    kind = {"blocks": dict(block_length=8), "whole": dict(block_length=0), "several": dict(
        block_length=4, multi_block=True)}[schedule]
    for rule, settings in RULES.items():
        settings = one_block(settings) if schedule == "whole" else settings
        if schedule == "several" and (settings["rule"] not in ("threshold", "factor") or rule == "first_token"):
            continue
        rows_alone(networks, made(cache=cache, **kind, **settings))
        rows_alone(networks, made(cache=cache, temperature=0.8, top_k=20, commit_temperature=0.1, **kind,
                                             **settings))
        if cache not in ("none", "block"):
            rows_alone(networks, made(cache=cache, refresh_every=3, **kind, **settings))


ANCESTRAL = dict(rule="ancestral", early_stop="none")


def test_ancestral_sampling_tosses_a_coin_for_every_mask(networks):
    """Every mask of a block is committed at a step with probability 1 - s/t, on its own: equal shares of all tokens."""
    rows, steps, G = [[2, 3]] * 256, 4, 16
    out = generate(*networks["llada"], rows, made(block_length=8, steps=2 * steps, **ANCESTRAL),
                   max_new_tokens=G, eos_id=-1)
    assert out.ledger.after_prefill().max() == 2 * steps and out.committed_at.min() >= 1
    for block in range(2):
        at = out.committed_at[:, 8 * block:8 * (block + 1)]
        begins = 0 if block == 0 else out.committed_at[:, :8].max(axis=1, keepdims=True)  # a row may need fewer steps
        counts = np.bincount((at - begins).ravel(), minlength=steps + 1)[1:]
        assert counts.sum() == at.size and (abs(counts - at.size / steps) < 4 * np.sqrt(at.size * 3 / 16)).all()
    first = (out.committed_at[:, :8] == 1).sum(axis=1)  # binomial, which neighbours or quotas would narrow
    assert abs(first.var() - 8 * 3 / 16) < 4 * np.sqrt(2 / 256) * 8 * 3 / 16
    rows_alone(networks, made(block_length=8, steps=6, **ANCESTRAL), chosen=(2,))


def test_confidences_of_the_tempered_distribution(networks):
    """Cut to one token, every draft is certain of itself; the model's own confidences are not."""
    settings = dict(block_length=8, threshold=0.99, top_k=1, early_stop="none")
    run = lambda **more: generate(*networks["dream"], prompts(1, 3), made(**settings, **more),
                                  max_new_tokens=16, eos_id=-1)
    own, greedy = run(temperature=0.5), run()
    np.testing.assert_array_equal(own.canvas, greedy.canvas)  # one token is left to draw
    assert (own.ledger.after_prefill() > 2).all()
    for temperature in (0.0, 0.5):  # Dream truncates what it judges at temperature 0, too
        tempered = run(tempered=True, temperature=temperature)
        assert (tempered.ledger.after_prefill() == 2).all()


def test_streaming_equals_the_compiled_loop(networks):
    network, rows, decoder = networks["dream"], prompts(1, 3), STREAMED
    compiled = generate(*network, rows, decoder, max_new_tokens=LIMITS, seed=3)
    streamed = np.full_like(compiled.canvas, -1)
    for event in stream(*network, rows, decoder, max_new_tokens=LIMITS, seed=3):
        for place, token in zip(event.numbers, event.tokens) if event.committed else ():
            streamed[event.row, place] = token
            assert compiled.committed_at[event.row, place] == event.forward
    np.testing.assert_array_equal(streamed, np.where(compiled.committed_at >= 0, compiled.canvas, -1))


@pytest.mark.slow
def test_the_python_loop_equals_the_compiled_one(networks):
    (model, params), rows = networks["dream"], prompts(1, 3)
    compiled = generate(model, params, rows, STREAMED, max_new_tokens=LIMITS, seed=3)
    request = requests.make(rows, max_new_tokens=LIMITS, capacity=24, eos_id=EOS, mask_id=MASK, seed=3)
    state = python_loop(model.scorer(params), STREAMED, request)
    np.testing.assert_array_equal(np.asarray(state.canvas.committed_at)[:3, :20], compiled.committed_at)
    np.testing.assert_array_equal(np.asarray(state.canvas.tokens)[:3, :20], compiled.canvas)


@pytest.mark.parametrize("one, other", [
    (dict(threshold=0.3), dict(threshold=0.8, temperature=0.5, top_k=3)),
    (dict(rule="quota", steps=6, cache="free", refresh_every=0), dict(
        rule="quota", steps=12, cache="free", refresh_every=3, early_stop="fill")),
    (dict(rule="timesteps", steps=6, commit_temperature=0.1, early_stop="run"), dict(
        rule="timesteps", steps=12, commit_temperature=0.5, early_stop="run", eos_run=2)),
])
def test_numbers_share_a_program(networks, one, other):
    network, rows = networks["dream"], prompts(1, 3)
    generate(*network, rows, made(block_length=8, **one), max_new_tokens=LIMITS)
    count = EXECUTABLES.compiled
    out = generate(*network, rows, made(block_length=8, **other), max_new_tokens=LIMITS, eos_id=-1)
    assert [len(t) for t in out.tokens] == LIMITS
    assert all(MASK not in t for t in out.tokens)
    assert EXECUTABLES.compiled == count


def test_literal_masks_stay(networks):
    model, params = networks["dream"]
    row = [*prompts(1, 1)[0], MASK, 5]
    decoder = made(block_length=8)
    with pytest.raises(ValueError, match=f"prompt 0 holds the mask token {MASK}"):
        generate(model, params, [row], decoder, max_new_tokens=4)
    out = generate(model, params, [row, *prompts(1, 2)], decoder.replace(literal_mask=True),
                   max_new_tokens=LIMITS, eos_id=-1)
    tokens, _, _ = reference.decode(predictor(model, params), row, length=20, mask=MASK, eos=-1, shift=1, block=8)
    assert out.tokens[0].tolist() == tokens


def test_a_budget_is_spent_evenly_whatever_the_blocks(networks):
    model, params = networks["llada"]
    for block_length in (0, 8):
        decoder = made(rule="budget", threshold=1e-9, steps=6, block_length=block_length, early_stop="none")
        out = generate(model, params, [[3, 4]], decoder, max_new_tokens=24, eos_id=-1)
        np.testing.assert_array_equal(np.bincount(out.committed_at[0])[1:], [4] * 6)


def test_a_block_is_no_longer_than_the_answer(networks):
    decoder = made(block_length=256, threshold=0.3)
    assert decoder.capacity(24) == 24
    assert made(block_length=32, cache="block").capacity(24) == 32
    rows = prompts(4, 3)
    shorter = made(block_length=24, threshold=0.3)
    short = generate(*networks["dream"], rows, shorter, max_new_tokens=[24, 20, 9])
    long = generate(*networks["dream"], rows, decoder, max_new_tokens=[24, 20, 9])
    for a, b in zip(short.tokens, long.tokens):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cache", ["dual", "free"])
def test_the_loop_writes_to_its_cache_in_place(networks, cache):
    model, params = networks["dream"]
    decoder = parts.traced(made(block_length=8, cache=cache, threshold=0.3))
    request = requests.make(prompts(1, 3), max_new_tokens=20, capacity=24, eos_id=EOS, mask_id=MASK)
    state = jax.eval_shape(lambda *a: executables.init(model, *a), params, decoder, request)
    arguments = params, decoder, request, state, np.int32(99)
    text = executables.jitted(executables.loop, model).lower(*arguments).compile().as_text()
    shape = ",".join(map(str, state.cache.members[0].keys.shape))
    assert f"f32[{shape}]" in text
    assert not [line for line in text.splitlines() if f"f32[{shape}]" in line and " copy(" in line]


def test_block_models_know_their_blocks(networks):
    model, params = networks["llada"]
    model = model.clone(config=model.config.replace(block_size=8))
    with pytest.raises(ValueError, match="blocks of 4 tokens with BlockCausal.*: the model was trained on blocks of 8"):
        generate(model, params, [[2]], made(block_length=4, cache="block"), max_new_tokens=4)


def test_models_and_ids_that_do_not_fit(networks):
    with pytest.raises(ValueError, match="reach 513 tokens"):
        generate(*networks["llada"], [[2]], MaskedDiffusion(), max_new_tokens=512)
    with pytest.raises(ValueError, match="needs a bidirectional model"):
        generate(*peaked(family="qwen3"), [[2]], MaskedDiffusion(), max_new_tokens=4)
    with pytest.raises(ValueError, match="must be a token of its own"):
        generate(*networks["llada"], [[2]], MaskedDiffusion(), max_new_tokens=4, mask_id=EOS)
