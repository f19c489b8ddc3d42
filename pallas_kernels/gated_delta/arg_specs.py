"""Named shapes of the two-stream gated delta rule, for benchmarks and compile tests."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.streams import Stream


class GatedDeltaShape(NamedTuple):
    """Batch B, tokens T a stream, key heads J, value heads H, key width E, value width F, views W, dtype of q, k, v."""

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    views: int
    dtype: str


SHAPES = {
    # FLARE Table 4: Qwen3.5-2B, L = 8192, half noisy
    "paper": GatedDeltaShape(1, 4096, 16, 16, 128, 128, 1, "bfloat16"),
    # complementary-mask training
    "two_views": GatedDeltaShape(1, 4096, 16, 16, 128, 128, 2, "bfloat16"),
    # more value heads than key heads
    "grouped": GatedDeltaShape(1, 4096, 16, 32, 128, 128, 1, "bfloat16"),
    # what a CPU times in seconds
    "reduced": GatedDeltaShape(1, 1024, 4, 4, 64, 64, 1, "float32"),
    "tiny": GatedDeltaShape(1, 256, 2, 2, 32, 32, 1, "float32"),
}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)


def abstract_streams(shape: GatedDeltaShape, sharding=None) -> tuple[Stream, Stream]:
    """(clean, noisy) streams of ShapeDtypeStructs; gates and write strengths are float32."""
    def stream(lead):
        make = lambda tail, dtype: jax.ShapeDtypeStruct((*lead, *tail), dtype, sharding=sharding)
        keys, values = (shape.key_heads, shape.key_width), (shape.value_heads, shape.value_width)
        gate = make((shape.value_heads,), jnp.float32)
        return Stream(make(keys, shape.dtype), make(keys, shape.dtype), make(values, shape.dtype), gate, gate)
    return stream((shape.batch, shape.tokens)), stream((shape.batch, shape.views, shape.tokens))


def random_streams(shape: GatedDeltaShape, seed: int = 0) -> tuple[Stream, Stream]:
    """(clean, noisy) streams with unit-norm queries and keys, log gates in (-0.5, 0) and write strengths in (0, 1)."""
    rng = np.random.default_rng(seed)
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)

    def fill(stream):
        q, k, v = (rng.normal(size=s.shape) for s in stream[:3])
        values = (unit(q), unit(k), v, -0.5 * rng.random(stream.g.shape), rng.random(stream.beta.shape))
        return Stream(*(jnp.asarray(a, s.dtype) for a, s in zip(values, stream)))
    return tuple(fill(s) for s in abstract_streams(shape))
