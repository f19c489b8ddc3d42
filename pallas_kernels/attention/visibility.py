"""One visibility rule for every attention mask, and the layouts that the kernels are measured on.

A key is visible to a query iff `floor_q <= rank_k <= limit_q`, or `group_q == group_k >= 0` and
`order_k <= order_q`. Four integers a query, three a key: O(T) metadata instead of a (T, S) mask.

Letters: B batch (or 1, to broadcast), T query tokens, S keys, W noisy views.
"""
from __future__ import annotations

import dataclasses
from typing import Callable

import jax
import jax.numpy as jnp
from jax import Array

NONE = -1  # a rank or group that matches nothing (floors are never negative)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Who sees whom, as int32 metadata; `_q` fields are (B, T), `_k` fields (B, S).

    Attributes:
      floor_q, limit_q: the closed interval of key ranks a query sees; empty when limit < floor.
      group_q: group whose keys a query also sees, negative for none.
      order_q: keys of the group with order up to this are seen.
      rank_k: rank of each key, `NONE` outside the ranked sequence.
      group_k: group of each key, negative for none.
      order_k: its order inside the group.
    """

    floor_q: Array
    limit_q: Array
    group_q: Array
    order_q: Array
    rank_k: Array
    group_k: Array
    order_k: Array

    @property
    def query_fields(self) -> tuple[Array, Array, Array, Array]:
        """floor_q, limit_q, group_q, order_q."""
        return self.floor_q, self.limit_q, self.group_q, self.order_q

    @property
    def key_fields(self) -> tuple[Array, Array, Array]:
        """rank_k, group_k, order_k."""
        return self.rank_k, self.group_k, self.order_k

    @property
    def query_length(self) -> int:
        """T, the number of queries a row."""
        return self.floor_q.shape[1]

    @property
    def key_length(self) -> int:
        """S, the number of keys a row."""
        return self.rank_k.shape[1]

    def map(self, queries: Callable[[Array], Array], keys: Callable[[Array], Array] = lambda x: x) -> Visibility:
        """Returns the rule with one function applied to its query fields and another to its key fields."""
        return Visibility(*map(queries, self.query_fields), *map(keys, self.key_fields))

    def queries(self, start: Array | int, length: int) -> Visibility:
        """Returns the rule for `length` queries from number `start`, a scalar, on; all keys kept."""
        return self.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1))

    def take(self, index: Array) -> Visibility:
        """Returns the rule for the queries at (B, C) int32 indices, all keys kept."""
        rows = index.shape[0]
        return self.map(lambda x: jnp.take_along_axis(jnp.broadcast_to(x, (rows, x.shape[1])), index, axis=1))

    def dense(self) -> Array:
        """Returns the rule as a (B, T, S) bool mask; for reference code and short sequences."""
        floor, limit, group_q, order_q = (x[:, :, None] for x in self.query_fields)
        rank, group_k, order_k = (x[:, None, :] for x in self.key_fields)
        ranked = (floor <= rank) & (rank <= limit)
        return ranked | ((group_q == group_k) & (group_k >= 0) & (order_k <= order_q))


def by_rank(floor_q: Array, limit_q: Array, rank_k: Array) -> Visibility:
    """Builds a rule from ranks alone; with block numbers for limits and ranks, attention is causal by blocks.

    Args:
      floor_q: (B, T) int32 lowest visible rank, at least 0.
      limit_q: (B, T) int32 highest visible rank; -1 sees nothing.
      rank_k: (B, S) int32 rank of each key; `NONE` for padding.

    Returns:
      A `Visibility` without groups.
    """
    none_q, none_k = jnp.full_like(limit_q, NONE), jnp.full_like(rank_k, NONE)
    return Visibility(floor_q, limit_q, none_q, none_q, rank_k, none_k, none_k)


def token_index(batch: int, tokens: int) -> Array:
    """Returns the (B, T) int32 index of each token in its row."""
    return jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))


def causal(valid: Array, document: Array | None = None) -> Visibility:
    """Every token sees the valid tokens of its document up to itself in physical order; positions may be anything.

    This is also ReFusion's training layout (Sec. 4.3): the reordering is physical, positions stay logical.

    Args:
      valid: (B, T) bool, False on padding.
      document: (B, T) int32 document number of a packed row, one run of tokens each; None for one document.
    """
    index = token_index(*valid.shape)
    first = jnp.zeros_like(index) if document is None else run_bounds(document)[0]
    return by_rank(first, index, jnp.where(valid, index, NONE))


def run_bounds(label: Array) -> tuple[Array, Array]:
    """Returns the first and last index of the run of equal labels that each token is in, (B, T) int32 each."""
    index, end = token_index(*label.shape), label.shape[1] - 1
    change = label[:, 1:] != label[:, :-1]
    edge = jnp.ones_like(label[:, :1], bool)
    first = jax.lax.cummax(jnp.where(jnp.concatenate([edge, change], 1), index, 0), axis=1)
    last = jax.lax.cummin(jnp.where(jnp.concatenate([change, edge], 1), index, end), axis=1, reverse=True)
    return first, last


def two_stream(block: Array, document: Array | None = None, views: int = 1, token_causal: bool = False,
               causal_views: bool = False) -> Visibility:
    """Streams of the same tokens in one row, [clean, noisy view 1, ..., noisy view W]: T of each.

    A noisy token sees the clean tokens of its document before its block, and its own block in its own view. A token of
    no block sees nothing and is seen by none.

    Args:
      block: (B, T) int32 block number, one run of tokens each; negative on padding.
      document: (B, T) int32 document number of a packed row; None for one document.
      views: W.
      token_causal: a clean token sees up to itself (FLARE) rather than to the end of its block (BD3-LM).
      causal_views: a noisy token sees its block up to itself rather than whole.

    Returns:
      The rule over (W + 1) T queries and keys.

    Source: BD3-LM (arXiv 2503.09573), the training mask of its vectorised implementation; FLARE 3.2 and A.4.
    """
    index, valid = token_index(*block.shape), block >= 0
    first, last = run_bounds(jnp.zeros_like(block) if document is None else document)
    start, end = run_bounds(block)
    start, end = jnp.maximum(start, first), jnp.minimum(end, last)
    only = lambda x: jnp.where(valid, x, NONE)
    none = jnp.full_like(block, NONE)
    order = jnp.tile(index if causal_views else jnp.zeros_like(index), (1, views + 1))
    streams = lambda clean, noisy: jnp.concatenate([clean, *noisy], axis=1)
    # a block's first index names it within its view
    group = streams(none, [only(start + view * block.shape[1]) for view in range(views)])
    return Visibility(
        floor_q=jnp.tile(first, (1, views + 1)),
        limit_q=streams(only(index if token_causal else end), [only(start - 1)] * views),
        group_q=group, order_q=order,
        rank_k=streams(only(index), [none] * views),
        group_k=group, order_k=order)
