"""The Monte-Carlo bound against enumeration over all masks and all orders, its draws, and its checks."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.evals import likelihood
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config

MASK, L = 19, 3
SIZES = dict(vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
MODELS = {family: build.build(tiny_config(family, mask_token_id=MASK, max_position_embeddings=64, **SIZES))
          for family in ("llada", "Dream")}
PARAMS = {family: random_params(model) for family, model in MODELS.items()}
PROMPT, ANSWER = [4, 7, 2, 9], [5, 11, 1]
SUBSETS = np.array([m for m in itertools.product([False, True], repeat=L) if any(m)])


def logp(family, masks, prompt=None, guidance=None):
    """log p of each answer token given the others unmasked: (masks, L), from whole rows of logits."""
    model, start = MODELS[family], len(PROMPT)
    row = np.tile(PROMPT + ANSWER, (len(masks), 1))
    row[:, start:][masks] = MASK

    def logits(rows):
        out = np.asarray(model.scorer(PARAMS[family])(jnp.asarray(rows, jnp.int32)), np.float64)
        return out[:, start - model.config.shift: start - model.config.shift + L]

    found = logits(row)
    if guidance is not None:
        row[:, :start] = MASK
        free = logits(row)
        found = free + (guidance + 1) * (found - free)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return np.take_along_axis(found, np.broadcast_to(np.array(ANSWER)[:, None], (len(masks), L, 1)), -1)[..., 0]


def bound(family, masks, guidance=0.0):
    n, tokens = len(masks), np.array(PROMPT + ANSWER, np.int32)
    noisy = np.tile(tokens, (n, 1))
    noisy[:, len(PROMPT):][masks] = MASK
    each = lambda value: np.full(n, value, np.int32)
    rows = np.tile(tokens, (n, 1)), noisy, masks.mean(1).astype(np.float32), each(len(PROMPT)), each(len(tokens))
    return np.asarray(likelihood.compiled_bound(MODELS[family], PARAMS[family], rows, MASK, guidance), np.float64)


@pytest.mark.parametrize("family, guidance", [("llada", 0.0), ("Dream", 0.0), ("llada", 1.5), ("Dream", 0.5)])
def test_one_draw_is_the_masked_tokens_over_their_share(family, guidance):
    want = (logp(family, SUBSETS, guidance=guidance or None) * SUBSETS).sum(1) / SUBSETS.mean(1)
    np.testing.assert_allclose(bound(family, SUBSETS, guidance), want, rtol=2e-5)


def test_the_expectation_is_the_mean_over_orders_and_at_most_the_likelihood_of_their_mixture():
    # a uniform number of masks and then uniform places: the exact expectation of the Monte-Carlo draws
    chance = np.array([1 / L / math.comb(L, int(m.sum())) for m in SUBSETS])
    expectation = float(chance @ bound("llada", SUBSETS))
    table = dict(zip(map(tuple, SUBSETS), logp("llada", SUBSETS)))
    orders = []
    for order in itertools.permutations(range(L)):
        hidden, total = [True] * L, 0.0
        for i in order:
            total += table[tuple(hidden)][i]
            hidden[i] = False
        orders.append(total)
    np.testing.assert_allclose(expectation, np.mean(orders), rtol=1e-5)
    assert expectation < np.log(np.mean(np.exp(orders)))  # Jensen, strict as the orders differ


@pytest.mark.parametrize("length, samples", [(1, 4), (3, 12), (5, 7), (7, 2), (4, 4)])
def test_numbers_masked_are_uniform_and_places_too(length, samples):
    drawn = np.stack([likelihood.draw(length, samples, 0, row) for row in range(4000)])
    count = drawn.sum(-1)
    assert count.min() == 1 and count.max() == length
    for sample in range(samples):  # every draw alone is uniform, so every draw alone is unbiased
        share = np.bincount(count[:, sample], minlength=length + 1)[1:] / 4000
        np.testing.assert_allclose(share, 1 / length, atol=0.04)
    np.testing.assert_allclose(drawn.mean((0, 1)), (length + 1) / 2 / length, atol=0.03)
    if samples % length == 0:
        assert (np.sort(count, axis=1) == np.repeat(np.arange(1, length + 1), samples // length)).all()


def test_estimates_are_close_to_the_expectation():
    chance = np.array([1 / L / math.comb(L, int(m.sum())) for m in SUBSETS])
    got = likelihood.log_likelihood(MODELS["llada"], PARAMS["llada"], [PROMPT], [ANSWER], samples=600, batch_size=200)
    one = bound("llada", SUBSETS)
    expectation = chance @ one
    deviation = np.sqrt(chance @ (one - expectation) ** 2)
    assert abs(got[0] - expectation) < 3 * deviation / np.sqrt(600)


def test_a_row_is_scored_alike_beside_any_other_and_in_any_batch():
    prompts, answers = [PROMPT, [3], []], [ANSWER, [8, 8, 9, 2, 1], [6]]
    score = lambda *rows, **options: likelihood.log_likelihood(
        MODELS["Dream"], PARAMS["Dream"], *rows, samples=6, **options)
    together = score(prompts, answers, batch_size=4)
    np.testing.assert_array_equal(score(prompts, answers, batch_size=4), together)
    np.testing.assert_allclose(score(prompts, answers, batch_size=32), together, rtol=1e-5)
    np.testing.assert_allclose(score(prompts[:1], answers[:1], batch_size=6), together[:1], rtol=1e-5)
    assert (score(prompts, answers, batch_size=4, seed=1) != together)[:2].all()
    assert (score(prompts, answers, batch_size=4, cfg_scale=1.0) != together)[:2].all()
    assert score([], []).shape == (0,)


@pytest.mark.parametrize("changes, message", [
    (dict(prompts=[[2, MASK]]), "prompt 0 contains the mask token 19"),
    (dict(answers=[[]]), "answer 0 is empty"), (dict(answers=[[MASK]]), "answer 0 contains the mask token 19"),
    (dict(answers=[[20]]), "token id 20, outside the vocabulary of 20"), (dict(prompts=[[-1]]), "token id -1"),
    (dict(answers=[[1], [1]]), "1 prompts but 2 answers"), (dict(answers=[[1] * 61]), "row 0 has 65 tokens.*64"),
    (dict(samples=0), "samples = 0"), (dict(batch_size=0), "batch_size = 0"),
    (dict(cfg_scale=-1.0), "cfg_scale = -1.0"), (dict(cfg_scale=float("nan")), "cfg_scale = nan"),
    (dict(mask_id=20), "mask_id = 20 lies outside"),
])
def test_bad_input_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rows = {"prompts": [PROMPT], "answers": [ANSWER]}
        likelihood.log_likelihood(MODELS["llada"], PARAMS["llada"], **rows | changes)


@pytest.mark.parametrize("changes, message", [
    (dict(family="qwen3"), "a qwen3 model is causal.*to-diffusion"), (dict(mask_token_id=None), "mask_id is None"),
])
def test_models_that_cannot_be_asked_are_refused(changes, message):
    config = MODELS["llada"].config.replace(**changes)
    with pytest.raises(ValueError, match=message):
        likelihood.log_likelihood(build.build(config), {}, [PROMPT], [ANSWER])
