"""Products of few rows on a TPU are those of any rows anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import products
from pallas_kernels import use_backend


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def formula(name):
    return {"matmul": "...d,df->...f", "project": "...d,dnh->...nh", "merge": "...nh,nhd->...d",
            "logits": "...d,vd->...v"}[name]


WEIGHTS = {"matmul": (6, 5), "project": (6, 3, 4), "merge": (2, 3, 5), "logits": (7, 6)}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("lead", [(1, 1), (1,), (3, 2), (8,), (2, 5), (3, 200)])
@pytest.mark.parametrize("backend", ["xla", "tpu"])
def test_every_row_is_multiplied_by_itself(name, lead, backend):
    w = numbers(*WEIGHTS[name])
    x = numbers(*lead, *((2, 3) if name == "merge" else (6,)))
    with use_backend(backend):
        got = getattr(products, name)(x, w)
    np.testing.assert_allclose(got, jnp.einsum(formula(name), x, w), rtol=1e-5, atol=1e-5)


def test_few_rows_fill_a_register_on_tpus_alone():
    def dots(backend, rows):
        with use_backend(backend):
            jaxpr = jax.make_jaxpr(lambda x, w: products.project(x, w))(jnp.ones((rows, 1, 6)), jnp.ones((6, 3, 4)))
        return [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]

    assert dots("tpu", 1) == [(8, 3, 4)] and dots("tpu", 9) == [(9, 3, 4)]
    assert dots("tpu", 513) == dots("xla", 513) == [(513, 1, 12)]
    assert dots("xla", 1) == [(1, 1, 12)]


def test_gradients_are_those_of_the_product():
    x, w = numbers(2, 1, 6), numbers(6, 3, 4)
    loss = lambda x, w: jnp.sum(jnp.sin(products.project(x, w)))
    with use_backend("tpu"):
        got = jax.grad(loss, (0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, jax.grad(loss, (0, 1))(x, w))
