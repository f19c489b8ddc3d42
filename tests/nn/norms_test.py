"""RMSNorm against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn.norms import rms_norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_matches_float64(scale):
    draw = np.random.default_rng(0)
    x, weight = scale * draw.standard_normal((3, 5, 24)), draw.standard_normal(24)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-6), expected,
                               rtol=2e-5, atol=1e-6)


def test_bfloat16_averages_in_float32():
    # 4096 squares of 1 sum to 256 when added up in bfloat16
    x = jnp.ones((1, 4096), jnp.bfloat16)
    got = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 0.0)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), 1.0)


def test_zero_vector_stays_zero():
    np.testing.assert_array_equal(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6), 0.0)
