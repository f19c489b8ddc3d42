"""One visibility rule for every attention mask.

A key is visible to a query iff `floor_q <= rank_k <= limit_q`, or `group_q == group_k >= 0` and
`order_k <= order_q`. Four integers a query, three a key: O(T) metadata instead of a (T, S) mask.

Letters: B batch (or 1, to broadcast), T query tokens, S keys.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

NONE = -1  # a rank or group that matches nothing (floors are never negative)
LAST = 2**30  # a limit beyond every rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Who sees whom, as int32 metadata; `_q` fields are (B, T), `_k` fields (B, S)."""

    floor_q: Array
    limit_q: Array
    group_q: Array
    order_q: Array
    rank_k: Array
    group_k: Array
    order_k: Array

    @property
    def query_length(self) -> int:
        """T, the number of queries a row."""
        return self.floor_q.shape[1]

    @property
    def key_length(self) -> int:
        """S, the number of keys a row."""
        return self.rank_k.shape[1]

    def dense(self) -> Array:
        """Returns the rule as a (B, T, S) bool mask; for reference code and short sequences."""
        q = lambda x: x[:, :, None]
        k = lambda x: x[:, None, :]
        by_rank = (q(self.floor_q) <= k(self.rank_k)) & (k(self.rank_k) <= q(self.limit_q))
        by_group = (q(self.group_q) == k(self.group_k)) & (k(self.group_k) >= 0) & (k(self.order_k) <= q(self.order_q))
        return by_rank | by_group

    def queries(self, start: Array | int, length: int) -> "Visibility":
        """Returns the rule for `length` queries from `start` on, all keys kept."""
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
        return self._of_queries(cut)

    def take(self, index: Array) -> "Visibility":
        """Returns the rule for the queries at (B, C) indices, all keys kept."""
        return self._of_queries(lambda x: jnp.take_along_axis(jnp.broadcast_to(x, (index.shape[0], x.shape[1])), index,
                                                              axis=1))

    def _of_queries(self, change) -> "Visibility":
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in (
            "floor_q", "limit_q", "group_q", "order_q")})


def by_rank(floor_q: Array, limit_q: Array, rank_k: Array) -> Visibility:
    """Builds a rule from ranks alone.

    Args:
      floor_q: (B, T) int32 lowest visible rank, at least 0.
      limit_q: (B, T) int32 highest visible rank; -1 sees nothing.
      rank_k: (B, S) int32 rank of each key; `NONE` for padding.

    Returns:
      A `Visibility` without groups.
    """
    none_q, none_k = jnp.full_like(limit_q, NONE), jnp.full_like(rank_k, NONE)
    return Visibility(floor_q, limit_q, none_q, none_q, rank_k, none_k, none_k)


def _index(valid: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(valid.shape[1], dtype=jnp.int32), valid.shape)


def causal(valid: Array) -> Visibility:
    """Every token sees the valid tokens up to itself in physical order; positions may be anything.

    This is also ReFusion's training layout (Sec. 4.3): the reordering is physical, positions stay logical.

    Args:
      valid: (B, T) bool, False on padding.
    """
    index = _index(valid)
    return by_rank(jnp.zeros_like(index), index, jnp.where(valid, index, NONE))


def bidirectional(valid: Array) -> Visibility:
    """Every token sees every valid token.

    Args:
      valid: (B, T) bool, False on padding.
    """
    index = _index(valid)
    return by_rank(jnp.zeros_like(index), jnp.full_like(index, LAST), jnp.where(valid, index, NONE))


def packed(document: Array) -> Visibility:
    """Causal inside each document of a packed row.

    Args:
      document: (B, T) int32 document number, non-decreasing along a row; negative on padding.
    """
    index = _index(document)
    new = jnp.concatenate([jnp.ones_like(document[:, :1], bool), document[:, 1:] != document[:, :-1]], axis=1)
    floor = jax.lax.cummax(jnp.where(new, index, 0), axis=1)
    return by_rank(floor, index, jnp.where(document >= 0, index, NONE))


def block_causal(block: Array) -> Visibility:
    """Bidirectional inside a block, and every earlier block seen whole.

    Args:
      block: (B, T) int32 block number, non-decreasing along a row; negative on padding.
    """
    return by_rank(jnp.zeros_like(block), block, block)


def block_diffusion(block: Array) -> Visibility:
    """Two streams of the same tokens in one row, [noisy; clean]: T of each.

    A noisy token sees the noisy tokens of its own block and the clean ones of earlier blocks; a clean token sees the
    clean tokens up to the end of its block. A token of no block sees nothing and is seen by none.

    Args:
      block: (B, T) int32 block number, non-decreasing along a row; negative on padding.

    Returns:
      The rule over 2 T queries and keys.

    Source: BD3-LM (arXiv 2503.09573), the training mask of its vectorised implementation.
    """
    none, join = jnp.full_like(block, NONE), lambda noisy, clean: jnp.concatenate([noisy, clean], axis=1)
    return Visibility(
        floor_q=jnp.zeros_like(join(block, block)),
        limit_q=join(jnp.maximum(block - 1, NONE), block),
        group_q=join(block, none),
        order_q=jnp.zeros_like(join(block, block)),
        rank_k=join(none, block),
        group_k=join(block, none),
        order_k=jnp.zeros_like(join(block, block)),
    )


def orthrus_dual(valid: Array, limit: Array, block_size: int) -> Visibility:
    """Blocks of Orthrus' diffusion view over [clean keys, block keys].

    A block token sees the clean tokens up to its limit, and its own block whole.

    Args:
      valid: (B, S) bool, False on padding of the clean tokens, whose keys stand first and rank by index.
      limit: (B, P) int32 index of the last clean token that each block token sees, -1 for none; in training the
        one before its block's anchor.
      block_size: K, tokens; block token i belongs to block i // K.

    Returns:
      The rule over P queries and S + P keys.

    Source: Orthrus, Sec. 3.2 (dual-pass attention mask).
    """
    block = _index(limit) // block_size
    clean, rank = jnp.full(valid.shape, NONE, jnp.int32), jnp.where(valid, _index(valid), NONE)
    join = lambda one, other: jnp.concatenate([one, other], axis=1)
    return Visibility(
        floor_q=jnp.zeros_like(limit),
        limit_q=limit,
        group_q=block,
        order_q=jnp.zeros_like(limit),
        rank_k=join(rank, jnp.full_like(limit, NONE)),
        group_k=join(clean, block),
        order_k=jnp.zeros_like(join(clean, block)),
    )
