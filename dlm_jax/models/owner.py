"""What every module of a stack begins with: named parameters, and the choice of outputs.

Letters: B batch, T tokens, C wanted outputs, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from dlm_jax.models.config import TransformerConfig
from dlm_jax.nn.norms import rms_norm


ADAPTER = "adapter"  # the collection of what is added to weights, see `models.lora`


class Owner(nn.Module):
    """A module that creates parameters with logical axis names."""

    config: TransformerConfig
    dtype: Any = None  # computation dtype; None computes in the parameters' own

    def weight(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init=None) -> Array:
        """Returns a parameter of this shape, with what an adapter adds to it, in the computation dtype."""
        init = init or nn.initializers.normal(self.config.initializer_range)
        value = self.param(name, nn.with_logical_partitioning(init, axes), shape)
        if self.has_variable(ADAPTER, name):
            value = adapted(value, self.get_variable(ADAPTER, name))
        return value if self.dtype is None else value.astype(self.dtype)

    def norm_scale(self, name: str, size: int) -> Array:
        """Returns the (size,) scale of a norm."""
        init = nn.initializers.zeros if self.config.centred_norms else nn.initializers.ones
        return self.weight(name, (size,), (None,), init)

    def normed(self, x: Array, scale: Array) -> Array:
        """Returns (..., D) x, normed, times its (D,) scale."""
        return rms_norm(x, scale, self.config.rms_norm_eps, centred=self.config.centred_norms)


def adapted(weight: Array, factors: Mapping[str, Array]) -> Array:
    """Returns a weight and the low-rank change to it, in the weight's dtype; added in float32.

    Args:
      weight: (..., inputs, outputs).
      factors: `a` (..., inputs, r), `b` (..., r, outputs) and `scale` (...).
    """
    a, b, scale = (factors[name].astype(jnp.float32) for name in ("a", "b", "scale"))
    lead, rank = scale.shape, a.shape[-1]
    change = a.reshape(*lead, -1, rank) @ b.reshape(*lead, rank, -1)
    return (weight + (scale[..., None, None] * change).reshape(weight.shape)).astype(weight.dtype)


def chosen(x: Array, wanted: Array | None) -> Array:
    """Returns the (B, C, D) tokens `wanted` of (B, T, D); all of them for None."""
    return x if wanted is None else jnp.take_along_axis(x, wanted[..., None], axis=1)
