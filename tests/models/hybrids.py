"""Tiny hybrid models and passes over their caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.models import build
from dlm_jax.models.config import GatedDelta, MoE
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.conftest import random_params, tiny_config

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4)
EXPERTS = MoE(experts=5, active=2, width=12, shared_width=20, shared_gate=True)
KINDS = {
    "qwen3_5_text": dict(pattern=("gated_delta", "attention"), num_layers=4, gated_delta=DELTA),
    "qwen3_next": dict(pattern=("gated_delta", "attention+moe"), num_layers=4, gated_delta=DELTA, moe=EXPERTS)}


def hybrid_config(family="qwen3_5_text", **changes):
    return tiny_config(family, **{"partial_rotary_factor": 0.5, **KINDS[family], **changes})


@functools.cache
def hybrid(family="qwen3_5_text", **changes):
    """Returns (model, params) with random parameters."""
    model = build.build(hybrid_config(family, **changes))
    return model, random_params(model)


@functools.partial(jax.jit, static_argnames="model")
def feed(model, params, cache, tokens, start, count, recurrence=None):
    """Runs a pass of the first (B,) `count` of (B, T) tokens after (B,) `start` cached ones, causal; logits, cache.

    Tokens beyond `count` are padding: written nowhere. A window's block sees itself whole.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions, live = start[:, None] + index, index < count[:, None]
    slots = jnp.where(live, positions, cache.capacity)
    limit = positions
    if recurrence is not None:
        last = (start + recurrence.advance + recurrence.read - 1)[:, None]
        limit = jnp.where(index < recurrence.advance[:, None], positions, last)
    rank = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), (tokens.shape[0], cache.capacity))
    rule = vis.by_rank(jnp.zeros_like(limit), jnp.where(live, limit, vis.NONE), rank)
    score = model.scorer(params)
    hidden, cache = score.hidden(tokens, Pass(positions, rule, slots, recurrence), cache)
    return score.head(hidden), cache


def draw(shape, seed=0, vocabulary=97):
    return jnp.asarray(np.random.default_rng(seed).integers(3, vocabulary, shape), jnp.int32)


def ints(*values):
    return jnp.asarray(values, jnp.int32)
