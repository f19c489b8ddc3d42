"""Rotary embedding: against float64, and its defining properties."""

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn.rope import apply_rope


def rotate_float64(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions.astype(np.float64)[..., None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("longest", [64, 4096, 32768])
def test_matches_float64_at_any_positions(theta, longest):
    draw = np.random.default_rng(longest)
    x = draw.standard_normal((2, 50, 3, 16))
    positions = draw.integers(0, longest, (2, 50))
    got = apply_rope(jnp.asarray(x, jnp.float32), jnp.asarray(positions), theta)
    # float32 angles are off by half a unit in the last place of the largest angle
    np.testing.assert_allclose(got, rotate_float64(x, positions, theta), atol=2e-6 + 6e-7 * longest, rtol=0)


def test_position_zero_is_the_identity_and_norms_are_kept():
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    np.testing.assert_array_equal(apply_rope(x, jnp.zeros((1, 5), jnp.int32), 1e4), x)
    turned = apply_rope(x, jnp.array([[3, 1, 4, 1, 5]]), 1e4)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("shift", [1, 100])
def test_products_depend_on_differences_only(shift):
    draw = np.random.default_rng(1)
    q, k = (draw.standard_normal((1, 6, 1, 16)).astype(np.float32) for _ in range(2))
    positions = jnp.asarray(draw.integers(0, 50, (1, 6)))
    product = lambda p: jnp.einsum("btnh,bsnh->bts", apply_rope(q, p, 1e4), apply_rope(k, p, 1e4))
    np.testing.assert_allclose(product(positions + shift), product(positions), atol=2e-4)


def test_bfloat16_vectors_keep_exact_positions():
    x = jnp.ones((1, 2, 1, 16), jnp.bfloat16)
    a, b = apply_rope(x, jnp.array([[4095, 4096]]), 1e4)[0]
    assert a.dtype == jnp.bfloat16
    assert not jnp.array_equal(a, b), "4095 and 4096 are one number in bfloat16"
