"""Normalisation layers as functions."""

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x: Array, weight: Array, epsilon: float, centred: bool = False) -> Array:
    """Divides by the root mean square over the last axis, in float32, and scales.

    Args:
      x: (..., D) activations, any float dtype.
      weight: (D,) scale.
      epsilon: added to the mean square, unitless.
      centred: the scale is 1 + weight, and is applied before the result is rounded.

    Returns:
      (..., D) in x's dtype.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", Eq. 4.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    if centred:
        return (x32 * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return ((x32 * scale).astype(x.dtype) * weight.astype(x.dtype)).astype(x.dtype)
