"""Products of few rows: the same values, one form a platform."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import products


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 6), (3, 2, 6), (8, 6), (2, 5, 6)])
def test_every_row_is_multiplied_by_itself(shape):
    x, w = numbers(*shape), numbers(6, 5)
    np.testing.assert_array_equal(products.matmul(x, w), x @ w)
    with mock.patch.object(jax.lax, "platform_dependent", lambda *given, tpu, default: tpu(*given)):
        np.testing.assert_allclose(products.matmul(x, w), x @ w, rtol=1e-6, atol=1e-6)


def test_few_rows_fill_a_register_on_tpus_and_there_alone():
    x, w = jax.ShapeDtypeStruct((1, 1, 6), jnp.float32), jax.ShapeDtypeStruct((6, 5), jnp.float32)
    text = lambda platform, rows: jax.jit(products.matmul).trace(
        jax.ShapeDtypeStruct((rows, 1, 6), jnp.float32), w).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.pad" in text("tpu", 1) and "tensor<8x5xf32>" in text("tpu", 1)
    assert text("tpu", 8).count("stablehlo.dot_general") == 1 and "stablehlo.pad" not in text("tpu", 8)
    plain = jax.jit(jnp.matmul).trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.pad" not in text("cpu", 1) and text("cpu", 1).count("dot_general") == plain.count("dot_general")


def test_gradients_are_those_of_the_product():
    x, w = numbers(2, 1, 6), numbers(6, 5)
    got = jax.grad(lambda x, w: jnp.sum(jnp.sin(products.matmul(x, w))), (0, 1))(x, w)
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
