"""Named shapes of block-mask attention, for benchmarks and compile tests."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.visibility import NONE, Visibility, by_rank, causal, token_index, two_stream


class AttentionShape(NamedTuple):
    """batch B, query tokens T, keys S, query heads N, key heads K, head width H, dtype, layout name."""

    batch: int
    tokens: int
    keys: int
    query_heads: int
    key_heads: int
    width: int
    dtype: str
    layout: str


SHAPES = {
    "two_stream_128": AttentionShape(1, 8192, 8192, 16, 2, 128, "bfloat16", "two_stream"),
    "two_stream_256": AttentionShape(1, 8192, 8192, 16, 2, 256, "bfloat16", "two_stream"),
    "causal_128": AttentionShape(1, 8192, 8192, 16, 2, 128, "bfloat16", "causal"),
    "causal_256": AttentionShape(1, 8192, 8192, 16, 2, 256, "bfloat16", "causal"),
    "decode_128": AttentionShape(8, 16, 32768, 16, 2, 128, "bfloat16", "decode"),
    "decode_256": AttentionShape(8, 16, 32768, 16, 2, 256, "bfloat16", "decode"),
    "decode_one": AttentionShape(8, 1, 4096, 32, 8, 128, "bfloat16", "decode"),
    "decode_single": AttentionShape(8, 1, 32768, 16, 1, 128, "bfloat16", "decode"),
    "decode_few_heads": AttentionShape(2, 1, 4096, 2, 1, 64, "float32", "decode"),
    "reduced": AttentionShape(1, 1024, 1024, 8, 2, 64, "float32", "two_stream"),
    "reduced_causal": AttentionShape(1, 1024, 1024, 8, 2, 64, "float32", "causal"),
}


def ragged_decode(lengths: jax.Array, tokens: int, capacity: int) -> Visibility:
    """`tokens` new causal queries per row against a cache that already holds them.

    Args:
      lengths: (B,) int32 cache entries before the new tokens; the new ones sit at lengths .. lengths + tokens - 1.
      tokens: new tokens per row.
      capacity: cache length S.
    """
    limit = lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    cache = token_index(lengths.shape[0], capacity)
    return by_rank(jnp.zeros_like(limit), limit, jnp.where(cache < lengths[:, None] + tokens, cache, NONE))


def layout_mask(shape: AttentionShape, block_size: int = 4) -> Visibility:
    """The visibility metadata a named layout stands for; decode rows hold caches of different lengths."""
    if shape.layout == "two_stream":
        return two_stream(token_index(shape.batch, shape.tokens // 2) // block_size, token_causal=True)
    if shape.layout == "causal":
        return causal(jnp.ones((shape.batch, shape.tokens), bool))
    lengths = jnp.linspace(shape.keys // 8, shape.keys - shape.tokens, shape.batch).astype(jnp.int32)
    return ragged_decode(lengths, shape.tokens, shape.keys)


def abstract_inputs(shape: AttentionShape, sharding=None):
    """(q, k, v, mask) of ShapeDtypeStructs."""
    make = lambda s, dtype: jax.ShapeDtypeStruct(s, dtype, sharding=sharding)
    q = make((shape.batch, shape.tokens, shape.query_heads, shape.width), shape.dtype)
    k = make((shape.batch, shape.keys, shape.key_heads, shape.width), shape.dtype)
    queries, keys = (make((shape.batch, n), jnp.int32) for n in (shape.tokens, shape.keys))
    mask = Visibility(*[queries] * 4, *[keys] * 3)
    return q, k, k, mask


def random_inputs(shape: AttentionShape, seed: int = 0):
    """(q, k, v, mask) with normal entries and the layout's metadata."""
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in abstract_inputs(shape)[:3])
    return q, k, v, layout_mask(shape)
