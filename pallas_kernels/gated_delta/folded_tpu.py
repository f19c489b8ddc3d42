"""The folded two-stream gated delta rule as Mosaic (TPU) kernels: the chunk algebra with the clean state held in VMEM.

The grid is (batch row, value head, chunk); the chunk axis runs in order and carries the state (backward: its cotangent)
in scratch.
Letters as in `streams`; N chunks, C tokens per chunk.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta.chunk import ChunkStream, Plan, chunk_backward, chunk_forward
from pallas_kernels.gated_delta.streams import Stream


def head_major(stream: Stream, axis: int, chunk: int) -> ChunkStream:
    """Token-major arrays to head-major, gates as one (1, C) row per chunk."""
    move = lambda a: jnp.moveaxis(a, axis + 1, axis)
    rows = lambda a: (lambda m: m.reshape(*m.shape[:axis + 1], -1, 1, chunk))(move(a))
    return ChunkStream(move(stream.q), move(stream.k), move(stream.v), rows(stream.g), rows(stream.beta))


def token_major(heads: ChunkStream, like: Stream, axis: int) -> Stream:
    """Inverse of `head_major` for cotangents; those of shared key heads are summed over their value heads."""
    keys = like.q.shape[axis + 1]

    def key(a):
        grouped = a.reshape(*a.shape[:axis], keys, a.shape[axis] // keys, *a.shape[axis + 1:])
        summed = grouped[(slice(None),) * (axis + 1) + (0,)] if grouped.shape[axis + 1] == 1 else grouped.sum(axis + 1)
        return jnp.moveaxis(summed, axis, axis + 1)
    gate = lambda a: jnp.moveaxis(a.reshape(*a.shape[:axis + 1], -1), axis, axis + 1)
    parts = (key(heads.q), key(heads.k), jnp.moveaxis(heads.v, axis, axis + 1), gate(heads.g), gate(heads.beta))
    return Stream(*(p.astype(l.dtype) for p, l in zip(parts, like)))


def _specs(stream: ChunkStream, ratio: int, chunk: int, views: int, order):
    """Block specs of one stream; `order` maps the grid's chunk coordinate to a chunk number."""
    view, at = ((None, views), lambda b: (b, 0)) if views else ((None,), lambda b: (b,))
    # lax.div: `//` brings in a sign test that asks for the device kind, which ahead-of-time compilation does not have
    key_head = lambda h: h if ratio == 1 else jax.lax.div(h, jax.lax.full_like(h, ratio))
    key = lambda e: pl.BlockSpec((*view, None, chunk, e), lambda b, h, c: (*at(b), key_head(h), order(c), 0))
    value = lambda f: pl.BlockSpec((*view, None, chunk, f), lambda b, h, c: (*at(b), h, order(c), 0))
    gate = lambda: pl.BlockSpec((*view, None, None, 1, chunk), lambda b, h, c: (*at(b), h, order(c), 0, 0))
    return ChunkStream(key(stream.q.shape[-1]), key(stream.k.shape[-1]), value(stream.v.shape[-1]), gate(), gate())


def _per_view(refs: ChunkStream | None) -> tuple[ChunkStream, ...]:
    return () if refs is None else tuple(ChunkStream(*(r[w] for r in refs)) for w in range(refs.q.shape[0]))


def _forward_kernel(plan, clean, noisy, starts, initial, out, noisy_out, final, kept, state):
    chunk = pl.program_id(2)

    @pl.when(chunk == 0)
    def _():
        state[...] = initial[...]

    before = state[...]
    if kept is not None:
        kept[...] = before.astype(kept.dtype)
    result, views, after = chunk_forward(plan, ChunkStream(*(r[...] for r in clean)), _per_view(noisy), before,
                                         None if starts is None else starts[...])
    out[...] = result.astype(out.dtype)
    for w, view in enumerate(views):
        noisy_out[w] = view.astype(noisy_out.dtype)
    state[...] = after

    @pl.when(chunk == pl.num_programs(2) - 1)
    def _():
        final[...] = after


def _backward_kernel(plan, clean, noisy, starts, kept, d_out, d_noisy_out, d_final, d_clean, d_noisy, d_initial,
                     d_state):
    chunk = pl.program_id(2)

    @pl.when(chunk == 0)
    def _():
        d_state[...] = d_final[...]

    acc = d_state.dtype
    views = _per_view(noisy)
    d_views = tuple(d_noisy_out[w].astype(acc) for w in range(len(views)))
    grads, view_grads, before = chunk_backward(
        plan, ChunkStream(*(r[...] for r in clean)), views, kept[...].astype(acc),
        None if starts is None else starts[...], d_out[...].astype(acc), d_views, d_state[...])
    for ref, value in zip(d_clean, grads):
        ref[...] = value.astype(ref.dtype)
    for w, view in enumerate(view_grads):
        for ref, value in zip(d_noisy, view):
            ref[w] = value.astype(ref.dtype)
    d_state[...] = before

    @pl.when(chunk == pl.num_programs(2) - 1)
    def _():
        d_initial[...] = before


def _params(interpret):
    return {"interpret": interpret, "compiler_params": pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"))}


def chunk_rows(starts, chunk):
    """(B, T) document starts to (B, N, 1, C), relative to each chunk's first token."""
    rows = starts.reshape(starts.shape[0], -1, 1, chunk)
    return rows - (jnp.arange(rows.shape[1], dtype=jnp.int32) * chunk)[None, :, None, None]


def forward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None,
            state: jax.Array, keep_states: bool, interpret=False):
    """Forward pass over whole chunks; arguments and results as `folded_xla.forward`.

    Chunk-start states are kept as (B, H, N, E, F), in the dtype of k.

    Args:
      plan, chunk_size, clean, noisy, starts, state, keep_states: as for `folded_xla.forward`.
      interpret: False, True or a `pltpu.InterpretParams`.
    Returns:
      out, noisy out or None, final state, chunk-start states or None.
    """
    batch, tokens, heads, width = clean.v.shape
    ratio, chunks, views = heads // clean.q.shape[2], tokens // chunk_size, 0 if noisy is None else noisy.q.shape[1]
    order = lambda c: c
    c_in, n_in = head_major(clean, 1, chunk_size), None if noisy is None else head_major(noisy, 2, chunk_size)
    s_in = None if starts is None else chunk_rows(starts, chunk_size)
    per_head = pl.BlockSpec((None, None, *state.shape[2:]), lambda b, h, c: (b, h, 0, 0))
    c_spec = _specs(c_in, ratio, chunk_size, 0, order)
    n_spec = None if noisy is None else _specs(n_in, ratio, chunk_size, views, order)
    s_spec = None if starts is None else pl.BlockSpec((None, None, 1, chunk_size), lambda b, h, c: (b, c, 0, 0))
    kept = jax.ShapeDtypeStruct((batch, heads, chunks, *state.shape[2:]), clean.k.dtype) if keep_states else None
    kept_spec = None
    if keep_states:
        kept_spec = pl.BlockSpec((None, None, None, *state.shape[2:]), lambda b, h, c: (b, h, c, 0, 0))
    result = pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=(batch, heads, chunks),
        in_specs=(c_spec, n_spec, s_spec, per_head),
        out_specs=(c_spec.v, None if noisy is None else n_spec.v, per_head, kept_spec),
        out_shape=(jax.ShapeDtypeStruct(c_in.v.shape, clean.v.dtype),
                   None if noisy is None else jax.ShapeDtypeStruct(n_in.v.shape, noisy.v.dtype),
                   jax.ShapeDtypeStruct(state.shape, state.dtype), kept),
        scratch_shapes=[pltpu.VMEM(state.shape[2:], state.dtype)],
        name="two_stream_gated_delta_forward", **_params(interpret))(c_in, n_in, s_in, state)
    out, noisy_out, final, kept = result
    noisy_out = None if noisy is None else jnp.moveaxis(noisy_out, 2, 3)
    return jnp.moveaxis(out, 1, 2), noisy_out, final, kept


def backward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None,
             kept: jax.Array, d_out: jax.Array, d_noisy: jax.Array | None, d_final: jax.Array, interpret=False):
    """Backward pass, chunks in reverse; arguments and results as `folded_xla.backward` (kept is (B, H, N, E, F))."""
    batch, tokens, heads, width = clean.v.shape
    ratio, chunks, views = heads // clean.q.shape[2], tokens // chunk_size, 0 if noisy is None else noisy.q.shape[1]
    order = lambda c: chunks - 1 - c
    c_in, n_in = head_major(clean, 1, chunk_size), None if noisy is None else head_major(noisy, 2, chunk_size)
    s_in = None if starts is None else chunk_rows(starts, chunk_size)
    per_head = pl.BlockSpec((None, None, *d_final.shape[2:]), lambda b, h, c: (b, h, 0, 0))
    c_spec = _specs(c_in, ratio, chunk_size, 0, order)
    n_spec = None if noisy is None else _specs(n_in, ratio, chunk_size, views, order)
    # one cotangent block per value head, summed over shared keys outside
    c_grad = _specs(c_in, 1, chunk_size, 0, order)
    n_grad = None if noisy is None else _specs(n_in, 1, chunk_size, views, order)
    s_spec = None if starts is None else pl.BlockSpec((None, None, 1, chunk_size), lambda b, h, c: (b, order(c), 0, 0))
    kept_spec = pl.BlockSpec((None, None, None, *d_final.shape[2:]), lambda b, h, c: (b, h, order(c), 0, 0))

    def grad_shapes(stream, axis):
        if stream is None:
            return None
        full = lambda a: jax.ShapeDtypeStruct((*a.shape[:axis], heads, *a.shape[axis + 1:]), a.dtype)
        return ChunkStream(*(full(a) for a in stream))
    d_clean, d_views, d_initial = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        grid=(batch, heads, chunks),
        in_specs=(c_spec, n_spec, s_spec, kept_spec, c_spec.v, None if noisy is None else n_spec.v, per_head),
        out_specs=(c_grad, n_grad, per_head),
        out_shape=(grad_shapes(c_in, 1), grad_shapes(n_in, 2), jax.ShapeDtypeStruct(d_final.shape, d_final.dtype)),
        scratch_shapes=[pltpu.VMEM(d_final.shape[2:], d_final.dtype)],
        name="two_stream_gated_delta_backward", **_params(interpret))(
            c_in, n_in, s_in, kept, jnp.moveaxis(d_out, 2, 1), None if noisy is None else jnp.moveaxis(d_noisy, 3, 2),
            d_final)
    return (token_major(d_clean, clean, 1), None if noisy is None else token_major(d_views, noisy, 2), d_initial)
