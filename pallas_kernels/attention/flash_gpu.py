"""Block-mask flash attention as Triton (GPU) kernels: one program per tile row, looping over its non-empty tiles.

Lowering is checked in tests; no timing on a device stands behind the tile sizes, so these run only when asked for by
name.

Letters: B batch, N query heads, K key heads, T query tokens, S keys, H head width; I and J tiles of queries and keys.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.scores import Scoring
from pallas_kernels.attention.tiles import EMPTY, FULL, tile_classes
from pallas_kernels.attention.visibility import Visibility

_NEG = -1e30


def _dot(a, b, contract):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision,
                           preferred_element_type=jnp.float32)


def _row_lists(classes):
    """(B, I, J) classes to lists of 4 * tile + class, non-empty tiles first, and the number of those (B, I)."""
    order = jnp.argsort(classes == EMPTY, axis=-1, stable=True).astype(jnp.int32)
    entries = order * 4 + jnp.take_along_axis(classes, order, -1)
    return entries, jnp.sum(classes != EMPTY, -1, dtype=jnp.int32)


def _seen(mask_q, mask_k, i, j, block_q, block_k):
    """(Q, X) visibility of tile (i, j)."""
    at_q, at_k = pl.ds(i * block_q, block_q), pl.ds(j * block_k, block_k)
    floor, limit, group_q, order_q = (r[at_q][:, None] for r in mask_q)
    rank, group_k, order_k = (r[at_k][None, :] for r in mask_k)
    ranked = (floor <= rank) & (rank <= limit)
    return ranked | ((group_q == group_k) & (group_k >= 0) & (order_k <= order_q))


def _hide(scores, kind, seen):
    """Scores with hidden pairs at _NEG."""
    return lax.cond(kind == FULL, lambda s: s, lambda s: jnp.where(seen(), s, _NEG), scores)


def _forward_kernel(lists, counts, q_ref, k_ref, v_ref, mask_q, mask_k, out_ref, lse_ref, *, score, block_q, block_k):
    i = pl.program_id(0)
    here = pl.ds(i * block_q, block_q)
    q = q_ref[here, :]

    def visit(t, carry):
        top, total, acc = carry
        entry = lists[i, t]
        j, kind = entry >> 2, entry & 3
        keys = pl.ds(j * block_k, block_k)
        scores = _hide(score(_dot(q, k_ref[keys, :], (1, 1))), kind,
                       lambda: _seen(mask_q, mask_k, i, j, block_q, block_k))
        new = jnp.maximum(top, jnp.max(scores, 1))
        weights = jnp.where(scores > 0.5 * _NEG, jnp.exp(scores - new[:, None]), 0.0)
        shrink = jnp.exp(top - new)
        v = v_ref[keys, :]
        acc = acc * shrink[:, None] + _dot(weights.astype(v.dtype), v, (1, 0))
        return new, total * shrink + jnp.sum(weights, 1), acc

    start = (jnp.full((block_q,), _NEG, jnp.float32), jnp.zeros((block_q,), jnp.float32),
             jnp.zeros(q.shape, jnp.float32))
    top, total, acc = lax.fori_loop(0, counts[i], visit, start)
    blind = total == 0.0
    safe = jnp.where(blind, 1.0, total)
    out_ref[here, :] = (acc / safe[:, None]).astype(out_ref.dtype)
    lse_ref[here] = jnp.where(blind, -_NEG, top + jnp.log(safe))


def _cotangent_tile(q, k, v, d_out, lse, delta, kind, seen, score):
    """(Q, X) weights and cotangents of the products."""
    scores = score(_dot(q, k, (1, 1)))
    shown = _hide(scores, kind, seen)
    kept = shown > 0.5 * _NEG
    weights = jnp.where(kept, jnp.exp(jnp.where(kept, shown - lse[:, None], 0.0)), 0.0)
    return weights, score.pull_back(scores, weights * (_dot(d_out, v, (1, 1)) - delta[:, None]))


def _query_gradient_kernel(lists, counts, q_ref, k_ref, v_ref, mask_q, mask_k, lse, delta, d_out, dq_ref, *, score,
                           block_q, block_k):
    i = pl.program_id(0)
    here = pl.ds(i * block_q, block_q)
    q, do, lse_i, delta_i = q_ref[here, :], d_out[here, :], lse[here], delta[here]

    def visit(t, acc):
        entry = lists[i, t]
        j, kind = entry >> 2, entry & 3
        keys = pl.ds(j * block_k, block_k)
        k = k_ref[keys, :]
        _, d_products = _cotangent_tile(q, k, v_ref[keys, :], do, lse_i, delta_i, kind,
                                      lambda: _seen(mask_q, mask_k, i, j, block_q, block_k), score)
        return acc + _dot(d_products.astype(k.dtype), k, (1, 0))
    acc = lax.fori_loop(0, counts[i], visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[here, :] = acc.astype(dq_ref.dtype)


def _key_gradient_kernel(lists, counts, q_ref, k_ref, v_ref, mask_q, mask_k, lse, delta, d_out, dk_ref, dv_ref, *,
                         score, group, block_q, block_k):
    j = pl.program_id(0)
    here = pl.ds(j * block_k, block_k)
    k, v = k_ref[here, :], v_ref[here, :]

    def visit(t, carry):
        # one loop over tiles and the group's heads: unrolled heads would each claim shared memory for their tiles
        dk, dv = carry
        entry, member = lists[j, lax.div(t, jnp.int32(group))], lax.rem(t, jnp.int32(group))
        i, kind = entry >> 2, entry & 3
        rows = pl.ds(i * block_q, block_q)
        q, do = q_ref[member, rows, :], d_out[member, rows, :]
        weights, d_products = _cotangent_tile(q, k, v, do, lse[member, rows], delta[member, rows], kind,
                                              lambda: _seen(mask_q, mask_k, i, j, block_q, block_k), score)
        return dk + _dot(d_products.astype(q.dtype), q, (0, 0)), dv + _dot(weights.astype(do.dtype), do, (0, 0))
    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, counts[j] * group, visit, (zero, zero))
    dk_ref[here, :] = dk.astype(dk_ref.dtype)
    dv_ref[here, :] = dv.astype(dv_ref.dtype)


def _specs(q, k, mask, lists):
    """Whole-axis block specs over the grid (tile row, head, batch); `group` query heads per key head."""
    group = q.shape[1] // k.shape[1]
    batch_only = lambda *tail: pl.BlockSpec((None, *tail), lambda i, n, b: (b,) + (0,) * len(tail))
    divide = lambda n: n if group == 1 else lax.div(n, lax.full_like(n, group))
    query = pl.BlockSpec((None, None, *q.shape[2:]), lambda i, n, b: (b, n, 0, 0))
    key = pl.BlockSpec((None, None, *k.shape[2:]), lambda i, n, b: (b, divide(n), 0, 0))
    row = pl.BlockSpec((None, None, None, q.shape[2]), lambda i, n, b: (b, n, 0, 0))
    common = (batch_only(*lists.shape[1:]), batch_only(lists.shape[1]))
    masks = mask.map(lambda a: batch_only(a.shape[1]), lambda a: batch_only(a.shape[1]))
    return common, query, key, row, masks.query_fields, masks.key_fields


def _stages(width):
    """Loop iterations whose loads are in flight at once: wide heads leave no room for two."""
    return 1 if width > 128 else 2


def _params(width, block_q, block_k, interpret):
    """Warps enough for a tile's registers."""
    large = block_q * block_k > 4096 or width > 128
    return {"interpret": interpret,
            "compiler_params": plgpu.CompilerParams(num_warps=8 if large else 4, num_stages=_stages(width))}


def shared_memory(width: int, block_q: int, block_k: int, dtype) -> int:
    """Shared memory the largest of the three kernels asks for: tiles of q, k, v and d_out, scores, mask integers.

    Fitted to what Triton's passes allocate for Hopper (results/triton_resources.md): no less wherever that is
    within 227 KiB.

    Args:
      width: H.
      block_q, block_k: tile edges.
      dtype: of q, k and v.
    Returns:
      Bytes per block.
    """
    rows, stages = block_q + block_k, _stages(width)
    return 2 * jnp.dtype(dtype).itemsize * rows * width + 4 * stages * block_q * block_k + 32 * (stages - 1) * rows


def forward(q, k, v, mask: Visibility, score: Scoring, block_q: int, block_k: int, interpret=False):
    """Forward pass over padded arrays; arguments and results as `flash_tpu.forward`, tile edges powers of two."""
    batch, heads, queries, width = q.shape
    lists, counts = _row_lists(tile_classes(mask, block_q, block_k))
    common, query, key, row, mask_q, mask_k = _specs(q, k, mask, lists)
    return pl.pallas_call(
        functools.partial(_forward_kernel, score=score, block_q=block_q, block_k=block_k),
        grid=(queries // block_q, heads, batch),
        in_specs=(*common, query, key, key, mask_q, mask_k), out_specs=(query, row),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype),
                   jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32)),
        name="block_mask_attention_forward", **_params(width, block_q, block_k, interpret))(
            lists, counts, q, k, v, mask.query_fields, mask.key_fields)


def backward(q, k, v, mask: Visibility, score: Scoring, block_q: int, block_k: int, lse, delta, d_out, interpret=False):
    """Backward pass; arguments and results as `flash_tpu.backward`."""
    batch, heads, queries, width = q.shape
    keys, group = k.shape[1], heads // k.shape[1]
    classes = tile_classes(mask, block_q, block_k)
    static = dict(score=score, block_q=block_q, block_k=block_k)
    lists, counts = _row_lists(classes)
    common, query, key, row, mask_q, mask_k = _specs(q, k, mask, lists)
    dq = pl.pallas_call(
        functools.partial(_query_gradient_kernel, **static), grid=(queries // block_q, heads, batch),
        in_specs=(*common, query, key, key, mask_q, mask_k, row, row, query), out_specs=query,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="block_mask_attention_dq", **_params(width, block_q, block_k, interpret))(
            lists, counts, q, k, v, mask.query_fields, mask.key_fields, lse, delta, d_out)
    lists, counts = _row_lists(jnp.swapaxes(classes, 1, 2))
    common, _, _, _, mask_q, mask_k = _specs(q, k, mask, lists)
    members = pl.BlockSpec((None, None, group, queries, width), lambda j, n, b: (b, n, 0, 0, 0))
    rows = pl.BlockSpec((None, None, group, queries), lambda j, n, b: (b, n, 0, 0))
    own = pl.BlockSpec((None, None, *k.shape[2:]), lambda j, n, b: (b, n, 0, 0))
    grouped = lambda a: a.reshape(batch, keys, group, queries, width)
    flat = lambda a: a[:, :, 0].reshape(batch, keys, group, queries)
    dk, dv = pl.pallas_call(
        functools.partial(_key_gradient_kernel, group=group, **static), grid=(k.shape[2] // block_k, keys, batch),
        in_specs=(*common, members, own, own, mask_q, mask_k, rows, rows, members), out_specs=(own, own),
        out_shape=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        name="block_mask_attention_dkv", **_params(width, block_q, block_k, interpret))(
            lists, counts, grouped(q), k, v, mask.query_fields, mask.key_fields, flat(lse), flat(delta), grouped(d_out))
    return dq, dk, dv
