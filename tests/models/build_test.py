"""Parameters: made, described without being made, and given logical axes."""

import jax
import jax.numpy as jnp
import pytest

from dlm_jax.models import build
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from tests.conftest import tiny_config


def init(model, seed):
    return jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(seed))


@pytest.mark.parametrize("family, tied", [("qwen3", False), ("qwen2", True)])
def test_abstract_and_logical_trees_match_real_parameters(family, tied):
    model = build.build(tiny_config(family, tie_word_embeddings=tied))
    params = init(model, 0)
    assert type(params) is dict and type(params["layers"]) is dict
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert describe(build.abstract_params(model)) == describe(params)
    axes = build.logical_axes(model)
    assert jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, jax.P)) == jax.tree.structure(params)
    jax.tree.map(lambda spec, x: None if len(spec) == x.ndim else pytest.fail(f"{spec} for shape {x.shape}"), axes,
                 params, is_leaf=lambda x: isinstance(x, jax.P))
    assert axes["layers"]["attention"]["q_proj"] == jax.P("layers", "embed", "heads", None)


def test_fresh_parameters_are_seeded_and_scaled():
    model = build.build(tiny_config(initializer_range=0.05))
    a, b, c = (init(model, seed) for seed in (0, 0, 1))
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, a, b)))
    assert not jnp.array_equal(a["embed"], c["embed"])
    assert abs(float(a["embed"].std()) - 0.05) < 0.005
    assert not jnp.array_equal(a["layers"]["mlp"]["up_proj"][0], a["layers"]["mlp"]["up_proj"][1])
    assert bool(jnp.all(a["layers"]["input_norm"] == 1))


def test_equal_modules_share_one_compile():
    params = init(build.build(tiny_config()), 0)
    traces = []

    def score(model, params, tokens):
        traces.append(1)
        return model.scorer(params)(tokens)

    jitted = jax.jit(score, static_argnums=0)
    for _ in range(2):
        jitted(build.build(tiny_config()), params, jnp.zeros((1, 3), jnp.int32))
    assert len(traces) == 1


def test_unrolled_layers_are_the_same_network():
    model = build.build(tiny_config())
    params = init(model, 3)
    tokens = jnp.arange(14).reshape(2, 7)
    unrolled = build.unroll(model, params)
    assert build.abstract_params(unrolled[0]).keys() == unrolled[1].keys()
    assert jnp.allclose(model.scorer(params)(tokens), unrolled[0].scorer(unrolled[1])(tokens), atol=1e-5)
    with pytest.raises(ValueError, match="unrolled already"):
        build.unroll(*unrolled)


@pytest.mark.parametrize("scan", [True, False])
def test_an_empty_cache_spreads_its_heads_as_the_weights_are_spread(scan):
    """Without a word on where, each device would hold the heads of all."""
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    model = build.build(tiny_config(vocab_size=96))
    params = init(model, 0)
    model, params = (model, params) if scan else build.unroll(model, params)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(params, sharding.params(model, mesh))
    cache, _ = jax.jit(lambda p: (model.scorer(p).init_cache(4, 16), p["embed"][0]))(spread)
    for x in jax.tree.leaves(cache):
        assert x.sharding.spec[2] == "tensor" and x.shape == (3 if scan else 1, 4, 2, 16, 12)
        assert not x.any() and x.dtype == jnp.float32
