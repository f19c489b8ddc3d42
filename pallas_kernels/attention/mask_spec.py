"""Visibility as a few integers per token, and the layouts of the diffusion language model papers written that way.

A key is visible to a query iff  floor_q <= rank_k <= limit_q  or  (group_q == group_k >= 0 and order_k <= order_q).
Letters: B batch, T query tokens, S keys, W noisy views, P tokens per diffusion block.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_RANK = -1   # a key no interval can hold, as long as floors are >= 0
NO_GROUP = -1


class Mask(NamedTuple):
    """Visibility metadata; any object with these seven attributes will do.

    Attributes:
      floor_q, limit_q: (B, T) int32, the closed interval of key ranks a query sees; empty when limit < floor.
      group_q: (B, T) int32, group whose keys a query also sees, negative for none.
      order_q: (B, T) int32, keys of the group with order up to this are seen.
      rank_k: (B, S) int32, -1 for keys outside the ranked sequence.
      group_k: (B, S) int32, negative for none.
      order_k: (B, S) int32.
    """

    floor_q: jax.Array
    limit_q: jax.Array
    group_q: jax.Array
    order_q: jax.Array
    rank_k: jax.Array
    group_k: jax.Array
    order_k: jax.Array


def visible(mask) -> jax.Array:
    """The rule evaluated for every pair: (B, T, S) bool, for references and tests only."""
    q = lambda a: jnp.asarray(a)[:, :, None]
    k = lambda a: jnp.asarray(a)[:, None, :]
    ranked = (q(mask.floor_q) <= k(mask.rank_k)) & (k(mask.rank_k) <= q(mask.limit_q))
    grouped = (q(mask.group_q) == k(mask.group_k)) & (k(mask.group_k) >= 0) & (k(mask.order_k) <= q(mask.order_q))
    return ranked | grouped


def _mask(floor_q, limit_q, rank_k, group_q=None, group_k=None, order_q=None, order_k=None) -> Mask:
    full = lambda a, like, value: jnp.full(like.shape, value, jnp.int32) if a is None else a
    parts = (floor_q, limit_q, full(group_q, limit_q, NO_GROUP), full(order_q, limit_q, 0), rank_k,
             full(group_k, rank_k, NO_GROUP), full(order_k, rank_k, 0))
    return Mask(*(jnp.asarray(p, jnp.int32) for p in parts))


def _index(batch: int, tokens: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))


def document_bounds(documents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and last token index of each token's document, (B, T) int32 each; documents change where numbers do."""
    index = _index(*documents.shape)
    change = documents[:, 1:] != documents[:, :-1]
    edge = jnp.ones_like(documents[:, :1], bool)
    first = jax.lax.cummax(jnp.where(jnp.concatenate([edge, change], 1), index, 0), axis=1)
    last = jax.lax.cummin(jnp.where(jnp.concatenate([change, edge], 1), index, documents.shape[1] - 1), axis=1,
                          reverse=True)
    return first, last


def causal(batch: int, tokens: int, keys: int | None = None) -> Mask:
    """Causal attention of the last `tokens` of `keys` positions."""
    keys = tokens if keys is None else keys
    index = _index(batch, tokens) + (keys - tokens)
    return _mask(jnp.zeros_like(index), index, _index(batch, keys))


def physical_order(lengths: jax.Array, tokens: int) -> Mask:
    """Causal in buffer order with right padding, whatever the logical positions (ReFusion).

    Args:
      lengths: (B,) int32, valid tokens of each row; the rest sees nothing and is not seen.
      tokens: buffer length.
    Source: ReFusion, causal attention over the reordered sequence.
    """
    index = _index(lengths.shape[0], tokens)
    valid = index < lengths[:, None]
    return _mask(jnp.zeros_like(index), jnp.where(valid, index, -1), jnp.where(valid, index, NO_RANK))


def packed(documents: jax.Array, bidirectional: bool = False) -> Mask:
    """Packed documents, causal or bidirectional inside each.

    Args:
      documents: (B, T) int32 document numbers, negative for padding.
      bidirectional: every token sees its whole document (LLaDA, Dream) instead of its past.
    """
    first, last = document_bounds(documents)
    index = _index(*documents.shape)
    valid = documents >= 0
    limit = last if bidirectional else index
    return _mask(first, jnp.where(valid, limit, -1), jnp.where(valid, index, NO_RANK))


def bidirectional(lengths: jax.Array, tokens: int) -> Mask:
    """Every valid token sees every valid token: lengths (B,) int32, buffer length `tokens`."""
    valid = _index(lengths.shape[0], tokens) < lengths[:, None]
    return packed(jnp.where(valid, 0, -1), bidirectional=True)


def two_stream(documents: jax.Array, block_size: int, views: int = 1, clean: str = "causal",
               noise: str = "bidirectional") -> Mask:
    """Training layout [clean, noisy view 1, ..., noisy view W]: queries and keys are all (W + 1) * T tokens.

    A noisy token sees the clean tokens of its document before its block, and its own block in its own view.

    Args:
      documents: (B, T) int32 document numbers of the clean stream, negative for padding. Blocks count from a document's
        start.
      block_size: P, tokens per diffusion block.
      views: W.
      clean: "causal" (FLARE, token-causal clean stream) or "block" (BD3-LM, clean tokens see their whole block).
      noise: "bidirectional", or "causal" for token-causal noise inside a block.
    Raises:
      ValueError: for another word or a block size below 1.
    Source: FLARE 3.2 and A.4; BD3-LM's block-diffusion mask.
    """
    if clean not in ("causal", "block") or noise not in ("bidirectional", "causal"):
        raise ValueError(f"clean={clean!r}, noise={noise!r}; accepted: clean 'causal' or 'block', "
                         "noise 'bidirectional' or 'causal'.")
    if block_size < 1:
        raise ValueError(f"block_size={block_size}; expected a positive integer.")
    first, last = document_bounds(documents)
    index = _index(*documents.shape)
    valid = documents >= 0
    start = first + (index - first) // block_size * block_size     # also the block's unique name within a view
    end = jnp.minimum(start + block_size - 1, last)
    clean_limit = jnp.where(valid, index if clean == "causal" else end, -1)
    noisy_limit = jnp.where(valid, start - 1, -1)
    many = lambda head, tail: jnp.concatenate([head] + [tail] * views, 1)
    groups = [jnp.where(valid, start + w * documents.shape[1], NO_GROUP) for w in range(views)]
    group = jnp.concatenate([jnp.full_like(index, NO_GROUP)] + groups, 1)
    order = many(jnp.zeros_like(index), index - start if noise == "causal" else jnp.zeros_like(index))
    rank = many(jnp.where(valid, index, NO_RANK), jnp.full_like(index, NO_RANK))
    return _mask(many(first, first), many(clean_limit, noisy_limit), rank, group, group, order, order)


def dual_pass(context: int, limits: jax.Array, block_size: int) -> Mask:
    """Diffusion queries of several anchor blocks over [context keys, diffusion keys] (Orthrus).

    Args:
      context: number of autoregressive keys, ranked by index.
      limits: (B, J * P) int32, last context key each diffusion query may see (anchor - 1 in training), -1 for none.
      block_size: P; query q belongs to block q // P and sees that block whole.
    Source: Orthrus, dual-view training layout.
    """
    batch, queries = limits.shape
    block = _index(batch, queries) // block_size
    rank = jnp.concatenate([_index(batch, context), jnp.full((batch, queries), NO_RANK, jnp.int32)], 1)
    group_k = jnp.concatenate([jnp.full((batch, context), NO_GROUP, jnp.int32), block], 1)
    return _mask(jnp.zeros_like(limits), limits, rank, block, group_k)


def trust_window(prefix: jax.Array, capacity: int, verify: int, draft: int) -> Mask:
    """One forward over [verify rows, draft rows] against [cache, verify keys, draft keys] (FLARE decoding).

    Verify rows are causal; draft rows see the cache, every verify row, and each other. `verify=0` is the
    Diffusion-Trust block.

    Args:
      prefix: (B,) int32 valid cache entries of each row.
      capacity: cache length; entries at and beyond the prefix are not seen.
      verify, draft: rows of each kind.
    Source: FLARE, AR-Trust and Diffusion-Trust decoding.
    """
    batch = prefix.shape[0]
    prefix = prefix[:, None]
    cache = _index(batch, capacity)
    step, noise = _index(batch, verify), _index(batch, draft)
    rank = jnp.concatenate([jnp.where(cache < prefix, cache, NO_RANK), prefix + step, jnp.full_like(noise, NO_RANK)], 1)
    group_k = jnp.concatenate([jnp.full_like(cache, NO_GROUP), jnp.full_like(step, NO_GROUP), jnp.zeros_like(noise)], 1)
    limit = jnp.concatenate([prefix + step, jnp.broadcast_to(prefix + verify - 1, noise.shape)], 1)
    group_q = jnp.concatenate([jnp.full_like(step, NO_GROUP), jnp.zeros_like(noise)], 1)
    return _mask(jnp.zeros_like(limit), limit, rank, group_q, group_k)


def ragged_decode(lengths: jax.Array, tokens: int, capacity: int) -> Mask:
    """`tokens` new causal queries per row against a cache that already holds them.

    Args:
      lengths: (B,) int32 cache entries before the new tokens; the new ones sit at lengths .. lengths + tokens - 1.
      tokens: new tokens per row.
      capacity: cache length S.
    """
    cache = _index(lengths.shape[0], capacity)
    limit = lengths[:, None] + _index(lengths.shape[0], tokens)
    return _mask(jnp.zeros_like(limit), limit, jnp.where(cache < lengths[:, None] + tokens, cache, NO_RANK))
