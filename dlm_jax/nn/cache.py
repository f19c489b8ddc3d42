"""Fixed-capacity key-value cache of a stack of attention layers.

An entry's place in the buffer, its logical position and its rank in the visibility rule are three different
things. Entries may therefore be written in any order and never move: committing a token is a change of rank.

Letters: L layers, B batch, S capacity in entries, T tokens, R rows, K KV heads, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class KVCache:
    """Keys (after norm and RoPE) and values of every layer, each (L, B, K, S, H); a `scoring.Cache`.

    Heads come before entries: an attention head then reads one contiguous (S, H) matrix, which is what matrix
    units and TPU tiles want.
    """

    keys: Array
    values: Array

    @property
    def capacity(self) -> int:
        """S, the number of entries a row."""
        return self.keys.shape[3]

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.keys.shape[1]

    def grow(self, capacity: int) -> "KVCache":
        """See `scoring.Cache.grow`."""
        longer = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, capacity - x.shape[3]), (0, 0)])
        return jax.tree.map(longer, self)

    def take(self, rows: Array) -> "KVCache":
        """See `scoring.Cache.take`."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self)

    def insert(self, rows: Array, other: "KVCache") -> "KVCache":
        """See `scoring.Cache.insert`."""
        return jax.tree.map(lambda mine, theirs: mine.at[:, rows].set(theirs), self, other)

    def commit(self, accepted: Array) -> "KVCache":
        """See `scoring.Cache.commit`: rank hides what was not accepted."""
        del accepted
        return self


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


@struct.dataclass
class Caches:
    """The caches of a stack whose layers are of several kinds, or each a module of its own; a `scoring.Cache`.

    Attributes:
      members: one cache for every place of a period, each with a leading axis of periods.
    """

    members: tuple

    @property
    def capacity(self) -> int:
        """S, the number of entries a row."""
        return self.members[0].capacity

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.members[0].batch

    def grow(self, capacity: int) -> "Caches":
        """See `scoring.Cache.grow`."""
        return Caches(tuple(member.grow(capacity) for member in self.members))

    def take(self, rows: Array) -> "Caches":
        """See `scoring.Cache.take`."""
        return Caches(tuple(member.take(rows) for member in self.members))

    def insert(self, rows: Array, other: "Caches") -> "Caches":
        """See `scoring.Cache.insert`."""
        pairs = zip(self.members, other.members, strict=True)
        return Caches(tuple(mine.insert(rows, theirs) for mine, theirs in pairs))

    def commit(self, accepted: Array) -> "Caches":
        """See `scoring.Cache.commit`."""
        return Caches(tuple(member.commit(accepted) for member in self.members))

    def at(self, place: int, member) -> "Caches":
        """Returns the caches with another one at a place."""
        return Caches((*self.members[:place], member, *self.members[place + 1 :]))
