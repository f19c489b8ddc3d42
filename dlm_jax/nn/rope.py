"""Rotary position embedding from explicit positions.

Letters: B batch, T tokens, N heads, H head dim.
"""

import jax.numpy as jnp
from jax import Array


def apply_rope(x: Array, positions: Array, theta: float, rotary_dim: int | None = None) -> Array:
    """Rotates head vectors by their logical positions, "rotate half" over the head's first dimensions.

    Angles are float32: bfloat16 cannot tell neighbouring positions apart beyond 256.

    Args:
      x: (B, T, N, H) queries or keys, H even.
      positions: (B, T) int32 logical token positions.
      theta: rotary base, unitless.
      rotary_dim: how many dimensions turn, even; the others pass. None for all.

    Returns:
      (B, T, N, H) rotated vectors in x's dtype.

    Source: Su et al., "RoFormer", Sec. 3.2.
    """
    if rotary_dim is not None and rotary_dim < x.shape[-1]:
        turned = apply_rope(x[..., :rotary_dim], positions, theta)
        return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
