"""Products of activations with weights: plain ones, and for few rows on a TPU the ones its compiler reads in place.

Few rows are bound by reading weights. Two things keep the TPU compiler from reading them at the speed of memory. One
row times a matrix is no product of matrices to it: it multiplies and adds on the vector unit, at a third of that speed;
eight rows fill a register and go through the matrix unit. And a weight of several heads that is reshaped to a matrix is
copied first, since its tiles are other ones; a product over the axes as they are takes it from where it lies, also from
a stack of layers.

Letters: M rows, D width, F other width, N heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import automatic_backend

ROWS = 8  # of a register
FEW = 512  # rows up to which reading weights takes longer than multiplying by them; about 560 on a v6e


def matmul(x: Array, weight: Array) -> Array:
    """Returns (..., F) products of (..., D) rows with a (D, F) matrix."""
    plain = lambda x: x @ weight
    return _of_rows(plain, x, 1) if _few(x, 1) else plain(x)


def project(x: Array, weight: Array) -> Array:
    """Returns the (..., N, H) heads that a (D, N, H) weight makes of (..., D) rows."""
    if _few(x, 1):
        return _of_rows(lambda x: jnp.einsum("md,dnh->mnh", x, weight), x, 1)
    return (x @ weight.reshape(weight.shape[0], -1)).reshape(*x.shape[:-1], *weight.shape[1:])


def merge(x: Array, weight: Array) -> Array:
    """Returns the (..., D) rows that a (N, H, D) weight makes of (..., N, H) heads."""
    if _few(x, 2):
        return _of_rows(lambda x: jnp.einsum("mnh,nhd->md", x, weight), x, 2)
    return x.reshape(*x.shape[:-2], -1) @ weight.reshape(-1, weight.shape[-1])


def logits(x: Array, table: Array) -> Array:
    """Returns (..., V) float32 products of (..., D) rows with a (V, D) table."""
    # the table first: on CPUs a few tokens then take two thirds of the time, on TPUs as long or less
    plain = lambda x: jnp.moveaxis(jnp.einsum("vd,...d->v...", table, x, preferred_element_type=jnp.float32), 0, -1)
    return _of_rows(plain, x, 1) if _few(x, 1) else plain(x)


def _few(x: Array, own: int) -> bool:
    """Whether rows, whose last so many axes are their own, are few, on a TPU."""
    return automatic_backend() == "tpu" and math.prod(x.shape[:-own]) <= FEW


def _of_rows(product: Callable[[Array], Array], x: Array, own: int) -> Array:
    """Applies a product of (M, ...) rows to no fewer than `ROWS`."""
    rows = math.prod(x.shape[:-own])
    flat = x.reshape(rows, *x.shape[-own:])
    made = product(jnp.pad(flat, [(0, max(0, ROWS - rows))] + [(0, 0)] * own))[:rows]
    return made.reshape(*x.shape[:-own], *made.shape[1:])
