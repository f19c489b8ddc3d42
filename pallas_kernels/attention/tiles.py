"""Tile classes from per-tile minima and maxima of the visibility integers, and the work lists kernels walk.

Letters: B batch, I query tiles, J key tiles.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.visibility import Visibility

EMPTY, FULL, PARTIAL, RANKED = 0, 1, 2, 3  # RANKED: partial, and ranks alone say what is visible
_LOW, _HIGH = -(2 ** 31), 2 ** 31 - 1


def pad_mask(mask: Visibility, queries: int, keys: int) -> Visibility:
    """Extends the metadata to (queries, keys) tokens; added queries see nothing and added keys are never seen."""
    pad = lambda a, n, value: jnp.pad(a, ((0, 0), (0, n - a.shape[1])), constant_values=value)
    # the lowest integer is the padding's rank, so no query's floor may reach it
    floor, *rest = mask.query_fields
    query_fields = (jnp.maximum(floor, _LOW + 1), *rest)
    return Visibility(*(pad(a, queries, value) for a, value in zip(query_fields, (0, -1, -1, 0))),
                      *(pad(a, keys, value) for a, value in zip(mask.key_fields, (_LOW, -1, 0))))


def tile_classes(mask: Visibility, block_q: int, block_k: int) -> jax.Array:
    """EMPTY, FULL, PARTIAL or RANKED for every pair of tiles.

    Never calls a tile empty that holds a visible pair, nor full one that hides a pair; a partial verdict may be
    cautious.

    Args:
      mask: padded metadata, (B, T) with T a multiple of block_q and (B, S) with S a multiple of block_k.
      block_q, block_k: tile edges.
    Returns:
      (B, I, J) int32.
    """
    tile = lambda a, size: a.reshape(a.shape[0], -1, size)
    floor, limit, group_q, order_q = (tile(a, block_q) for a in mask.query_fields)
    rank, group_k, order_k = (tile(a, block_k) for a in mask.key_fields)
    low = lambda a, keep=True: jnp.min(jnp.where(keep, a, _HIGH), -1)
    high = lambda a, keep=True: jnp.max(jnp.where(keep, a, _LOW), -1)
    q, k = (lambda a: a[:, :, None]), (lambda a: a[:, None, :])

    # queries with an empty interval must not widen their tile's, nor keys below every interval pull down their tile's
    # least rank
    some = limit >= floor
    least_floor = jnp.min(low(floor, some), -1)[:, None, None]
    ranked = (q(low(floor, some)) <= k(high(rank))) & (q(high(limit, some)) >= k(low(rank, rank >= least_floor)))
    all_ranked = (q(high(floor)) <= k(low(rank))) & (k(high(rank)) <= q(low(limit)))
    in_q, in_k = group_q >= 0, group_k >= 0
    grouped = ((q(low(group_q, in_q)) <= k(high(group_k, in_k))) & (q(high(group_q, in_q)) >= k(low(group_k, in_k)))
               & (k(low(order_k, in_k)) <= q(high(order_q, in_q))))
    one_group = ((q(low(group_q)) == q(high(group_q))) & (q(low(group_q)) == k(low(group_k)))
                 & (k(low(group_k)) == k(high(group_k))))
    all_grouped = one_group & (q(low(group_q)) >= 0) & (k(high(order_k)) <= q(low(order_q)))
    partial = jnp.where(grouped, PARTIAL, jnp.where(ranked, RANKED, EMPTY))
    return jnp.where((ranked | grouped) & (all_ranked | all_grouped), FULL, partial).astype(jnp.int32)


class WorkList(NamedTuple):
    """The tiles to visit, row by row, for a kernel grid of `count` steps.

    Attributes:
      rows: (B * I * J,) int32, b * I + i of each step (I the outer tile axis).
      tiles: (B * I * J,) int32, inner tile j, times 16, plus 4 * class + 2 * (first step of its row) + (last step of
        its row).
      count: () int32, steps to take; entries beyond it are not read.
    """

    rows: jax.Array
    tiles: jax.Array
    count: jax.Array


def work_list(classes: jax.Array) -> WorkList:
    """Lists the non-empty tiles of (B, I, J) row by row; a row with none keeps one EMPTY step, to write its zeros."""
    batch, outer, inner = classes.shape
    lonely = jnp.all(classes == EMPTY, -1, keepdims=True) & (jnp.arange(inner) == 0)
    keep = ((classes != EMPTY) | lonely).reshape(-1)
    count = jnp.sum(keep, dtype=jnp.int32)
    where = jnp.nonzero(keep, size=keep.size, fill_value=0)[0].astype(jnp.int32)
    rows = where // inner
    step = jnp.arange(keep.size, dtype=jnp.int32)
    first = (step == 0) | (rows != jnp.roll(rows, 1))
    last = (step == count - 1) | (rows != jnp.roll(rows, -1))
    packed = (where % inner) * 16 + classes.reshape(-1)[where] * 4 + first * 2 + last
    return WorkList(rows, packed.astype(jnp.int32), count)
