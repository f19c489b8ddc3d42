"""From products of queries and keys to scores, and back: the one place that knows scale and soft cap."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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

    def pull_back(self, scores: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Cotangent of the products from that of the scores; `scores` before any mask."""
        if self.soft_cap is not None:
            cotangent = cotangent * (1.0 - jnp.square(scores / self.soft_cap))
        return cotangent * self.scale
