"""Rotary position embedding from explicit positions.

Letters: B batch, T tokens, N heads, H head dim.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array


def frequencies(rotary_dim: int, theta: float) -> Array:
    """Returns (rotary_dim / 2,) float32 radians a position.

    Args:
      rotary_dim: how many dimensions turn, even.
      theta: rotary base, unitless.
    """
    half = rotary_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def yarn_frequencies(rotary_dim: int, theta: float, factor: float, original: int, fast: float, slow: float) -> Array:
    """Returns (rotary_dim / 2,) float32 radians a position for a context `factor` times as long as the trained one.

    Dimensions that turn more than `fast` times within the trained context keep their speed, those that turn less than
    `slow` times are slowed down by the factor, and those between them by a share of it.

    Args:
      rotary_dim, theta: as of `frequencies`.
      factor: unitless.
      original: tokens of the trained context.
      fast, slow: turns.

    Source: YaRN (arXiv 2309.00071), Sec. 3.2, bounds rounded outwards as in the released code.
    """
    bound = lambda turns: rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(bound(fast)), 0), min(math.ceil(bound(slow)), rotary_dim - 1)
    slowed = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - low) / (high - low if high > low else 1e-3), 0, 1)
    usual = frequencies(rotary_dim, theta)
    return usual / factor * slowed + usual * (1 - slowed)


def apply_rope(x: Array, positions: Array, theta: float, rotary_dim: int | None = None, turning: Array | None = None,
               magnitude: float = 1.0) -> Array:
    """Rotates head vectors by their logical positions, "rotate half" over the head's first dimensions.

    Angles are float32: bfloat16 cannot tell neighbouring positions apart beyond 256.

    Args:
      x: (B, T, N, H) queries or keys, H even.
      positions: (B, T) int32 logical token positions.
      theta: rotary base, unitless.
      rotary_dim: how many dimensions turn, even; the others pass. None for all.
      turning: (rotary_dim / 2,) float32 radians a position, in place of `frequencies`.
      magnitude: factor on what has turned, unitless.

    Returns:
      (B, T, N, H) rotated vectors in x's dtype.

    Source: Su et al., "RoFormer", Sec. 3.2.
    """
    if rotary_dim is not None and rotary_dim < x.shape[-1]:
        turned = apply_rope(x[..., :rotary_dim], positions, theta, None, turning, magnitude)
        return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)
    turning = frequencies(x.shape[-1], theta) if turning is None else turning
    angle = positions.astype(jnp.float32)[..., None, None] * turning
    sin, cos = jnp.sin(angle) * magnitude, jnp.cos(angle) * magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def query_growth(positions: Array, original: int, growth: float) -> Array:
    """Returns the (B, T) float32 factor on queries, which grows with the logarithm of how often the context is over.

    Args:
      positions: (B, T) int32.
      original: tokens of the trained context.
      growth: unitless; 0 is no growth.

    Source: Llama 4's attention temperature, as Ministral 3 has it.
    """
    return 1 + growth * jnp.log1p(jnp.floor(positions / original)).astype(jnp.float32)
