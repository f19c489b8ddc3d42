"""The supervised next-token objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import objectives
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.objectives import losses

MODEL = build.build(TransformerConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
AR = objectives.Autoregressive()
PARAMS = jax.jit(build.init_params, static_argnums=0)(MODEL, jax.random.key(0))


@jax.jit
def _loss(batch):
    return AR.loss(MODEL.scorer(PARAMS), batch, jax.random.key(0))


def _batch(tokens=None):
    tokens = np.arange(2 * 6).reshape(2, 6) % 20 if tokens is None else tokens
    return {
        "tokens": jnp.asarray(tokens, jnp.int32), "length": jnp.asarray([6, 4]),
        "loss_mask": jnp.asarray([[0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1]], bool)}


def test_labels_are_the_next_supervised_tokens():
    rows = AR.prepare(_batch(), jax.random.key(0))
    none = losses.IGNORE
    # row 1 has 4 valid tokens: what its mask says about padding does not count
    np.testing.assert_array_equal(rows.labels, [[none, 2, 3, none, 5, none], [none, none, 9, none, none, none]])
    np.testing.assert_allclose(rows.weights["ar"].sum(), 1.0)


def test_loss_is_the_mean_over_supervised_tokens():
    batch = _batch()
    got, metrics = _loss(batch)
    logp = jax.jit(lambda t: jax.nn.log_softmax(MODEL.scorer(PARAMS)(t)))(batch["tokens"])
    want = -np.mean([logp[0, 1, 2], logp[0, 2, 3], logp[0, 4, 5], logp[1, 2, 9]])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert metrics["supervised_tokens"] == 4


def test_padding_does_not_change_the_loss():
    loss = lambda tokens: _loss(_batch(tokens))[0]
    tokens = np.arange(12).reshape(2, 6)
    other = tokens.copy()
    other[1, 4:] = 17
    assert loss(tokens) == loss(other)


def test_nothing_supervised_gives_zero_loss_and_zero_gradient():
    batch = _batch() | {"loss_mask": jnp.zeros((2, 6), bool)}
    value, gradient = jax.jit(jax.value_and_grad(lambda p: AR.loss(
        MODEL.scorer(p), batch, jax.random.key(0))[0]))(PARAMS)
    assert value == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(gradient))


def test_a_head_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="head_chunk = 0"):
        objectives.Autoregressive(head_chunk=0)
