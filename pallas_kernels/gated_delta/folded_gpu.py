"""The folded two-stream gated delta rule as a Triton (GPU) kernel: one program per (batch row, value head).

Only the forward pass is a kernel; cotangents are pulled back by `folded_xla.backward`, which reads what this forward
keeps. A backward kernel of the same body asks for 352,256 bytes of shared memory at chunks of 64 tokens of widths 128,
half as much again as a Hopper block has. Lowering is checked in tests; nothing has been timed on a device, so this runs
only when asked for by name.
Letters as in `streams`; N chunks.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gated_delta.chunk import ChunkStream, Plan, chunk_forward
from pallas_kernels.gated_delta.folded_tpu import chunk_rows, head_major
from pallas_kernels.gated_delta.streams import Stream


def _load(refs: ChunkStream, at, chunk) -> ChunkStream:
    gate = lambda r: r[chunk, :][None, :]
    return ChunkStream(refs.q[at, :], refs.k[at, :], refs.v[at, :], gate(refs.g), gate(refs.beta))


def _forward_kernel(clean, noisy, starts, initial, out, noisy_out, final, kept, *, plan, chunk_size, chunks):
    def step(chunk, state):
        at = pl.ds(chunk * chunk_size, chunk_size)
        if kept is not None:
            kept[chunk, :, :] = state.astype(kept.dtype)
        result, views, state = chunk_forward(plan, _load(clean, at, chunk), tuple(_load(s, at, chunk) for s in noisy),
                                             state, None if starts is None else starts[chunk, :][None, :])
        out[at, :] = result.astype(out.dtype)
        for ref, view in zip(noisy_out, views):
            ref[at, :] = view.astype(ref.dtype)
        return state
    final[...] = lax.fori_loop(0, chunks, step, initial[...])


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


def _tensor_cores(plan: Plan, interpret) -> Plan:
    """float32 products as three TF32 ones: plain ones use no tensor core, and take a compiler minutes to unroll."""
    if interpret:
        return plan
    return plan._replace(operands=plan.operands._replace(wide=lax.DotAlgorithmPreset.TF32_TF32_F32_X3))


def shared_memory(chunk_size: int, key_width: int, value_width: int, views: int, operands) -> int:
    """Shared memory a program of the kernel asks for.

    Fitted to what Triton's passes allocate for Hopper (results/triton_resources.md): exact for bfloat16 streams in
    chunks of 64 tokens, and no less than the allocation wherever that is within 227 KiB. Documents and block sizes add
    nothing.

    Args:
      chunk_size: C, tokens per chunk.
      key_width, value_width: E and F.
      views: W, noisy views; 0 without a noisy stream.
      operands: dtype of product operands.
    Returns:
      Bytes per block.
    """
    chunk, state = chunk_size, key_width * value_width
    if operands == jnp.bfloat16:
        return max(24 * chunk * chunk + 4 * chunk * key_width * (1 + views) + 2 * state, 4 * state)
    return 24 * chunk * chunk + 8 * chunk * (key_width + value_width) + 8 * state


def forward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None,
            state: jax.Array, keep_states: bool, interpret=False):
    """Forward pass over whole chunks; arguments and results as `folded_xla.forward`.

    Chunk-start states are kept in the dtype of k.

    Args:
      plan, chunk_size, clean, noisy, starts, state, keep_states: as for `folded_xla.forward`.
      interpret: run the kernel's body as plain jax operations.
    Returns:
      out, noisy out or None, final state, chunk-start states (N, B, H, E, F) or None.
    """
    batch, tokens, heads, _ = clean.v.shape
    ratio, chunks = heads // clean.q.shape[2], tokens // chunk_size
    c_in, n_in = _split(clean, chunk_size), tuple(_split(s, chunk_size) for s in _per_view(noisy))
    s_in = None if starts is None else chunk_rows(starts, chunk_size)[:, :, 0]
    c_spec, n_spec = _specs(c_in, ratio), tuple(_specs(s, ratio) for s in n_in)
    s_spec = None if starts is None else pl.BlockSpec((None, *s_in.shape[1:]), lambda b, h: (b, 0, 0))
    per_head = pl.BlockSpec((None, None, *state.shape[2:]), lambda b, h: (b, h, 0, 0))
    kept = kept_spec = None
    if keep_states:
        kept = jax.ShapeDtypeStruct((chunks, *state.shape), clean.k.dtype)
        kept_spec = pl.BlockSpec((chunks, None, None, *state.shape[2:]), lambda b, h: (0, b, h, 0, 0))
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    out, noisy_out, final, kept = pl.pallas_call(
        functools.partial(_forward_kernel, plan=_tensor_cores(plan, interpret), chunk_size=chunk_size, chunks=chunks),
        grid=(batch, heads), in_specs=(c_spec, n_spec, s_spec, per_head),
        out_specs=(c_spec.v, tuple(s.v for s in n_spec), per_head, kept_spec),
        out_shape=(like(c_in.v), tuple(like(s.v) for s in n_in), like(state), kept),
        name="two_stream_gated_delta_forward", interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1))(c_in, n_in, s_in, state)
    noisy_out = None if noisy is None else jnp.stack([jnp.moveaxis(o, 1, 2) for o in noisy_out], 1)
    return jnp.moveaxis(out, 1, 2), noisy_out, final, kept
