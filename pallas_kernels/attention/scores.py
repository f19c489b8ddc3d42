"""From products of queries and keys to scores, and back: the one place that knows scale and soft cap."""
from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """Scores are scale * product, squeezed into (-soft_cap, soft_cap) by a tanh when there is a cap.

    Attributes:
      scale: factor of the products.
      soft_cap: bound of the scores, or None.
    """

    scale: float
    soft_cap: float | None = None

    def __call__(self, products: jax.Array) -> jax.Array:
        """Scores of raw products, any shape."""
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def base_2(self, products: jax.Array) -> jax.Array:
        """Scores of raw products, any shape, in units of log 2: powers of two of them are exponentials of scores."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        return self(products) * LOG2_E

    def pull_back(self, scores: jax.Array, cotangent: jax.Array, unit: float = 1.0) -> jax.Array:
        """Cotangent of the products from that of the scores, any shape; `scores`, in this unit, before any mask."""
        if self.soft_cap is not None:
            scores = scores * unit
            cotangent = cotangent * (1.0 - jnp.square(scores / self.soft_cap))
        return cotangent * self.scale
