"""Truncation against numpy, and draws against the distribution they claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dlm_jax.decode import sampling

V = 11


def truncated(logits, k, p):
    """Plain numpy: keep the k likeliest, then the smallest set of them that holds mass p."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: k or V]
    mass = np.exp(logits[kept] - logits[kept].max())
    mass /= mass.sum()
    count = int(np.searchsorted(np.cumsum(mass), p) + 1) if p < 1 else len(kept)
    out = np.full(V, -np.inf)
    out[kept[:count]] = logits[kept[:count]]
    return out


@pytest.mark.parametrize("size", [1, 2, 11, 1000, 24_577])
def test_likeliest_is_argmax(size):
    draw = np.random.default_rng(size)
    logits = draw.integers(-3, 4, (4, 5, size)).astype(np.float32)  # many equals
    logits[0] = draw.normal(size=(5, size))
    logits[1, 0], logits[1, 1, size // 2:], logits[2, 0] = -np.inf, -np.inf, 3e38
    got = jax.jit(sampling.likeliest)(logits)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, logits.argmax(axis=-1))
    assert 0 <= sampling.likeliest(jnp.full((1, size), jnp.nan))[0] < size  # a token, whatever happened before


@pytest.mark.parametrize("k, p", [(0, 1.0), (3, 1.0), (V + 5, 1.0), (0, 0.7), (4, 0.5), (1, 0.9), (0, 1e-6)])
def test_truncation_matches_numpy(k, p):
    logits = np.random.default_rng(0).normal(size=(5, V)).astype(np.float32) * 2
    ours = jax.jit(sampling.truncate)(logits, k, p)
    np.testing.assert_allclose(ours, np.stack([truncated(row, k, p) for row in logits]), rtol=1e-6)


@pytest.mark.parametrize("temperature, k, p", [(1.0, 0, 1.0), (0.6, 5, 1.0), (1.3, 0, 0.8)])
def test_draws_follow_the_distribution(temperature, k, p):
    draws = 20000
    logits = np.random.default_rng(1).normal(size=V).astype(np.float32)
    keys = sampling.draw_keys(jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32),
                              jnp.arange(draws)[None])
    tokens = jax.jit(sampling.sample)(jnp.broadcast_to(logits, (1, draws, V)), keys, temperature, k, p)
    expected = np.exp(truncated(logits / temperature, k, p))
    expected = expected / expected.sum() * draws
    seen = np.bincount(np.asarray(tokens)[0], minlength=V)
    live = expected > 0
    assert (seen[~live] == 0).all()
    assert stats.chisquare(seen[live], expected[live]).pvalue > 0.01


def test_temperature_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, V)), jnp.float32)
    keys = sampling.draw_keys(jax.random.split(jax.random.key(0), 2), jnp.zeros(2, jnp.int32), jnp.zeros((2, 4), int))
    np.testing.assert_array_equal(sampling.sample(logits, keys, 0.0, 3, 0.5), logits.argmax(-1))
