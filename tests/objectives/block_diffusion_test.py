"""Block diffusion against one forward pass for every block, and its degenerate rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build
from dlm_jax.objectives import BlockDiffusion, MaskedDiffusion, block_diffusion, losses, noise
from tests.conftest import random_params, tiny_config
from tests.objectives import dense
from tests.objectives.dense import Spelled
from tests.objectives.masked_diffusion_test import EOS, MASK, SIZES, make_batch

MODEL = build.build(tiny_config("a2d-qwen3", **SIZES))
PARAMS = random_params(MODEL)
K = 4


def make_objective(**changes):
    return BlockDiffusion(**{"mask_id": MASK, "eos_id": EOS, "block_size": K, "head_chunk": 3} | changes)


def rate_and_weight(objective, t):
    if objective.schedule == "linear":
        rate, slope = t, 1.0
    else:
        rate, slope = np.cos(np.pi / 2 * (1 - t)), np.pi / 2 * np.sin(np.pi / 2 * (1 - t))
    return rate, 1.0 if objective.weighting == "uniform" else slope / (rate + 1e-6)


def reference(batch, drawn, objective):
    """One pass a block: [clean blocks before it, the noisy block], blocks causal, the last one scored."""
    tokens, B = np.array(batch["tokens"]), len(batch["tokens"])
    rows = []
    for row in range(B):
        start, end = int(batch["prompt_length"][row]), int(batch["length"][row])
        begins = np.arange(start % K - K if objective.align == "response" else 0, tokens.shape[1], K)  # of blocks
        if objective.padding == "eos":
            longest = next((b for b in begins if b >= max(batch["length"])), tokens.shape[1])
            tokens[row, end:longest] = EOS
            end = longest
        rows.append((start, end, begins))
    taught, spelled = sum(end - start for start, end, _ in rows), Spelled(tokens.shape[1])
    for row, (start, end, begins) in enumerate(rows):
        for first in begins:
            block = range(max(first, 0), min(first + K, end))
            if not block:
                continue
            rates = {i: rate_and_weight(objective, float(drawn.time[row, i])) for i in block}
            masked = [i for i in block if i >= start and drawn.uniform[row, i] < rates[i][0]]
            seen = tokens[row, : block[-1] + 1].copy()
            seen[masked] = MASK
            of = np.searchsorted(begins, np.arange(len(seen)), side="right")
            here = spelled.forward(seen, of[None] <= of[:, None])
            for i in masked:
                share = {"sequence": B * (end - start), "token": taught, "batch": B}[objective.normalisation]
                spelled.predict(here, i, tokens[row, i], rates[i][1] / share)
    return spelled


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradient(params, rows, objective):
    return jax.value_and_grad(lambda p: objective.rows_loss(MODEL.scorer(p), rows)[0])(params)


@pytest.mark.parametrize("changes", [
    {}, dict(schedule="cosine", normalisation="sequence", time="sequence", align="row"),
    dict(weighting="uniform", normalisation="batch", interval=(0.4, 0.9)), dict(padding="ignore"),
], ids=["default", "cosine", "clipped", "ragged"])
def test_loss_and_gradient_are_those_of_one_pass_a_block(changes):
    batch, objective = make_batch(B=3, T=10), make_objective(**changes)
    key = jax.random.key(1)
    rows = objective.prepare(batch, key)
    block = jnp.maximum(rows.block, 0) if objective.time == "block" else None  # the reference finds blocks by itself
    drawn = noise.draw(key, batch["example_id"], 10, objective.interval, block=block)
    assert 0 < jnp.sum(rows.labels != losses.IGNORE)
    want, gradient = reference(batch, drawn, objective).value_and_gradient(MODEL, PARAMS)
    got, mine = value_and_gradient(PARAMS, rows, objective)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(want)), mine, gradient)


def test_the_rows_stay_clean_and_the_noisy_stream_is_masked():
    batch, objective = make_batch(B=64, T=40), make_objective(interval=(0.3, 0.6))
    rows = objective.prepare(batch, jax.random.key(0))
    tokens, positions, rule = block_diffusion.streams(rows, objective)
    masked = np.asarray(rows.labels) != losses.IGNORE
    np.testing.assert_array_equal(np.asarray(tokens[:, 40:]) == MASK, masked)
    np.testing.assert_array_equal(tokens[:, :40], rows.tokens)
    np.testing.assert_array_equal(positions, np.tile(np.arange(40), (64, 2)))
    assert (rule.query_length, rule.key_length) == (80, 80)
    index = np.arange(40)
    taught = (index >= np.asarray(batch["prompt_length"])[:, None]) & (np.asarray(rows.block) >= 0)
    assert not masked[~taught].any()
    assert 0.4 < masked[taught].mean() < 0.5  # the clipped interval's mean rate is 0.45


@pytest.mark.parametrize("which", dense.DEGENERATE)
def test_degenerate_rows_have_finite_loss_and_gradient(which):
    objective, batch = make_objective(padding="ignore"), make_batch(B=2)
    dense.check_degenerate(which, batch, objective, lambda rows, drawn: value_and_gradient(
        PARAMS, block_diffusion.arrange(rows, jnp.zeros_like(batch["tokens"]), drawn, objective), objective))


def test_blocks_begin_where_the_response_does():
    batch = make_batch(B=64, T=30)
    block = np.asarray(make_objective(block_size=5).prepare(batch, jax.random.key(0)).block)
    for row, start in enumerate(np.asarray(batch["prompt_length"])):
        real = block[row][block[row] >= 0]
        assert real[0] == 0 and set(np.diff(real)) <= {0, 1}
        begins = np.flatnonzero(np.diff(real)) + 1
        assert (begins % 5 == start % 5).all() and (start in begins)
        assert len(real) == 30 or (len(real) - start) % 5 == 0  # taught to the end of the last block


@pytest.mark.parametrize("antithetic", [False, True])
def test_times_are_drawn_as_asked(monkeypatch, antithetic):
    seen, original = [], noise.draw
    monkeypatch.setattr(noise, "draw", lambda *args, **options: seen.append(options) or original(*args, **options))
    make_objective(antithetic=antithetic).prepare(make_batch(B=2, T=8), jax.random.key(0))
    assert [options["antithetic"] for options in seen] == [antithetic]


def test_one_block_over_the_row_is_masked_diffusion():
    batch = make_batch(B=4, T=12)
    settings = dict(mask_id=MASK, eos_id=EOS, normalisation="sequence", padding="ignore")
    score, key = MODEL.scorer(PARAMS), jax.random.key(5)
    loss = lambda objective: jax.jit(lambda: objective.loss(score, batch, key)[0])()
    one = loss(BlockDiffusion(block_size=12, align="row", **settings))
    other = loss(MaskedDiffusion(eps=1e-3, **settings))
    np.testing.assert_allclose(one, other, rtol=2e-4)  # 1 / (t + 1e-6) and 1 / t


@pytest.mark.parametrize("changes, message", [
    (dict(block_size=0), "block_size = 0"), (dict(schedule="sine"), "'sine'.*linear.*cosine"),
    (dict(interval=(0.5, 0.5)), "interval = "), (dict(interval=(0.5, 1.5)), "interval = "),
    (dict(interval=(0.5,)), "interval = "), (dict(weighting="t"), "'t'.*schedule.*uniform"),
    (dict(time="row"), "'row'.*block.*sequence"), (dict(align="end"), "'end'.*response.*row"),
    (dict(normalisation="mean"), "'mean'"),
])
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_objective(**changes)


@pytest.mark.parametrize("family, changes, message", [
    ("qwen3", {}, "'block_diffusion' needs a bidirectional model.*to-diffusion"),
    ("a2d-qwen3", dict(logit_shift=1), "shifted by 1.*to-diffusion --shift 0"), ("Dream", {}, "shifted by 1"),
])
def test_models_that_cannot_denoise_blocks_are_refused(family, changes, message):
    model = build.build(tiny_config(family, **SIZES, **changes))
    with pytest.raises(ValueError, match=message):
        make_objective().check(model.scorer({}))
