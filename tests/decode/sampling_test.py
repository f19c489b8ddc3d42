"""Truncation against numpy, and draws against the distribution they claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dlm_jax.decode import sampling
from dlm_jax.decode.sampling import Sampler

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
    tokens = jax.jit(Sampler.draw)(Sampler(temperature, k, p), jnp.broadcast_to(logits, (1, draws, V)), keys)
    expected = np.exp(truncated(logits / temperature, k, p))
    expected = expected / expected.sum() * draws
    seen = np.bincount(np.asarray(tokens)[0], minlength=V)
    live = expected > 0
    assert (seen[~live] == 0).all()
    assert stats.chisquare(seen[live], expected[live]).pvalue > 0.01


def test_temperature_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, V)), jnp.float32)
    keys = sampling.draw_keys(jax.random.split(jax.random.key(0), 2), jnp.zeros(2, jnp.int32), jnp.zeros((2, 4), int))
    np.testing.assert_array_equal(Sampler(0.0, 3, 0.5).draw(logits, keys), logits.argmax(-1))


@pytest.mark.parametrize("fields, message", [
    (dict(temperature=-1), "temperature = -1"), (dict(temperature=float("nan")), "temperature = nan"),
    (dict(top_k=2.5), "top_k = 2.5: expected an int"), (dict(top_k=-1), "top_k = -1"), (dict(top_p=0.0), "top_p = 0.0"),
    (dict(top_p=1.5), "top_p = 1.5")])
def test_bad_fields_are_refused_when_a_sampler_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**fields)


def test_every_draw_has_a_key_of_its_own():
    """Rows, forwards and places differ, and what stands beside a draw does not matter."""
    rows = jax.random.split(jax.random.key(0), 3)
    data = lambda *arguments: np.asarray(jax.random.key_data(sampling.draw_keys(*arguments)))
    keys = data(rows, jnp.array([4, 4, 5]), jnp.array([[0, 7], [0, 7], [0, 8]]))
    assert len({tuple(key) for key in keys.reshape(6, -1)}) == 6
    np.testing.assert_array_equal(data(rows[1:2], jnp.array([4]), jnp.array([[7, 3, 0]]))[0, [2, 0]], keys[1])
    assert (data(rows[:1], jnp.array([5]), jnp.array([[0]]))[0, 0] != keys[0, 0]).any()
