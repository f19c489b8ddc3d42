"""Masked attention with a dense mask: the definition every other form is checked against.

Letters: B batch, T query tokens, S keys, N query heads, K key heads, H head width.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.scores import Scoring
from pallas_kernels.attention.visibility import Visibility


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Visibility, scale: float | None = None,
                    soft_cap: float | None = None) -> jax.Array:
    """softmax(scale q k^T) v over visible keys, zeros for a query that sees none.

    Args:
      q: (B, T, N, H).
      k, v: (B, S, K, H), K dividing N; query head n reads key head n // (N // K).
      mask: who sees whom.
      scale: factor of the scores; H**-0.5 when None.
      soft_cap: bound of the scores, approached by a tanh; none when None.
    Returns:
      (B, T, N, H), dtype of q.
    """
    acc = jnp.promote_types(q.dtype, jnp.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(a.astype(acc), q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = Scoring(scale, soft_cap)(jnp.einsum("btnh,bsnh->bnts", q.astype(acc), k, precision="highest"))
    seen = mask.dense()[:, None]
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.sum(weights, -1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest").astype(q.dtype)
