"""Products of activations with weights, whatever the number of rows.

One row times a matrix is no product of matrices to the TPU compiler: it multiplies and adds on the vector unit, at a
third of the speed at which memory could deliver the weights. Eight rows fill a register, take as long as one, and go
through the matrix unit.

Letters: M rows, D width, F other width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

ROWS = 8  # of a register


def by_rows(product: Callable[[Array], Array], x: Array) -> Array:
    """Applies a product to every row, on a TPU to no fewer than `ROWS` at once.

    Args:
      product: maps (..., D) to (..., F), each row by itself.
      x: (..., D).

    Returns:
      (..., F).
    """
    rows = math.prod(x.shape[:-1])

    def filled(x):
        made = product(jnp.pad(x.reshape(rows, -1), ((0, ROWS - rows), (0, 0))))
        return made[:rows].reshape(*x.shape[:-1], -1)

    if rows >= ROWS:
        return product(x)
    return jax.lax.platform_dependent(x, tpu=filled, default=product)


def matmul(x: Array, weight: Array) -> Array:
    """Returns (..., F) products of (..., D) rows with a (D, F) matrix."""
    return by_rows(lambda x: x @ weight, x)
