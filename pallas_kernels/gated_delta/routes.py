"""The two routes of the FLARE paper in plain XLA, kept to be measured against the folded form.

Route I stores the clean state of every block boundary; Route II replays blocks in order inside each chunk and stores
every stride-th state. Both share the standard chunkwise clean pass.

Letters as in `streams`; N chunks, M blocks per chunk, C tokens per chunk, P tokens per block.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta.chunk import inverse_with_gradient
from pallas_kernels.gated_delta.streams import Stream, repeat_heads


class CleanPass(NamedTuple):
    """What Route I and Route II reuse of the clean forward pass (FLARE A.2.1), arrays (B, H, N, ...)."""

    out: jax.Array      # (B, H, N, C, F)
    states: jax.Array   # (B, H, N, E, F) chunk-start states
    values: jax.Array   # (B, H, N, C, F) chunk-corrected values
    final: jax.Array    # (B, H, E, F)


def _dot(spec, a, b, dtype):
    """einsum with operands rounded to dtype and wide accumulation."""
    acc = jnp.promote_types(dtype, jnp.float32)
    precision = None if dtype == jnp.bfloat16 else "highest"
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=acc)


def _inverse(system):
    function = lambda a: inverse_with_gradient(a, a.shape[-1])
    flat = system.reshape(-1, *system.shape[-2:])
    return jax.vmap(function)(flat).reshape(system.shape)


def _masked_exp(keep, exponent):
    return jnp.where(keep, jnp.exp(jnp.where(keep, exponent, 0.0)), 0.0)


def _chunked(stream: Stream, axis: int, heads: int, size: int, acc) -> Stream:
    """(..., T, H, d) to (..., H, N, size, d), gates to (..., H, N, size), keys repeated per value head."""
    def move(a):
        a = jnp.moveaxis(a, axis + 1, axis).astype(acc)
        return a.reshape(*a.shape[:axis + 1], -1, size, *a.shape[axis + 2:])
    q, k = (repeat_heads(a, axis + 1, heads) for a in (stream.q, stream.k))
    return Stream(*(move(a) for a in (q, k, stream.v, stream.g, stream.beta)))


def _clean_pass(x: Stream, starts, state, scale, dtype) -> CleanPass:
    """Chunkwise single-stream pass; x arrays (B, H, N, C, ...), starts (B, N, C) relative to the chunk or None."""
    size, acc = x.q.shape[-2], state.dtype
    index = jnp.arange(size)
    lower = index[:, None] >= index[None, :]
    sums = jnp.cumsum(x.g, -1)
    last = sums[..., -1:]
    from_start, to_end, carry = jnp.exp(sums), jnp.exp(last - sums), jnp.exp(last)[..., None]
    if starts is not None:
        starts = starts[:, None]  # (B, 1, N, C): one pattern for all heads
        lower = lower & (index[None, :] >= starts[..., None])
        from_start = from_start * (starts < 0)
        to_end = to_end * (index >= starts[..., -1:])
        carry = carry * (starts[..., -1:] < 0)[..., None]
    decay = _masked_exp(lower, sums[..., :, None] - sums[..., None, :])
    strict = index[:, None] > index[None, :]
    system = jnp.where(strict, x.beta[..., None] * _dot("...ie,...je->...ij", x.k, x.k, dtype) * decay, 0.0)
    solve = _inverse(system)
    own = _dot("...ij,...jf->...if", solve, x.beta[..., None] * x.v, dtype)
    erase = _dot("...ij,...je->...ie", solve, (x.beta * from_start)[..., None] * x.k, dtype)
    write = to_end[..., None] * x.k

    def step(s, y):
        own, erase, write, carry = y
        values = own - _dot("bhie,bhef->bhif", erase, s, dtype)
        return carry * s + _dot("bhie,bhif->bhef", write, values, dtype), (s.astype(dtype), values)
    carry = jnp.broadcast_to(carry, (*x.q.shape[:3], 1, 1))
    final, (states, values) = lax.scan(step, state,
                                       jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), (own, erase, write, carry)))
    states, values = jnp.moveaxis(states, 0, 2), jnp.moveaxis(values, 0, 2)
    scores = _dot("...ie,...je->...ij", x.q, x.k, dtype) * decay
    out = (_dot("...ie,...ef->...if", from_start[..., None] * x.q, states, dtype)
           + _dot("...ij,...jf->...if", scores, values, dtype))
    return CleanPass(scale * out.astype(acc), states, values, final)


def _noisy_blocks(x: Stream, seed, scale, dtype):
    """Block-end readout of independent noisy blocks; x arrays (..., P, .), seed (..., E, F) broadcasts against them."""
    index = jnp.arange(x.q.shape[-2])
    lower, strict = index[:, None] >= index[None, :], index[:, None] > index[None, :]
    sums = jnp.cumsum(x.g, -1)
    whole = sums[..., -1:]
    decay = _masked_exp(lower, sums[..., :, None] - sums[..., None, :])
    system = jnp.where(strict, x.beta[..., None] * _dot("...ie,...je->...ij", x.k, x.k, dtype) * decay, 0.0)
    read = _dot("...ie,...je->...ij", x.q, jnp.exp(whole - sums)[..., None] * x.k, dtype)
    read = _dot("...ij,...jk->...ik", read, _inverse(system), dtype)
    erased = (x.beta * jnp.exp(sums))[..., None] * x.k
    query = jnp.exp(whole)[..., None] * x.q - _dot("...ij,...je->...ie", read, erased, dtype)
    own = _dot("...ij,...jf->...if", read, x.beta[..., None] * x.v, dtype)
    return scale * (_dot("...ie,...ef->...if", query, seed, dtype) + own)


def _block_writes(x: Stream, clean: CleanPass, starts, block):
    """Per-block pieces of FLARE Eq. 11, (B, H, N, M, ...): decay, decayed keys, corrected values, document starts."""
    split = lambda a: a.reshape(*a.shape[:3], -1, block, *a.shape[4:])
    sums = jnp.cumsum(split(x.g), -1)
    carry, keys = jnp.exp(sums[..., -1]), jnp.exp(sums[..., -1:] - sums)[..., None] * split(x.k)
    if starts is None:
        fresh = jnp.zeros((), bool)
    else:
        first = starts.reshape(*starts.shape[:2], -1, block)[..., 0]                # (B, N, M)
        fresh = (first == jnp.arange(first.shape[-1]) * block)[:, None]
    return carry, keys, split(clean.values), jnp.broadcast_to(fresh, carry.shape)


def _advance(state, piece, dtype):
    """One clean block: zero the state where a document starts, then Eq. 11; returns (seed, state after)."""
    carry, keys, values, fresh = piece
    seed = jnp.where(fresh[..., None, None], 0.0, state)
    return seed, carry[..., None, None] * seed + _dot("...ie,...if->...ef", keys, values, dtype)


def _prepare(clean, noisy, block, chunk, starts, state):
    heads, acc = clean.v.shape[2], state.dtype
    x = _chunked(clean, 1, heads, chunk, acc)
    if starts is not None:
        starts = starts.reshape(starts.shape[0], -1, chunk)
        starts = starts - (jnp.arange(starts.shape[1]) * chunk)[None, :, None]
    if noisy is None:
        return x, None, starts
    y = _chunked(noisy, 2, heads, chunk, acc)
    split = lambda a: a.reshape(*a.shape[:4], -1, block, *a.shape[5:])
    return x, Stream(*(split(a) for a in y)), starts


def _finish(out, noisy_out, clean, noisy):
    def join(a, like, axis):
        tokens = a.reshape(*a.shape[:axis + 1], -1, a.shape[-1])
        return jnp.moveaxis(tokens, axis, axis + 1).astype(like.v.dtype)
    return join(out, clean, 1), None if noisy_out is None else join(noisy_out, noisy, 2)


def route_i(clean: Stream, noisy: Stream | None, *, block: int, chunk: int, starts, state, scale: float, dtype):
    """Route I: materialise every block-boundary clean state, then run all noisy blocks at once.

    Args:
      clean, noisy: streams of whole chunks, (B, T, ...) and (B, W, T, ...) or None.
      block, chunk: tokens per block and per chunk.
      starts: (B, T) int32 from `streams.document_starts`, or None.
      state: (B, H, E, F) initial state.
      scale: readout factor.
      dtype: operand dtype of products; block states are stored in it.
    Returns:
      out, noisy out or None, final state. Differentiable by autodiff.
    Source: FLARE A.2.5, Algorithm 5.
    """
    x, y, starts = _prepare(clean, noisy, block, chunk, starts, state)
    base = _clean_pass(x, starts, state, scale, dtype)
    if noisy is None:
        return (*_finish(base.out, None, clean, noisy), base.final)
    pieces = jax.tree.map(lambda a: jnp.moveaxis(a, 3, 0), _block_writes(x, base, starts, block))

    def fill(s, piece):
        seed, s = _advance(s, piece, dtype)
        return s, seed.astype(dtype)
    _, seeds = lax.scan(fill, base.states.astype(state.dtype), pieces)  # (M, B, H, N, E, F): the L / P states
    noisy_out = _noisy_blocks(y, jnp.moveaxis(seeds, 0, 3)[:, None], scale, dtype)
    return (*_finish(base.out, noisy_out, clean, noisy), base.final)


def default_stride(block: int, chunk: int) -> int:
    """Checkpoint stride in blocks by block size (FLARE A.2.6, "Choosing the stride")."""
    blocks = chunk // block
    wanted = {1: 16, 2: 8, 4: 2}.get(block, 8)
    return max(s for s in range(1, min(wanted, blocks) + 1) if blocks % s == 0)


def route_ii(clean: Stream, noisy: Stream | None, *, block: int, chunk: int, starts, state, scale: float, dtype,
             stride: int | None = None):
    """Route II: replay clean blocks in order inside each chunk, keeping every stride-th state for the backward pass.

    All chunks advance together; rematerialisation stands in for the paper's in-register replay.

    Args:
      clean, noisy, block, chunk, starts, state, scale, dtype: as for `route_i`.
      stride: blocks between stored states, dividing chunk // block; the paper's choice when None.
    Returns:
      out, noisy out or None, final state. Differentiable by autodiff.
    Source: FLARE A.2.6, Algorithms 6-8.
    """
    x, y, starts = _prepare(clean, noisy, block, chunk, starts, state)
    base = _clean_pass(x, starts, state, scale, dtype)
    if noisy is None:
        return (*_finish(base.out, None, clean, noisy), base.final)
    stride = default_stride(block, chunk) if stride is None else stride
    groups = chunk // block // stride
    grouped = lambda a, axis: (lambda m: m.reshape(groups, stride, *m.shape[1:]))(jnp.moveaxis(a, axis, 0))
    pieces = jax.tree.map(lambda a: grouped(a, 3), _block_writes(x, base, starts, block))
    views = Stream(*(grouped(a, 4) for a in y))

    def one(s, z):
        piece, view = z
        seed, s = _advance(s, piece, dtype)
        return s, _noisy_blocks(view, seed[:, None], scale, dtype).astype(noisy.v.dtype)
    segment = jax.checkpoint(lambda s, z: lax.scan(jax.checkpoint(one), s, z))
    _, noisy_out = lax.scan(segment, base.states.astype(state.dtype), (pieces, views))
    noisy_out = jnp.moveaxis(noisy_out.reshape(-1, *noisy_out.shape[2:]), 0, 4)      # (B, W, H, N, M, P, F)
    return (*_finish(base.out, noisy_out, clean, noisy), base.final)
