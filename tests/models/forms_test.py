"""Whole models whose attention runs in the kernels' form, against the dense form: rules, caches, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build
from dlm_jax.nn import attention
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from pallas_kernels import use_backend
from pallas_kernels.attention.tiles import pad_mask
from tests.conftest import random_params, tiny_config

B, T, S = 2, 10, 14
VALID = jnp.ones((B, T), bool).at[1, 7:].set(False)
BLOCK = jnp.asarray([[0, 0, 1, 1, 2], [0, 1, 1, 1, -1]], jnp.int32)
RULES = {"causal": vis.causal(VALID), "bidirectional": vis.bidirectional(VALID), "grouped": vis.two_stream(BLOCK)}
INDEX = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
TOKENS = jax.random.randint(jax.random.key(0), (B, T), 0, 90)
REFERENCE = dataclasses.replace(build.build(tiny_config(num_layers=2, vocab_size=96)), attention_form="reference")
KERNEL = dataclasses.replace(REFERENCE, attention_form="kernel")
PARAMS = random_params(REFERENCE)


@functools.partial(jax.jit, static_argnums=0)
def trained(model, params, rule):
    """Logits without a cache, and a gradient of all parameters."""
    def total(params):
        logits = model.scorer(params)(TOKENS, INDEX, rule)
        return jnp.sum(jnp.sin(logits)), logits
    gradient, logits = jax.grad(total, has_aux=True)(params)
    return logits, gradient


@functools.partial(jax.jit, static_argnums=0)
def cached(model, params, rule):
    """Hidden states by a cache that is written with room to spare, and by one that is only read."""
    score = model.scorer(params)
    written, cache = score.hidden(TOKENS, Pass(INDEX, pad_mask(rule, T, S), INDEX), score.init_cache(B, S))
    return written, score.hidden(TOKENS, Pass(INDEX, pad_mask(rule, T, S + T)), cache)[0]


@pytest.mark.parametrize("run", [trained, cached])
@pytest.mark.parametrize("name", RULES)
def test_a_model_of_kernels_is_the_reference(name, run):
    want, got = (run(model, PARAMS, RULES[name]) for model in (REFERENCE, KERNEL))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max())), got, want)
    if run is cached:
        np.testing.assert_allclose(*got, atol=1e-5)


def test_a_model_of_kernels_decodes_in_interpretation():
    """Fewer queries than cache entries: the kernel's decode form, as on a TPU."""
    with use_backend("interpret"):  # a function of its own: what is traced here must not be found by others
        got = jax.jit(lambda params, rule: cached.__wrapped__(KERNEL, params, rule)[0])(PARAMS, RULES["grouped"])
    np.testing.assert_allclose(got, cached(REFERENCE, PARAMS, RULES["grouped"])[0], atol=1e-5)


@pytest.mark.parametrize("name", ["causal", "grouped"])
def test_eight_devices_run_the_kernel_each_on_its_own_rows_and_heads(name):
    """Values and gradients of a model spread over rows, parameters and heads, with the mesh told or found."""
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    rule, more = RULES[name], lambda x: jnp.concatenate([x, x[::-1]])
    want = trained(REFERENCE, PARAMS, rule)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rows = jax.device_put((more(TOKENS), more(INDEX), jax.tree.map(more, rule)), sharding.rows(mesh))
    params = jax.device_put(PARAMS, sharding.params(KERNEL, mesh))

    def total(params, rows):
        logits = KERNEL.scorer(params)(*rows)
        return jnp.sum(jnp.sin(logits)), logits
    run = lambda: jax.jit(lambda *x: jax.grad(total, has_aux=True)(*x))  # a function of its own each time
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))
    with use_backend("interpret"):
        lowered = run().trace(params, rows)
        assert "shard_map" in str(lowered.jaxpr) and "pallas_call" in str(lowered.jaxpr)
        gradient, logits = lowered.lower().compile()(params, rows)
        with sharding.activate(mesh):
            told = run().trace(params, rows)
    assert str(told.jaxpr).count("pallas_call") == str(lowered.jaxpr).count("pallas_call")
    near(logits, more(want[0]))
    jax.tree.map(near, gradient, jax.tree.map(lambda g: 2 * g, want[1]))


def test_every_layer_asks_at_the_seam(monkeypatch):
    """The form reaches every layer, and an unknown one is refused before anything is compiled."""
    calls = []
    kernel = attention.block_mask_attention
    monkeypatch.setattr(attention, "block_mask_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    model, params = build.unroll(KERNEL, PARAMS)
    jax.eval_shape(lambda: model.scorer(params)(TOKENS))
    assert len(calls) == model.config.num_layers
    with pytest.raises(ValueError, match="'flash'"):
        dataclasses.replace(REFERENCE, attention_form="flash").scorer(PARAMS)(TOKENS)
