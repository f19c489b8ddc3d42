"""Dual-view models: made from autoregressive ones, two views over shared weights, a cache that is only read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build, convert
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.conftest import random_params, tiny_config

TOKENS = jax.random.randint(jax.random.key(5), (2, 9), 0, 90)


def make(family="qwen3", **changes):
    model = build.build(tiny_config(family, **changes))
    return model, random_params(model)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("unrolled", [False, True])
def test_the_ar_view_of_a_dual_model_is_the_model_it_came_from(family, unrolled):
    model, params = make(family)
    if unrolled:
        model, params = build.unroll(model, params)
    dual, both = convert.init_from_ar(model, params, mask_id=96)
    assert dual.config.dual and dual.config.mask_token_id == 96
    want = model.scorer(params)(TOKENS)
    np.testing.assert_array_equal(dual.scorer(both)(TOKENS), want)
    # a fresh diffusion view is a copy, so under the same rule it says the same, too
    np.testing.assert_array_equal(dual.scorer(both).view("diffusion")(TOKENS), want)
    assert jax.tree.structure(both) == jax.tree.structure(build.abstract_params(dual))


def test_views_differ_in_attention_only():
    model, params = make("orthrus", mask_token_id=96)
    score = model.scorer(params)
    shared = {name: params[name] for name in ("embed", "final_norm", "lm_head")}
    other = model.scorer(random_params(model, seed=1) | shared)
    swapped = {**params, "layers": {**params["layers"], "attention_diffusion": other.params["layers"]["attention"]}}
    np.testing.assert_array_equal(model.scorer(swapped)(TOKENS), score(TOKENS))
    assert not np.allclose(model.scorer(swapped).view("diffusion")(TOKENS), score.view("diffusion")(TOKENS))


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_cache_that_is_only_read_equals_one_that_is_written(unrolled):
    model, params = make("orthrus", mask_token_id=96)
    if unrolled:
        model, params = build.unroll(model, params)
    score, P, n = model.scorer(params), 6, 3
    index = jnp.broadcast_to(jnp.arange(P + n, dtype=jnp.int32), (2, P + n))
    clean, block = index[:, :P], index[:, P:]
    told = Pass(clean, vis.causal(jnp.ones((2, P), bool)), clean)
    _, cache = score.hidden(TOKENS[:, :P], told, score.init_cache(2, P))
    rule = vis.by_rank(jnp.zeros_like(block), jnp.full_like(block, P + n), index)
    draft = score.view("diffusion")
    read, same = draft.hidden(TOKENS[:, P:], Pass(block, rule), cache)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), cache, same)))
    grown = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, n), (0, 0)]), cache)
    written, _ = draft.hidden(TOKENS[:, P:], Pass(block, rule, block), grown)
    np.testing.assert_allclose(read, written, atol=1e-5)


def test_gradients_flow_through_a_read_cache_only_where_asked():
    model, params = make("orthrus", mask_token_id=96)
    index = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))

    def loss(params):
        score = model.scorer(params)
        _, cache = score.hidden(TOKENS[:, :6], Pass(index[:, :6], vis.causal(jnp.ones((2, 6), bool)), index[:, :6]),
                                score.init_cache(2, 6))
        rule = vis.by_rank(jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3), 9), index)
        hidden, _ = score.view("diffusion").hidden(
            TOKENS[:, 6:], Pass(index[:, 6:], rule), jax.lax.stop_gradient(cache))
        return jnp.sum(hidden ** 2)

    grads = jax.grad(loss)(params)["layers"]
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(grads["attention"]))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads["attention_diffusion"]))


def test_the_trainable_share_is_reported():
    # Qwen3-8B: the paper trains about 16 % of the parameters
    config = tiny_config("orthrus", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36,
                         num_heads=32, num_kv_heads=8, head_dim=128)
    shares = build.parameter_shares(build.build(config))
    assert 0.14 < shares["diffusion"] / shares["total"] < 0.17
    assert build.parameter_shares(build.build(tiny_config()))["diffusion"] == 0


def test_ar_and_dual_models_are_not_mixed_up():
    model, params = make()
    with pytest.raises(ValueError, match="qwen3 model has no diffusion view.*to-orthrus"):
        model.scorer(params).view("diffusion")
    with pytest.raises(ValueError, match="view 'noisy'.*'ar', 'diffusion'"):
        model.scorer(params).view("noisy")
    with pytest.raises(ValueError, match="names none: pass mask_id"):
        convert.init_from_ar(model, params)
    with pytest.raises(ValueError, match="mask_token_id = 97 lies outside"):
        convert.init_from_ar(model, params, mask_id=97)
    for family, what in [("orthrus", "two views already"), ("llada", "not autoregressive")]:
        with pytest.raises(ValueError, match=what):
            convert.init_from_ar(*make(family), mask_id=96)
    assert dataclasses.replace(model, view="ar") == model
