"""Block-mask flash attention as Mosaic (TPU) kernels walking a list of non-empty tiles.

The grid is (head, work-list step); the list sits in scalar memory, so empty tiles are neither fetched nor computed, and
its length bounds the grid at run time. Scores of the backward pass are transposed (keys by queries): the per-query
statistics are then rows.

Letters: B batch, N query heads, K key heads, T query tokens, S keys, H head width; Q and X tile edges of queries and
keys.
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.scores import LOG2_E, Scoring
from pallas_kernels.attention.tiles import FULL, PARTIAL, RANKED, tile_classes, work_list
from pallas_kernels.attention.visibility import Visibility

_NEG = -1e30
_LANES = 128


def _dot(a, b, contract):
    """One contraction with float32 sums; float32 operands keep full precision, bfloat16 ones take the fast path."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision,
                           preferred_element_type=jnp.float32)


class Heads(NamedTuple):
    """Key head of every query row and of every key row, (T,) and (S,) int32, when heads share the row axes."""

    q: jax.Array
    k: jax.Array


def pack_metadata(mask: Visibility, heads: Heads | None = None) -> tuple[jax.Array, jax.Array]:
    """(B, 8, T) and (B, 8, S) int32, rows floor, limit, group, order, head and rank, group, order, head, then zeros."""
    def rows(parts, head):
        zero = jnp.zeros_like(parts[0])
        head = zero if head is None else jnp.broadcast_to(head, zero.shape)
        return jnp.stack([*parts, head] + [zero] * (7 - len(parts)), 1)
    head_q, head_k = (None, None) if heads is None else heads
    return rows(mask.query_fields, head_q), rows(mask.key_fields, head_k)


def _tile_visible(meta_q, meta_k, keys_first, kind, mixed):
    """Visibility of a tile from its packed metadata: (Q, X), or (X, Q) when keys_first; None where all is visible.

    kind: class of the tile; mixed: rows of several heads share the tile and see only their own key head.
    """
    if kind == FULL and not mixed:
        return None
    if keys_first:
        k, q = meta_k.T, meta_q
        q_row, k_row = (lambda r: q[r:r + 1]), (lambda r: k[:, r:r + 1])
    else:
        q, k = meta_q.T, meta_k
        q_row, k_row = (lambda r: q[:, r:r + 1]), (lambda r: k[r:r + 1])
    own = (q_row(4) == k_row(3)) if mixed else None
    if kind == FULL:
        return own
    seen = (q_row(0) <= k_row(0)) & (k_row(0) <= q_row(1))
    if kind == PARTIAL:
        seen = seen | ((q_row(2) == k_row(1)) & (k_row(1) >= 0) & (k_row(2) <= q_row(3)))
    return seen & own if mixed else seen


def _visit(kind, visit):
    """Calls `visit` with the class of this step's tile, a compile-time constant in each branch."""
    for known in (FULL, PARTIAL, RANKED):
        pl.when(kind == known)(functools.partial(visit, known))


def _divide(index, size: int):
    """Floor division of a non-negative index; `//` adds a sign test, and literals become 64-bit when x64 is on."""
    return index if size == 1 else lax.div(index, lax.full_like(index, size))


def _rows(ref):
    """A key tile as rows: (X, H), or (tokens, K, H) of a cache read in place, then one row a (token, head) pair."""
    return ref[...] if len(ref.shape) == 2 else ref[...].reshape(-1, ref.shape[-1])


def _decode(tiles_ref):
    """(class, first, last) of this grid step."""
    entry = tiles_ref[pl.program_id(1)]
    return (entry >> 2) & 3, (entry & 2) == 2, (entry & 1) == 1


def _forward_kernel(rows, tiles, q, k, v, meta_q, meta_k, out, lse, top, total, acc, *, score, mixed):
    kind, first, last = _decode(tiles)

    @pl.when(first)
    def _():
        top[...] = jnp.full_like(top, _NEG)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def visit(kind):
        scores = score.base_2(_dot(q[...], _rows(k), (1, 1)))
        seen = _tile_visible(meta_q[...], meta_k[...], False, kind, mixed)
        scores = scores if seen is None else jnp.where(seen, scores, _NEG)
        # every lane of a statistic holds the same, so that none is spread over lanes again
        old = top[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        # a row without any visible key yet has new = _NEG; measured from 0 its weights are zero
        level = new if seen is None else jnp.where(new > 0.5 * _NEG, new, 0.0)
        weights, shrink = jnp.exp2(scores - _wide(level, scores.shape[1])), jnp.exp2(old - level)
        total[...] = total[...] * shrink + _lane_sums(weights)
        acc[...] = acc[...] * _wide(shrink, acc.shape[1]) + _dot(weights.astype(v.dtype), _rows(v), (1, 0))
        top[...] = new

    _visit(kind, visit)

    @pl.when(last)
    def _():
        sums = jnp.sum(total[...], axis=1, keepdims=True)
        blind = sums == 0.0
        safe = jnp.where(blind, 1.0, sums)
        out[...] = (acc[...] / safe).astype(out.dtype)
        column = jnp.where(blind, -_NEG, top[...] * (1.0 / LOG2_E) + jnp.log(safe))
        lse[...] = column.T[0:1, :]


def _wide(x, width: int):
    """(Q, width) of (Q, lanes) whose lanes are alike."""
    if width % _LANES:
        return x[:, :width] if width < _LANES else jnp.broadcast_to(x[:, :1], (x.shape[0], width))
    return jnp.concatenate([x] * (width // _LANES), axis=1)


def _lane_sums(x):
    """(Q, lanes) sums of every lanes-th column of (Q, X); their sum over lanes is that over the row."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _LANES))) if x.shape[1] % _LANES else x
    return sum(x[:, i:i + _LANES] for i in range(0, x.shape[1], _LANES))


def _transposed_tile(q, k, v, meta_q, meta_k, lse, delta, d_out, score, kind, mixed):
    """(X, Q) weights and cotangents of the products of one tile."""
    scores = score.base_2(_dot(k[...], q[...], (1, 1)))
    weights = jnp.exp2(scores - lse[...] * LOG2_E)
    seen = _tile_visible(meta_q[...], meta_k[...], True, kind, mixed)
    weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    d_weights = _dot(v[...], d_out[...], (1, 1))
    return weights, score.pull_back(scores, weights * (d_weights - delta[...]), 1.0 / LOG2_E)


def _query_gradient_kernel(rows, tiles, q, k, v, meta_q, meta_k, lse, delta, d_out, dq, acc, *, score, mixed):
    kind, first, last = _decode(tiles)

    @pl.when(first)
    def _():
        acc[...] = jnp.zeros_like(acc)

    def visit(kind):
        _, d_products = _transposed_tile(q, k, v, meta_q, meta_k, lse, delta, d_out, score, kind, mixed)
        acc[...] += _dot(d_products.astype(k.dtype), k[...], (0, 0))

    _visit(kind, visit)

    @pl.when(last)
    def _():
        dq[...] = acc[...].astype(dq.dtype)


def _key_gradient_kernel(rows, tiles, q, k, v, meta_q, meta_k, lse, delta, d_out, dk, dv, acc_k, acc_v, *, score, mixed,
                         group):
    kind, first, last = _decode(tiles)
    member = pl.program_id(2)     # query head inside the key head's group

    @pl.when(first & (member == 0))
    def _():
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    def visit(kind):
        weights, d_products = _transposed_tile(q, k, v, meta_q, meta_k, lse, delta, d_out, score, kind, mixed)
        acc_v[...] += _dot(weights.astype(d_out.dtype), d_out[...], (1, 0))
        acc_k[...] += _dot(d_products.astype(q.dtype), q[...], (1, 0))

    _visit(kind, visit)

    @pl.when(last & (member == group - 1))
    def _():
        dk[...] = acc_k[...].astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)


def _maps(outer_tiles: int, group: int, queries_outer: bool, member: bool):
    """Index maps (query arrays, key arrays, query metadata, key metadata, query rows) over the grid and the work list.

    With `member` the grid is (key head, step, query head in group), otherwise (query head, step).
    """
    def locate(args):
        *grid, rows, tiles = args
        step = grid[1]
        row, inner = rows[step], tiles[step] >> 4
        batch = _divide(row, outer_tiles)
        outer = row - batch * outer_tiles
        i, j = (outer, inner) if queries_outer else (inner, outer)
        head_q = grid[0] * group + grid[2] if member else grid[0]
        head_k = grid[0] if member else _divide(grid[0], group)
        return batch, head_q, head_k, i, j

    def build(pick):
        return lambda *args: pick(*locate(args))
    return (build(lambda b, n, h, i, j: (b, n, i, 0)), build(lambda b, n, h, i, j: (b, h, j, 0)),
            build(lambda b, n, h, i, j: (b, 0, i)), build(lambda b, n, h, i, j: (b, 0, j)),
            build(lambda b, n, h, i, j: (b, n, 0, i)))


def _in_specs(maps, block_q, block_k, width, backward):
    query, key, meta_q, meta_k, row = maps
    q_spec, k_spec = pl.BlockSpec((None, None, block_q, width), query), pl.BlockSpec((None, None, block_k, width), key)
    specs = [q_spec, k_spec, k_spec, pl.BlockSpec((None, 8, block_q), meta_q), pl.BlockSpec((None, 8, block_k), meta_k)]
    row_spec = pl.BlockSpec((None, None, 1, block_q), row)
    return specs + ([row_spec, row_spec, q_spec] if backward else []), q_spec, k_spec, row_spec


def _call(kernel, grid, in_specs, out_specs, out_shape, scratch, name, interpret, flops):
    """A pallas_call over (heads, work list[, group]); flops are a dense mask's, an upper bound for the scheduler."""
    semantics = ("parallel",) + ("arbitrary",) * (len(grid) - 1)
    moved = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(out_shape))
    return pl.pallas_call(
        kernel, out_shape=out_shape, name=name, interpret=interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, grid=grid, in_specs=in_specs, out_specs=out_specs,
                                               scratch_shapes=scratch),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=4 * moved),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics))


def forward(q, k, v, mask: Visibility, score: Scoring, block_q: int, block_k: int, heads: Heads | None = None,
            interpret=False):
    """Forward pass over padded arrays.

    Args:
      q: (B, N, T, H), T a multiple of block_q.
      k, v: (B, K, S, H), S a multiple of block_k; with `heads`, the cache itself, (B, tokens, key heads, H).
      mask: padded metadata.
      score: from products to scores.
      block_q, block_k: tile edges; multiples of 128, or the whole axis.
      heads: key heads of rows when rows are (token, head) pairs and N = 1, or None.
      interpret: False, True or a `pltpu.InterpretParams`.
    Returns:
      out like q; log-sum-exp of the scores (B, N, 1, T) float32, +1e30 where a query sees nothing.
    """
    batch, count, queries, width = q.shape
    classes = tile_classes(mask, block_q, block_k)
    work = work_list(classes)
    maps = _maps(queries // block_q, 1 if heads is not None else count // k.shape[1], True, False)
    in_specs, q_spec, _, row_spec = _in_specs(maps, block_q, block_k, width, False)
    if heads is not None:
        # read in place: transposing or flattening a long cache would copy all of it, valid or not
        key = maps[1]
        per_tile = pl.BlockSpec((None, block_k // k.shape[2], *k.shape[2:]),
                                lambda *args: (key(*args)[0], key(*args)[2], 0, 0))
        in_specs[1:3] = [per_tile, per_tile]
    scratch = [pltpu.VMEM((block_q, _LANES), jnp.float32)] * 2 + [pltpu.VMEM((block_q, width), jnp.float32)]
    out_shape = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, count, 1, queries), jnp.float32))
    kernel = functools.partial(_forward_kernel, score=score, mixed=heads is not None)
    return _call(kernel, (count, work.count), in_specs, (q_spec, row_spec), out_shape, scratch,
                 "block_mask_attention_forward", interpret, 4 * batch * count * queries * mask.rank_k.shape[1] * width)(
                     work.rows, work.tiles, q, k, v, *pack_metadata(mask, heads))


def backward(q, k, v, mask: Visibility, score: Scoring, block_q: int, block_k: int, lse, delta, d_out,
             heads: Heads | None = None, interpret=False):
    """Backward pass: one kernel for dq over query rows of tiles, one for dk and dv over key rows.

    Args:
      q, k, v, mask, score, block_q, block_k, heads, interpret: as for `forward`, but k and v always (B, K, S, H).
      lse: (B, N, 1, T) float32 from `forward`.
      delta: (B, N, 1, T) float32, row sums of out * d_out.
      d_out: (B, N, T, H).
    Returns:
      dq, dk, dv like q, k, v.
    """
    batch, count, queries, width = q.shape
    keys, group = k.shape[1], count // k.shape[1]
    classes = tile_classes(mask, block_q, block_k)
    inputs = (q, k, v, *pack_metadata(mask, heads), lse, delta, d_out)
    flops = 2 * batch * count * queries * k.shape[2] * width
    work = work_list(classes)
    in_specs, q_spec, _, _ = _in_specs(_maps(queries // block_q, group, True, False), block_q, block_k, width, True)
    mixed = heads is not None
    dq = _call(functools.partial(_query_gradient_kernel, score=score, mixed=mixed), (count, work.count), in_specs,
               q_spec, jax.ShapeDtypeStruct(q.shape, q.dtype), [pltpu.VMEM((block_q, width), jnp.float32)],
               "block_mask_attention_dq", interpret, 3 * flops)(work.rows, work.tiles, *inputs)
    work = work_list(jnp.swapaxes(classes, 1, 2))
    in_specs, _, k_spec, _ = _in_specs(_maps(k.shape[2] // block_k, group, False, True), block_q, block_k, width, True)
    kernel = functools.partial(_key_gradient_kernel, score=score, mixed=mixed, group=group)
    dk, dv = _call(kernel, (keys, work.count, group), in_specs,
                   (k_spec, k_spec), (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
                   [pltpu.VMEM((block_k, width), jnp.float32)] * 2, "block_mask_attention_dkv", interpret, 4 * flops)(
                       work.rows, work.tiles, *inputs)
    return dq, dk, dv
