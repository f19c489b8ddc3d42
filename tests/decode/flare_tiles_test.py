"""Laws and draws read by tiles, beside the sampler's over the whole vocabulary; and what is never held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dlm_jax.decode import ARTrust, Sampler, TruncatedArgmax, parts, sampling
from dlm_jax.decode import request as requests
from dlm_jax.decode.flare import tiles
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config

V, D, TILES = 3000, 8, (64, 1100, 3000)


class Table:
    """A scorer that is its head."""

    vocab_size = V

    def __init__(self, scale: float):
        self.table = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)) * scale, jnp.float32)

    def head(self, hidden):
        return hidden @ self.table.T

    def head_tile(self, hidden, index, count):
        size = -(-V // count)
        ids = jnp.minimum(index * size, V - size) + jnp.arange(size)
        return jnp.where(ids >= index * size, hidden @ self.table[ids].T, -jnp.inf), ids


HIDDEN = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, D)), jnp.float32)
KEYS = sampling.draw_keys(jax.random.split(jax.random.key(0), 2), jnp.array([3, 4]), jnp.arange(6).reshape(2, 3))


def _read(scale, tile):
    """Returns log probabilities of everything, draws and likeliest tokens, for a traced sampler."""
    score = Table(scale)

    @jax.jit
    def run(sampler):
        rows = tiles.Rows(score, HIDDEN, tile)
        law, ((top, _), total) = tiles.law(rows, sampler, tiles.best(rows.shape), tiles.log_sum(rows.shape))
        (token, value), logits = rows.read(tiles.drawn(law, KEYS), tiles.of(jnp.full(rows.shape, 7)))
        return law.log(score.head(HIDDEN)), token, value, top, total, logits

    return run


@pytest.fixture(scope="module", params=[0.3, 2.0], ids=["flat", "peaked"])
def reads(request):
    return Table(request.param), {tile: _read(request.param, tile) for tile in TILES}


@pytest.mark.parametrize("temperature, k, p", [
    (1.0, 0, 1.0), (0.7, 50, 0.95), (1.0, 5, 1.0), (1.0, 63, 1.0), (1.3, 0, 0.4), (1.0, 64, 1.0), (1.0, 400, 0.9),
    (1.0, 0, 0.9), (0.5, V + 5, 0.95), (1.0, 1, 0.5)])
def test_laws_and_draws_are_those_of_the_whole_vocabulary(reads, temperature, k, p):
    score, runs = reads
    sampler, logits = Sampler(temperature, k, p), score.head(HIDDEN)
    expected = np.asarray(jax.nn.log_softmax(sampler.shaped(logits), axis=-1))
    found = {tile: [np.asarray(x) for x in run(parts.traced(sampler))] for tile, run in runs.items()}
    for law, token, value, top, total, of in found.values():
        np.testing.assert_array_equal(np.isfinite(law), np.isfinite(expected))
        np.testing.assert_allclose(law, expected, atol=2e-5)
        np.testing.assert_array_equal(token, found[TILES[0]][1])
        np.testing.assert_allclose(value, found[TILES[0]][2], atol=2e-5)
        np.testing.assert_array_equal(top, logits.argmax(-1))
        np.testing.assert_allclose(total, jax.nn.logsumexp(logits, axis=-1), atol=2e-5)
        np.testing.assert_allclose(of, logits[..., 7], atol=2e-5)


@pytest.mark.parametrize("size, tied", [(97, False), (128, True), (400, False), (1024, True)])
def test_tiles_of_a_head_are_its_rows(size, tied):
    model = build.build(tiny_config("qwen3", vocab_size=size, num_layers=1, tie_word_embeddings=tied))
    score = model.scorer(random_params(model))
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    whole = score.head(hidden)
    for count in (2, 3, 5):
        found = np.full(whole.shape, -np.inf)
        for index in range(count):
            logits, ids = score.head_tile(hidden, jnp.int32(index), count)
            own = np.isfinite(logits[0, 0])
            assert (np.diff(ids) > 0).all() and (found[..., ids[own]] == -np.inf).all(), "a token in two tiles"
            found[..., ids[own]] = logits[..., own]
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)


def test_draws_follow_the_law():
    draws, law = 20_000, tiles.Law(jnp.float32(1.0), jnp.full((1, 20_000), -1.0), jnp.full((1, 20_000), 0.7))
    logits = np.random.default_rng(1).normal(size=11).astype(np.float32)
    keys = sampling.draw_keys(jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32), jnp.arange(draws)[None])
    reading = tiles.drawn(law, keys)
    step = jax.jit(reading.read)
    carry = reading.start
    for start in (0, 4, 8):  # as tiles would
        ids = np.arange(start, min(start + 4, 11), dtype=np.int32)
        carry = step(carry, jnp.broadcast_to(logits[ids], (1, draws, len(ids))), ids)
    expected = np.where(logits >= -1, np.exp(logits.astype(float)), 0)
    seen, live = np.bincount(np.asarray(carry[0])[0], minlength=11), expected > 0
    assert (seen[~live] == 0).all() and (~live).any()
    assert stats.chisquare(seen[live], expected[live] / expected.sum() * draws).pvalue > 0.01


@pytest.mark.parametrize("policy", [ARTrust().policy, TruncatedArgmax()], ids=lambda policy: type(policy).__name__)
def test_the_whole_vocabulary_is_never_held(policy):
    """The compiler's figure for the temporaries of a round, beside one float32 tensor of its rows' probabilities."""
    size, N, B = 131_072, 6, 8
    model = build.build(tiny_config("qwen3", vocab_size=size, num_layers=1, hidden_size=16, mask_token_id=3))
    params = build.abstract_params(model)
    decoder = parts.traced(ARTrust(horizon=N, policy=policy, temperature=1.0, top_k=50, top_p=0.95, tile=2048))
    request = requests.make([[2, 3]] * B, max_new_tokens=8, capacity=32, eos_id=1, mask_id=3)
    state = jax.eval_shape(lambda params: decoder.init(model.scorer(params), request), params)
    step = jax.jit(lambda params, state: decoder.step(model.scorer(params), request, state))
    held = step.lower(params, state).compile().memory_analysis().temp_size_in_bytes
    assert held < B * (3 * N - 2) * size * 4 / 8
