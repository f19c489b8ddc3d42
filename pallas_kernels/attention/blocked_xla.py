"""Tile-by-tile attention with online softmax in plain XLA: any backend, any dtype; empty tiles are branched over.

Letters: B batch, T query tokens, S keys, K key heads, G query heads per key head, H head width, I and J tiles.
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.scores import Scoring
from pallas_kernels.attention.tiles import EMPTY, tile_classes
from pallas_kernels.attention.visibility import Visibility

_NEG = -1e30


def _einsum(spec, a, b, operand, acc):
    precision = None if operand == jnp.bfloat16 else "highest"
    return jnp.einsum(spec, a.astype(operand), b.astype(operand), precision=precision, preferred_element_type=acc)


def _slice(a, tile, size, axis):
    return lax.dynamic_slice_in_dim(a, tile * size, size, axis)


def _tile_mask(mask: Visibility, i, j, block_q, block_k):
    """(B, 1, 1, block_q, block_k) visibility of one tile."""
    tile = mask.map(lambda a: _slice(a, i, block_q, 1), lambda a: _slice(a, j, block_k, 1))
    return tile.dense()[:, None, None]


def _needed(mask, block_q, block_k):
    """(I, J) bool: tiles some batch row needs (rows share one loop)."""
    return jnp.any(tile_classes(mask, block_q, block_k) != EMPTY, 0)


def forward(q, k, v, mask: Visibility, score: Scoring, block_q: int, block_k: int):
    """Forward pass over padded arrays.

    Args:
      q: (B, K, G, T, H), T a multiple of block_q.
      k, v: (B, K, S, H), S a multiple of block_k.
      mask: padded metadata.
      score: from products to scores.
      block_q, block_k: tile edges.
    Returns:
      out like q; log-sum-exp of the scores (B, K, G, T), accumulation dtype, +1e30 where a query sees nothing.
    """
    acc, operand = jnp.promote_types(q.dtype, jnp.float32), q.dtype
    needed = _needed(mask, block_q, block_k)

    def row(i):
        qi = _slice(q, i, block_q, 3)

        def visit(j, carry):
            top, total, out = carry
            seen = _tile_mask(mask, i, j, block_q, block_k)
            scores = score(_einsum("bkgth,bksh->bkgts", qi, _slice(k, j, block_k, 2), operand, acc))
            scores = jnp.where(seen, scores, _NEG)
            new_top = jnp.maximum(top, jnp.max(scores, -1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            values = _slice(v, j, block_k, 2)
            out = out * shrink[..., None] + _einsum("bkgts,bksh->bkgth", weights, values, operand, acc)
            return new_top, total * shrink + jnp.sum(weights, -1), out
        start = (jnp.full(qi.shape[:-1], _NEG, acc), jnp.zeros(qi.shape[:-1], acc), jnp.zeros(qi.shape, acc))
        step = lambda j, carry: lax.cond(needed[i, j], lambda c: visit(j, c), lambda c: c, carry)
        top, total, out = lax.fori_loop(0, needed.shape[1], step, start)
        blind = total == 0
        out = out / jnp.where(blind, 1.0, total)[..., None]
        return out.astype(q.dtype), jnp.where(blind, -_NEG, top + jnp.log(jnp.where(blind, 1.0, total)))

    out, lse = lax.map(row, jnp.arange(needed.shape[0]))          # (I, B, K, G, block_q, ...)
    return (jnp.moveaxis(out, 0, 3).reshape(q.shape), jnp.moveaxis(lse, 0, 3).reshape(q.shape[:-1]))


def backward(q, k, v, mask: Visibility, score: Scoring, block_q: int, block_k: int, lse, delta, d_out):
    """Backward pass in two sweeps: one over query tiles for dq, one over key tiles for dk and dv.

    Args:
      q, k, v, mask, score, block_q, block_k: as for `forward`.
      lse: (B, K, G, T) from `forward`.
      delta: (B, K, G, T) row sums of out * d_out.
      d_out: (B, K, G, T, H).
    Returns:
      dq, dk, dv like q, k, v.
    """
    acc, operand = lse.dtype, q.dtype
    needed = _needed(mask, block_q, block_k)

    def tile(i, j):
        """Weights and cotangents of the products of one tile, with the slices they came from."""
        qi, doi = _slice(q, i, block_q, 3), _slice(d_out, i, block_q, 3)
        kj, vj = _slice(k, j, block_k, 2), _slice(v, j, block_k, 2)
        seen = _tile_mask(mask, i, j, block_q, block_k)
        scores = score(_einsum("bkgth,bksh->bkgts", qi, kj, operand, acc))
        gap = jnp.where(seen, scores - _slice(lse, i, block_q, 3)[..., None], 0.0)
        weights = jnp.where(seen, jnp.exp(gap), 0.0)
        d_weights = _einsum("bkgth,bksh->bkgts", doi, vj, operand, acc)
        d_scores = weights * (d_weights - _slice(delta, i, block_q, 3)[..., None])
        return qi, kj, doi, weights, score.pull_back(scores, d_scores)

    def query_row(i):
        def visit(j, dq):
            _, kj, _, _, d_products = tile(i, j)
            return dq + _einsum("bkgts,bksh->bkgth", d_products, kj, operand, acc)
        step = lambda j, c: lax.cond(needed[i, j], lambda x: visit(j, x), lambda x: x, c)
        return lax.fori_loop(0, needed.shape[1], step, jnp.zeros(_slice(q, 0, block_q, 3).shape, acc)).astype(q.dtype)

    def key_row(j):
        def visit(i, carry):
            qi, _, doi, weights, d_products = tile(i, j)
            return (carry[0] + _einsum("bkgts,bkgth->bksh", d_products, qi, operand, acc),
                    carry[1] + _einsum("bkgts,bkgth->bksh", weights, doi, operand, acc))
        step = lambda i, c: lax.cond(needed[i, j], lambda x: visit(i, x), lambda x: x, c)
        zero = jnp.zeros(_slice(k, 0, block_k, 2).shape, acc)
        dk, dv = lax.fori_loop(0, needed.shape[0], step, (zero, zero))
        return dk.astype(k.dtype), dv.astype(v.dtype)

    dq = jnp.moveaxis(lax.map(query_row, jnp.arange(needed.shape[0])), 0, 3).reshape(q.shape)
    dk, dv = lax.map(key_row, jnp.arange(needed.shape[1]))
    join = lambda a: jnp.moveaxis(a, 0, 2).reshape(k.shape)
    return dq, join(dk), join(dv)
