"""The layouts of diffusion language models under the one visibility rule, `Visibility`.

Where a row holds several streams, clean tokens come first.

Letters: B batch (or 1, to broadcast), T query tokens, S keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.visibility import NONE, Visibility, by_rank, causal, token_index, two_stream

__all__ = ["NONE", "Visibility", "bidirectional", "blocks", "by_rank", "causal", "orthrus_dual", "two_stream"]

LAST = 2**30  # a limit beyond every rank


def bidirectional(valid: Array, document: Array | None = None) -> Visibility:
    """Every token sees every valid token of its document.

    Args:
      valid: (B, T) bool, False on padding.
      document: (B, T) int32 document number of a packed row, negative on padding; None for one document.
    """
    index = token_index(*valid.shape)
    if document is not None:
        return by_rank(jnp.maximum(document, 0), document, jnp.where(valid, document, NONE))
    return by_rank(jnp.zeros_like(index), jnp.full_like(index, LAST), jnp.where(valid, index, NONE))


def blocks(valid: Array, size: int) -> Visibility:
    """Every token sees its block, counted from the row's first token, and the blocks before it.

    Args:
      valid: (B, T) bool, False on padding.
      size: tokens of a block.
    """
    index = token_index(*valid.shape)
    return by_rank(jnp.zeros_like(index), jnp.where(valid, index // size * size + size - 1, NONE),
                   jnp.where(valid, index, NONE))


def orthrus_dual(valid: Array, limit: Array, block_size: int, floor: Array | None = None) -> Visibility:
    """Blocks of Orthrus' diffusion view over [clean keys, block keys].

    A block token sees the clean tokens from its floor up to its limit, and its own block whole.

    Args:
      valid: (B, S) bool, False on padding of the clean tokens, whose keys stand first and rank by index.
      limit: (B, P) int32 index of the last clean token that each block token sees, -1 for none; in training the
        one before its block's anchor.
      block_size: K, tokens; block token i belongs to block i // K.
      floor: (B, P) int32 index of the first clean token that each sees, of its document; None for 0.

    Returns:
      The rule over P queries and S + P keys.

    Source: Orthrus, Sec. 3.2 (dual-pass attention mask).
    """
    block = token_index(*limit.shape) // block_size
    clean, rank = jnp.full(valid.shape, NONE, jnp.int32), jnp.where(valid, token_index(*valid.shape), NONE)
    join = lambda one, other: jnp.concatenate([one, other], axis=1)
    return Visibility(
        floor_q=jnp.zeros_like(limit) if floor is None else floor,
        limit_q=limit,
        group_q=block,
        order_q=jnp.zeros_like(limit),
        rank_k=join(rank, jnp.full_like(limit, NONE)),
        group_k=join(clean, block),
        order_k=jnp.zeros_like(join(clean, block)),
    )
