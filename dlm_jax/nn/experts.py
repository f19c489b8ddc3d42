"""A mixture of experts as a function: tokens sorted by expert, one ragged product, nobody turned away.

Letters: M tokens, D width, X experts, A experts a token, F expert width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def route(logits: Array, active: int, normalise: bool) -> tuple[Array, Array]:
    """Chooses each token's experts.

    Args:
      logits: (M, X) router outputs.
      active: A.
      normalise: divide the weights of a token's experts by their sum.

    Returns:
      (M, A) float32 weights, largest first, and (M, A) int32 experts.
    """
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), active)
    return weights / jnp.sum(weights, axis=-1, keepdims=True) if normalise else weights, experts


def mixture(x: Array, weights: Array, experts: Array, gate: Array, up: Array, down: Array) -> Array:
    """Runs every token through its own experts, SwiGLU feed-forwards, and sums what they make of it.

    A token's result is its own: no expert has a capacity that others could fill.

    Args:
      x: (M, D) tokens.
      weights: (M, A) of the experts.
      experts: (M, A) int32.
      gate, up: (X, D, F).
      down: (X, F, D).

    Returns:
      (M, D) in x's dtype.
    """
    tokens, active = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)  # places (token, choice) by expert
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    sorted_x = x[order // active]
    inner = jax.nn.silu(jax.lax.ragged_dot(sorted_x, gate, sizes)) * jax.lax.ragged_dot(sorted_x, up, sizes)
    made = jax.lax.ragged_dot(inner, down, sizes)
    back = jnp.zeros_like(made).at[order].set(made, unique_indices=True).reshape(tokens, active, -1)
    return jnp.sum(weights[..., None].astype(x.dtype) * back, axis=1)
