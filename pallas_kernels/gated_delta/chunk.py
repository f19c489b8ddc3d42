"""One chunk of the folded two-stream gated delta rule: plain matrix algebra on one head, used by every backend.

Everything is two-dimensional and built from dot, exp, where and iota, so that the same lines run batched under XLA,
inside a Mosaic (TPU) kernel and inside a Triton (GPU) kernel, and so that `jax.vjp` of them is the backward pass.

Letters: C tokens of a chunk, E key width, F value width. G is the cumulative log gate inside the chunk, S the state
before it.

    V' = (I + A)^-1 (beta V - beta e^G K S)                A = strict_lower(beta K K^T e^(G_i - G_j))
    O  = s (e^G Q S + lower(Q K^T e^(G_i - G_j)) V')       S_next = e^(G_C) S + (e^(G_C - G) K)^T V'

and per noisy view (tilde), with everything restricted to diffusion blocks:

    R = Q~ (e^(end - j) K~)^T,  N = R (I + A~)^-1,  q^ = e^(whole block) Q~ - N (beta~ e^(start..j) K~)
    O~ = s (e^(G_seed) q^ S + (q^ K^T e^(G_seed - G_j) [j < block start]) V' + N beta~ V~)

A causal view's R is its lower triangle, with decays from j to the row itself. q^ is the query with the block's own
state transition folded in, so the clean state at the block's start is only ever read through the chunk formula and
never formed. Sums of log gates over an interval are masked matrix products rather than differences of prefix sums: all
terms share a sign, so strong gates (-80 a token) cost no precision.
Source: FLARE Eqs. 9-12 and A.2.1; the folding is this project's.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class ChunkStream(NamedTuple):
    """One head's chunk: q, k (C, E); v (C, F); g, beta (1, C) as rows, which pack densely on every backend."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class Operands(NamedTuple):
    """How a product treats its operands: the dtype they are rounded to, and the precision of all but bfloat16 ones."""

    dtype: jnp.dtype
    # float32 operands would otherwise be rounded to bfloat16 by the matrix units of TPUs
    wide: lax.Precision | lax.DotAlgorithmPreset = lax.Precision.HIGHEST


class Plan(NamedTuple):
    """Static choices: diffusion block size, readout scale, operands of products, whether documents are marked, whether
    a noisy token reads the state after itself instead of its block's last."""

    block_size: int
    scale: float
    operands: Operands
    has_documents: bool
    causal: bool = False


def _product(a, b, contract, operands):
    """a . b over one axis each, operands rounded to their dtype, accumulated in float32 (float64 for float64)."""
    acc = jnp.promote_types(operands.dtype, jnp.float32)
    precision = operands.wide if operands.dtype != jnp.bfloat16 else lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(operands.dtype), b.astype(operands.dtype), axes, precision=precision,
                           preferred_element_type=acc)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product_vjp(a, b, contract, operands):
    return _product(a, b, contract, operands)


def _product_fwd(a, b, contract, operands):
    return _product(a, b, contract, operands), (a, b)


def _product_bwd(contract, operands, residuals, ct):
    # the cotangent is rounded like any operand; left to autodiff it would meet bfloat16 operands in float32
    a, b = residuals
    ca, cb = contract
    da = _product(ct, b, (1, 1 - cb), operands) if ca == 1 else _product(b, ct, (1 - cb, 1), operands)
    db = _product(a, ct, (1 - ca, 0), operands) if cb == 0 else _product(ct, a, (0, 1 - ca), operands)
    return da.astype(a.dtype), db.astype(b.dtype)


_product_vjp.defvjp(_product_fwd, _product_bwd)


def _sum_later(x, wide):
    """y[i, j] = sum of x[i, t] over t > j, as a product with a constant triangle."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    col = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return _product(x, (row > col).astype(x.dtype), (1, 0), Operands(x.dtype, wide))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_later_vjp(x, wide):
    return _sum_later(x, wide)


def _sum_later_bwd(wide, _, ct):
    # only x has a cotangent: the generic rule would also pay for the constant triangle's
    row = lax.broadcasted_iota(jnp.int32, ct.shape, 0)
    col = lax.broadcasted_iota(jnp.int32, ct.shape, 1)
    return (_product(ct, (row > col).astype(ct.dtype), (1, 1), Operands(ct.dtype, wide)),)


_sum_later_vjp.defvjp(lambda x, wide: (_sum_later(x, wide), None), _sum_later_bwd)


def _divide(index, size):
    """Floor division of a non-negative int32 index by a Python integer (`//` would add sign handling to kernels)."""
    return lax.div(index, lax.full_like(index, size))


def unit_lower_inverse(a: jax.Array, size: int, wide=lax.Precision.HIGHEST) -> jax.Array:
    """(I + a)^-1 for a strictly lower (C, C) matrix that is block diagonal with blocks of `size`.

    Doubles the size of the inverted diagonal blocks: [[L, 0], [a, M]]^-1 = [[L^-1, 0], [-M^-1 a L^-1, M^-1]]. As many
    products as powers by repeated squaring, but every intermediate is itself an inverse and stays small, where powers
    of `a` grow like binomial coefficients when keys repeat (a run of mask tokens) and cancel to nothing in float32.

    Args:
      a: (C, C) strictly lower triangular, zero outside diagonal blocks.
      size: edge of those blocks.
      wide: precision of the products.
    Returns:
      (C, C) the inverse, same dtype.
    """
    mul = lambda x, y: _product(x, y, (1, 0), Operands(a.dtype, wide))
    row = lax.broadcasted_iota(jnp.int32, a.shape, 0)
    col = lax.broadcasted_iota(jnp.int32, a.shape, 1)
    inverse = (row == col).astype(a.dtype)
    if size & (size - 1):
        size = a.shape[0]  # doubled blocks only line up with blocks that are powers of two: invert the whole
    half = 1
    while half < size:
        joins = (_divide(row, 2 * half) == _divide(col, 2 * half)) & (_divide(row, half) != _divide(col, half))
        corner = jnp.where(joins, a, 0.0)
        if half == 1:
            inverse = inverse - corner
        else:
            inverse = inverse - mul(mul(inverse, corner), inverse)
        half *= 2
    return inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def inverse_with_gradient(a, size, wide=lax.Precision.HIGHEST):
    """`unit_lower_inverse`, whose gradient multiplies by the inverse instead of going back through its steps."""
    return unit_lower_inverse(a, size, wide)


def _inverse_fwd(a, size, wide):
    inverse = unit_lower_inverse(a, size, wide)
    return inverse, inverse


def _inverse_bwd(size, wide, inverse, ct):
    operands = Operands(inverse.dtype, wide)
    return (-_product(_product(inverse, ct, (0, 0), operands), inverse, (1, 1), operands),)


inverse_with_gradient.defvjp(_inverse_fwd, _inverse_bwd)


def _column(row_vector, eye):
    """(1, C) -> (C, 1) by a masked sum over lanes, which every backend can lower."""
    return jnp.sum(jnp.where(eye, row_vector, jnp.zeros_like(row_vector)), axis=1, keepdims=True)


def _interval_decay(g, path, keep, sum_later):
    """exp of the log gates summed over {t : path[i, t] and t > j}, zero where not keep[i, j]; (C, C)."""
    total = sum_later(jnp.where(path, g, 0.0))
    return jnp.where(keep, jnp.exp(jnp.where(keep, total, 0.0)), 0.0)


def _total_decay(g, path):
    """exp of the log gates summed over {t : path[i, t]}; (C, 1)."""
    return jnp.exp(jnp.sum(jnp.where(path, g, 0.0), axis=1, keepdims=True))


def chunk_forward(plan: Plan, clean: ChunkStream, views: tuple[ChunkStream, ...], state: jax.Array,
                  starts: jax.Array | None,
                  differentiable: bool = False) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    """Advances the clean state by one chunk and reads both streams.

    Args:
      plan: static choices.
      clean: the chunk's clean tokens.
      views: the chunk's tokens of each noisy view.
      state: (E, F) clean state before the chunk, accumulation dtype.
      starts: (1, C) int32, first token of each token's document relative to the chunk's first token (negative: it began
        earlier), or None without documents.
      differentiable: route products through their custom derivative rules (for `jax.vjp`); plain primitives otherwise.
    Returns:
      outputs (C, F), noisy outputs per view (C, F), next state (E, F), all in the accumulation dtype.
    """
    product, inverse, later = ((_product_vjp, inverse_with_gradient, _sum_later_vjp) if differentiable
                               else (_product, unit_lower_inverse, _sum_later))
    mul = lambda a, b, contract=(1, 0): product(a, b, contract, plan.operands)
    invert = lambda a, size: inverse(a, size, plan.operands.wide)
    sum_later = lambda x: later(x, plan.operands.wide)
    size, acc, block = clean.q.shape[0], state.dtype, plan.block_size
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    col = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    eye, below, lower = row == col, row > col, row >= col
    block_start = _divide(row, block) * block
    q, k, v, g, beta = (a.astype(acc) for a in clean)
    carried = last_keep = None
    if plan.has_documents:
        start = _column(starts, eye)
        carried = (start < 0).astype(acc)  # this row's document reaches back before the chunk
        last = jnp.max(starts, axis=1, keepdims=True)  # starts never decrease: the document that leaves the chunk
        last_keep = (lax.broadcasted_iota(jnp.int32, (size, 1), 0) >= last).astype(acc)
        lower, below = lower & (col >= start), below & (col >= start)

    # clean stream
    beta_col = _column(beta, eye)
    decay = _interval_decay(g, row >= col, lower, sum_later)
    from_start = _total_decay(g, row >= col)
    to_end = _total_decay(g, col > row)
    carry = jnp.exp(jnp.sum(g, axis=1, keepdims=True))
    if plan.has_documents:
        from_start, to_end, carry = from_start * carried, to_end * last_keep, carry * (last < 0).astype(acc)
    system = jnp.where(below, beta_col * mul(k, k, (1, 1)) * decay, 0.0)
    values = mul(invert(system, size), beta_col * (v - from_start * mul(k, state)))
    out = plan.scale * (from_start * mul(q, state) + mul(mul(q, k, (1, 1)) * decay, values))
    next_state = carry * state + mul(to_end * k, values, (0, 0))
    if not views:
        return out, (), next_state

    # what every view shares: decays from clean keys, and from the chunk's start, to the view's block start
    before = col < block_start
    seed_keep = before & lower
    seed_from_start = _total_decay(g, before)
    if plan.has_documents:
        seed_from_start = seed_from_start * carried
    one_block = block == size  # then no clean token of the chunk precedes the block
    seed_decay = None if one_block else _interval_decay(g, before, seed_keep, sum_later)
    same = block_start == _divide(col, block) * block
    inner_lower, inner_below = same & (row >= col), same & (row > col)

    outs = []
    for view in views:
        qn, kn, vn, gn, bn = (a.astype(acc) for a in view)
        bn_col = _column(bn, eye)
        inner = _interval_decay(gn, inner_lower, inner_lower, sum_later)
        system = jnp.where(inner_below, bn_col * mul(kn, kn, (1, 1)) * inner, 0.0)
        if plan.causal:
            read = mul(qn, kn, (1, 1)) * inner
        else:
            read = jnp.where(same, mul(qn, _total_decay(gn, same & (col > row)) * kn, (1, 1)), 0.0)
        read = mul(read, invert(system, block))
        folded = _total_decay(gn, inner_lower if plan.causal else same) * qn
        folded = folded - mul(read, (bn_col * _total_decay(gn, inner_lower)) * kn)
        total = seed_from_start * mul(folded, state) + mul(read, bn_col * vn)
        if not one_block:
            total = total + mul(mul(folded, k, (1, 1)) * seed_decay, values)
        outs.append(plan.scale * total)
    return out, tuple(outs), next_state


def chunk_backward(plan: Plan, clean: ChunkStream, views: tuple[ChunkStream, ...], state: jax.Array,
                   starts: jax.Array | None, d_out: jax.Array, d_views: tuple[jax.Array, ...], d_next: jax.Array):
    """Cotangents of `chunk_forward` (recomputed from the chunk's inputs and start state).

    Args:
      plan, clean, views, state, starts: as for `chunk_forward`.
      d_out, d_views, d_next: cotangents of its three results, in their shapes and the accumulation dtype.

    Returns:
      (d_clean, d_views, d_state): ChunkStreams of cotangents in the inputs' dtypes, and (E, F).
    """
    function = lambda c, n, s: chunk_forward(plan, c, n, s, starts, differentiable=True)
    _, pullback = jax.vjp(function, clean, views, state)
    return pullback((d_out, d_views, d_next))
