"""Fixed-capacity key-value cache, stacked over layers.

An entry's place in the buffer, its logical position and its rank in the visibility rule are three different
things. Entries may therefore be written in any order and never move: committing a token is a change of rank.

A model whose layers are unrolled keeps one cache of L = 1 for each layer in a tuple; `gather_rows` and `grow` take
either.

Letters: L layers, B batch, S capacity in entries, T tokens, K KV heads, H head dim.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after norm and RoPE) and values of every layer, each (L, B, K, S, H).

    Heads come before entries: an attention head then reads one contiguous (S, H) matrix, which is what matrix
    units and TPU tiles want.
    """

    keys: Array
    values: Array

    @property
    def capacity(self) -> int:
        """S, the number of entries a row."""
        return self.keys.shape[3]


def init(layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype=jnp.float32) -> KVCache:
    """Returns a cache of zeros.

    Args:
      layers, batch, capacity, kv_heads, head_dim: L, B, S, K, H.
      dtype: of keys and values.
    """
    shape = (layers, batch, kv_heads, capacity, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, layer: Array, slots: Array, keys: Array, values: Array) -> KVCache:
    """Stores one layer's keys and values at any entries, each row its own.

    Args:
      cache: the cache.
      layer: () int32 layer index.
      slots: (B, T) int32 entry of each token; S or more discards it. Entries of a row must differ.
      keys: (B, T, K, H).
      values: (B, T, K, H).

    Returns:
      The cache with those entries replaced.
    """
    row, tokens = jnp.arange(slots.shape[0])[:, None], slots.shape[1]
    # discarded tokens go to different places beyond the end, so that the indices are unique as promised
    slots = jnp.where(slots < cache.capacity, slots, cache.capacity + jnp.arange(tokens))
    put = lambda old, new: old.at[layer, row, :, slots].set(new.astype(old.dtype), mode="drop", unique_indices=True)
    return KVCache(put(cache.keys, keys), put(cache.values, values))


def read(cache: KVCache, layer: Array) -> tuple[Array, Array]:
    """Returns one layer's keys and values, each (B, S, K, H).

    Args:
      cache: the cache.
      layer: () int32 layer index.
    """
    return jnp.swapaxes(cache.keys[layer], 1, 2), jnp.swapaxes(cache.values[layer], 1, 2)


def extended(layer: KVCache, keys: Array, values: Array) -> tuple[Array, Array]:
    """Returns a layer's keys and values followed by those of new tokens; the cache itself stays as it is.

    Args:
      layer: keys and values of one layer, each (B, K, S, H).
      keys: (B, T, K, H).
      values: (B, T, K, H).

    Returns:
      Two (B, S + T, K, H) arrays in the new ones' dtype.
    """
    join = lambda old, new: jnp.concatenate([jnp.swapaxes(old, 1, 2).astype(new.dtype), new], axis=1)
    return join(layer.keys, keys), join(layer.values, values)


def append_slots(length: Array, tokens: int, valid: Array | None = None, capacity: int = 2**30) -> Array:
    """Returns the (B, T) entries that follow the first `length` ones, `capacity` (discard) where not valid.

    Args:
      length: (B,) int32 entries in use.
      tokens: T.
      valid: (B, T) bool, or None for all.
      capacity: S.
    """
    slots = length[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    return slots if valid is None else jnp.where(valid, slots, capacity)


def crop_rank(rank: Array, length: Array) -> Array:
    """Hides entries from `length` on: a crop moves nothing, it takes away rank.

    Args:
      rank: (B, S) int32 ranks.
      length: (B,) int32 entries kept.

    Returns:
      (B, S) ranks, -1 from `length` on.
    """
    return jnp.where(jnp.arange(rank.shape[1]) < length[:, None], rank, -1)


def gather_rows(cache: KVCache, rows: Array) -> KVCache:
    """Returns the cache of the chosen batch rows, in that order (repeats allowed).

    Args:
      cache: the cache.
      rows: (R,) int32 row indices.
    """
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """Returns the cache with empty entries added at the end.

    Args:
      cache: the cache.
      capacity: new S, at least the present one.
    """
    longer = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, capacity - x.shape[3]), (0, 0)])
    return jax.tree.map(longer, cache)
