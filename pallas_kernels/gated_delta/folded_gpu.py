"""The folded two-stream gated delta rule as Triton (GPU) kernels: one program per (batch row, value head), looping over chunks.

Lowering is checked in tests; nothing has been timed on a device, so these run only when asked for by name. At chunk 64 and width
128 the backward kernel wants more shared memory than Hopper has (results/triton_resources.md).
Letters as in `streams`; N chunks.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gated_delta.chunk import ChunkStream, Plan, chunk_backward, chunk_forward
from pallas_kernels.gated_delta.folded_tpu import chunk_rows, head_major, token_major
from pallas_kernels.gated_delta.streams import Stream


def _load(refs: ChunkStream, at, chunk) -> ChunkStream:
    gate = lambda r: r[chunk, :][None, :]
    return ChunkStream(refs.q[at, :], refs.k[at, :], refs.v[at, :], gate(refs.g), gate(refs.beta))


def _load_views(noisy, views, at, chunk):
    """`noisy` is a tuple of one ChunkStream of refs per view."""
    return tuple(_load(noisy[w], at, chunk) for w in range(views))


def _store(refs: ChunkStream, values: ChunkStream, at, chunk):
    for ref, value in zip(refs[:3], values[:3]):
        ref[at, :] = value.astype(ref.dtype)
    for ref, value in zip(refs[3:], values[3:]):
        ref[chunk, :] = value[0].astype(ref.dtype)


def _start_row(starts, chunk):
    return None if starts is None else starts[chunk, :][None, :]


def _forward_kernel(clean, noisy, starts, initial, out, noisy_out, final, kept, *, plan, chunk_size, chunks):
    def step(chunk, state):
        at = pl.ds(chunk * chunk_size, chunk_size)
        if kept is not None:
            kept[chunk, :, :] = state.astype(kept.dtype)
        result, views, state = chunk_forward(plan, _load(clean, at, chunk), _load_views(noisy, len(noisy), at, chunk), state,
                                             _start_row(starts, chunk))
        out[at, :] = result.astype(out.dtype)
        for ref, view in zip(noisy_out, views):
            ref[at, :] = view.astype(ref.dtype)
        return state
    final[...] = lax.fori_loop(0, chunks, step, initial[...])


def _backward_kernel(clean, noisy, starts, kept, d_out, d_noisy_out, d_final, d_clean, d_noisy, d_initial, *, plan, chunk_size,
                     chunks):
    def step(t, d_state):
        chunk = chunks - 1 - t
        at = pl.ds(chunk * chunk_size, chunk_size)
        acc = d_state.dtype
        grads, view_grads, d_state = chunk_backward(
            plan, _load(clean, at, chunk), _load_views(noisy, len(noisy), at, chunk), kept[chunk, :, :].astype(acc),
            _start_row(starts, chunk), d_out[at, :].astype(acc), tuple(r[at, :].astype(acc) for r in d_noisy_out), d_state)
        _store(d_clean, grads, at, chunk)
        for refs, values in zip(d_noisy, view_grads):
            _store(refs, values, at, chunk)
        return d_state
    d_initial[...] = lax.fori_loop(0, chunks, step, d_final[...])


def _specs(stream: ChunkStream, ratio: int) -> ChunkStream:
    key_head = lambda h: h if ratio == 1 else lax.div(h, lax.full_like(h, ratio))
    key = lambda a: pl.BlockSpec((None, None, *a.shape[2:]), lambda b, h: (b, key_head(h), 0, 0))
    own = lambda a: pl.BlockSpec((None, None, *a.shape[2:]), lambda b, h: (b, h, 0, 0))
    return ChunkStream(key(stream.q), key(stream.k), own(stream.v), own(stream.g), own(stream.beta))


def _split(stream: Stream, chunk: int) -> ChunkStream:
    """Head-major arrays with gates as (B, H, N, C)."""
    heads = head_major(stream, 1, chunk)
    return ChunkStream(heads.q, heads.k, heads.v, heads.g[:, :, :, 0], heads.beta[:, :, :, 0])


def _per_view(noisy: Stream | None) -> tuple[Stream, ...]:
    return () if noisy is None else tuple(Stream(*(a[:, w] for a in noisy)) for w in range(noisy.q.shape[1]))


def _inputs(chunk_size, clean, noisy, starts, ratio):
    c_in = _split(clean, chunk_size)
    n_in = tuple(_split(s, chunk_size) for s in _per_view(noisy))
    s_in = None if starts is None else chunk_rows(starts, chunk_size)[:, :, 0]
    s_spec = None if starts is None else pl.BlockSpec((None, *s_in.shape[1:]), lambda b, h: (b, 0, 0))
    return c_in, n_in, s_in, _specs(c_in, ratio), tuple(_specs(s, ratio) for s in n_in), s_spec


def _tensor_cores(plan: Plan, interpret) -> Plan:
    """float32 products as three TF32 ones: plain float32 ones use no tensor core, and take a compiler minutes to unroll."""
    if interpret:
        return plan
    return plan._replace(operands=plan.operands._replace(wide=lax.DotAlgorithmPreset.TF32_TF32_F32_X3))


def _params(interpret):
    return {"interpret": interpret, "compiler_params": plgpu.CompilerParams(num_warps=8, num_stages=1)}


def forward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None, state: jax.Array,
            keep_states: bool, interpret=False):
    """Forward pass over whole chunks; arguments and results as `folded_tpu.forward`."""
    batch, tokens, heads, _ = clean.v.shape
    c_in, n_in, s_in, c_spec, n_spec, s_spec = _inputs(chunk_size, clean, noisy, starts, heads // clean.q.shape[2])
    chunks = tokens // chunk_size
    per_head = pl.BlockSpec((None, None, *state.shape[2:]), lambda b, h: (b, h, 0, 0))
    kept = jax.ShapeDtypeStruct((batch, heads, chunks, *state.shape[2:]), clean.k.dtype) if keep_states else None
    kept_spec = pl.BlockSpec((None, None, *kept.shape[2:]), lambda b, h: (b, h, 0, 0, 0)) if keep_states else None
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    out, noisy_out, final, kept = pl.pallas_call(
        functools.partial(_forward_kernel, plan=_tensor_cores(plan, interpret), chunk_size=chunk_size, chunks=chunks),
        grid=(batch, heads),
        in_specs=(c_spec, n_spec, s_spec, per_head), out_specs=(c_spec.v, tuple(s.v for s in n_spec), per_head, kept_spec),
        out_shape=(like(c_in.v), tuple(like(s.v) for s in n_in), like(state), kept),
        name="two_stream_gated_delta_forward", **_params(interpret))(c_in, n_in, s_in, state)
    noisy_out = None if noisy is None else jnp.stack([jnp.moveaxis(o, 1, 2) for o in noisy_out], 1)
    return jnp.moveaxis(out, 1, 2), noisy_out, final, kept


def backward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None, kept: jax.Array,
             d_out: jax.Array, d_noisy: jax.Array | None, d_final: jax.Array, interpret=False):
    """Backward pass, chunks in reverse; arguments and results as `folded_tpu.backward`."""
    batch, tokens, heads, _ = clean.v.shape
    c_in, n_in, s_in, c_spec, n_spec, s_spec = _inputs(chunk_size, clean, noisy, starts, heads // clean.q.shape[2])
    chunks = tokens // chunk_size
    per_head = pl.BlockSpec((None, None, *d_final.shape[2:]), lambda b, h: (b, h, 0, 0))
    kept_spec = pl.BlockSpec((None, None, *kept.shape[2:]), lambda b, h: (b, h, 0, 0, 0))
    full = lambda s: ChunkStream(*(jax.ShapeDtypeStruct((batch, heads, *a.shape[2:]), a.dtype) for a in s))
    d_views = () if noisy is None else tuple(jnp.moveaxis(d_noisy[:, w], 2, 1) for w in range(d_noisy.shape[1]))
    d_clean, d_views, d_initial = pl.pallas_call(
        functools.partial(_backward_kernel, plan=_tensor_cores(plan, interpret), chunk_size=chunk_size, chunks=chunks),
        grid=(batch, heads),
        in_specs=(c_spec, n_spec, s_spec, kept_spec, c_spec.v, tuple(s.v for s in n_spec), per_head),
        out_specs=(_specs(c_in, 1), tuple(_specs(s, 1) for s in n_in), per_head),
        out_shape=(full(c_in), tuple(full(s) for s in n_in), jax.ShapeDtypeStruct(d_final.shape, d_final.dtype)),
        name="two_stream_gated_delta_backward", **_params(interpret))(
            c_in, n_in, s_in, kept, jnp.moveaxis(d_out, 2, 1), d_views, d_final)
    back = lambda grads, like: token_major(grads, like, 1)
    if noisy is None:
        return back(d_clean, clean), None, d_initial
    pulled = [back(g, s) for g, s in zip(d_views, _per_view(noisy))]
    return back(d_clean, clean), Stream(*(jnp.stack(parts, 1) for parts in zip(*pulled))), d_initial
