"""The checked entry of the two-stream gated delta rule.

Letters as in `streams`: B batch, W noisy views, T tokens, J key heads, H value heads, E key width, F value width.
"""
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.gated_delta import folded_gpu, folded_tpu, folded_xla, reference, routes
from pallas_kernels.gated_delta.chunk import Operands, Plan
from pallas_kernels.gated_delta.streams import (Stream, TwoStreamOutput, accumulation_dtype, check_blocks,
                                                check_documents, check_stream, document_starts, pad_tokens)

FORMS = ("folded", "sequential", "route_i", "route_ii")
PRECISIONS = ("float32", "bfloat16")


def _implementation(backend):
    """(forward, backward) of a backend; the second takes the chunk-start states as the first keeps them."""
    if backend == "tpu":
        return folded_tpu.forward, folded_tpu.backward
    if backend == "interpret":
        return tuple(functools.partial(f, interpret=True) for f in (folded_tpu.forward, folded_tpu.backward))
    return folded_gpu.forward if backend == "gpu" else folded_xla.forward, folded_xla.backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _folded(backend, plan, chunk, clean, noisy, starts, state):
    return _implementation(backend)[0](plan, chunk, clean, noisy, starts, state, False)[:3]


def _folded_fwd(backend, plan, chunk, clean, noisy, starts, state):
    *outs, kept = _implementation(backend)[0](plan, chunk, clean, noisy, starts, state, True)
    return tuple(outs), (clean, noisy, starts, kept)


def _folded_bwd(backend, plan, chunk, residuals, cotangents):
    clean, noisy, starts, kept = residuals
    d_out, d_noisy, d_final = cotangents
    grads = _implementation(backend)[1](plan, chunk, clean, noisy, starts, kept, d_out, d_noisy, d_final)
    return grads[0], grads[1], None, grads[2]


_folded.defvjp(_folded_fwd, _folded_bwd)


def _operand_dtype(clean: Stream, precision: str | None):
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}; accepted: None (the dtype of v), {', '.join(PRECISIONS)}.")
    if precision is not None:
        return jnp.dtype(precision)
    return jnp.dtype(jnp.bfloat16) if clean.v.dtype == jnp.bfloat16 else jnp.dtype(accumulation_dtype(clean.v.dtype))


def _problem(clean: Stream, noisy: Stream | None, chunk: int, operands, backend: str) -> str | None:
    """Why a kernel backend cannot take these shapes or dtypes, or None."""
    for array in jax.tree.leaves((clean, noisy)):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"dtype {array.dtype} (kernels take float32 and bfloat16)"
    if backend == "interpret":
        return None
    if chunk % 16:
        return f"chunk of {chunk} tokens (kernels take multiples of 16)"
    widths = clean.q.shape[-1], clean.v.shape[-1]
    if any(w not in (64, 128, 256) for w in widths):
        return f"head widths {widths} (kernels take 64, 128 and 256)"
    if backend == "tpu":
        return None
    if chunk & (chunk - 1):
        return f"chunk of {chunk} tokens (the GPU kernel takes powers of two)"
    views, limit = 0 if noisy is None else noisy.q.shape[1], dispatch.shared_memory()
    wanted = folded_gpu.shared_memory(chunk, *widths, views, operands)
    if wanted > limit:
        return (f"{wanted} bytes of shared memory for a chunk of {chunk} tokens, head widths {widths}, {views} noisy "
                f"views and {operands} products (a block here has {limit}; a smaller chunk_size takes less)")
    return None


def two_stream_gated_delta(clean: Stream, noisy: Stream | None = None, *, block_size: int = 1, chunk_size: int = 64,
                           documents: jax.Array | None = None, initial_state: jax.Array | None = None,
                           scale: float | None = None, form: str = "folded", backend: str | None = None,
                           precision: str | None = None, return_states: bool = False,
                           causal: bool = False) -> TwoStreamOutput:
    """Gated delta rule over a causal clean stream and any number of noisy views seeded from it.

    Each view's block starts from the clean state at the block's first token and every position of the block reads the
    block-end state. Blocks are counted from token 0 of the row; a trailing partial block is read after its last token.

    Args:
      clean: Stream (or five arrays q, k, v, g, beta) with axes (B, T, ...); see `Stream` for shapes, dtypes and units.
      noisy: Stream with axes (B, W, T, ...), or None for a single causal stream.
      block_size: tokens per diffusion block; divides chunk_size.
      chunk_size: tokens processed by one round of matrix products.
      documents: (B, T) integers; the clean state starts from zero where the number changes. Starts are multiples of
        block_size (checked when the values are known, that is outside jit).
      initial_state: (B, H, E, F) clean state before token 0, seen by each row's first document; zero when None.
      scale: readout factor; E**-0.5 when None.
      form: "folded" (default), or for comparison "sequential", "route_i", "route_ii".
      backend: None picks by platform; "xla", "tpu", "gpu" or "interpret" insist (form "folded" only). "gpu" is a
        kernel forward and the XLA form backward.
      precision: dtype of product operands, "float32" or "bfloat16"; None follows the dtype of v. Sums are float32 or
        wider.
      return_states: also return the clean state after every token (B, T, H, E, F); meant for windows of a few tokens,
        computed token by token.
      causal: a noisy token reads the state after itself instead of the one at its block's end (forms "folded" and
        "sequential").
    Returns:
      TwoStreamOutput.
    Raises:
      ValueError: for shapes, dtypes, block sizes, documents, forms or backends that do not fit.
    Source: FLARE Eqs. 6, 9 and 12, A.2, A.4.
    """
    clean = Stream(*clean)
    noisy = None if noisy is None else Stream(*noisy)
    check_stream(clean, "clean", ("B", "T"))
    check_blocks(block_size, chunk_size)
    batch, tokens, heads, width = clean.v.shape
    if tokens == 0:
        raise ValueError("clean has T = 0 tokens; expected at least one. For a noisy block alone, pass clean tokens "
                         "with beta = g = 0.")
    if noisy is not None:
        check_stream(noisy, "noisy", ("B", "W", "T"))
        if noisy.q.shape[1] == 0:
            raise ValueError("noisy has W = 0 views; expected at least one. "
                             "Pass noisy=None for the clean stream alone.")
        for field, a, b in zip(Stream._fields, clean, noisy):
            if (b.shape[0], *b.shape[2:]) != a.shape:
                raise ValueError(f"noisy.{field} has shape {b.shape}; "
                                 f"expected (B, W, ...) matching clean.{field} {a.shape}.")
    state_shape = (batch, heads, clean.q.shape[-1], width)
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(f"initial_state has shape {initial_state.shape}; expected (B, H, E, F) = {state_shape}.")
    if documents is not None:
        check_documents(documents, (batch, tokens), block_size)
    if form not in FORMS:
        raise ValueError(f"form={form!r}; accepted: {', '.join(FORMS)}.")
    if (form != "folded" or return_states) and backend not in (None, "xla"):
        raise ValueError(f"backend={backend!r} with form={form!r}, return_states={return_states}; "
                         "only form 'folded' without states has kernels. Use backend=None.")
    if causal and form not in ("folded", "sequential"):
        raise ValueError(f"form={form!r} with causal=True; accepted: 'folded', 'sequential'.")
    dtype = _operand_dtype(clean, precision)
    scale = clean.q.shape[-1] ** -0.5 if scale is None else float(scale)
    if form == "sequential" or return_states:
        return reference.sequential(clean, noisy, block_size=block_size, documents=documents,
                                    initial_state=initial_state, scale=scale, keep_states=return_states,
                                    causal=causal)

    # short inputs need no full chunk; doubling from a multiple of the block and of 16 rows keeps powers of two
    unit = math.lcm(block_size, 16)
    chunk = min(chunk_size, unit << (-(-tokens // unit) - 1).bit_length())
    state = jnp.zeros(state_shape, accumulation_dtype(clean.v.dtype)) if initial_state is None else initial_state
    state = state.astype(accumulation_dtype(clean.v.dtype))
    starts = None if documents is None else document_starts(documents, initial_state is not None)
    if starts is not None:
        # padding belongs to the last document, so that the final state is the last document's
        starts = jnp.pad(starts, ((0, 0), (0, -tokens % chunk)), mode="edge")
    clean_p = Stream(*(pad_tokens(a, 1, chunk) for a in clean))
    noisy_p = None if noisy is None else Stream(*(pad_tokens(a, 2, chunk) for a in noisy))
    if form == "folded":
        problem = functools.partial(_problem, clean, noisy, chunk, dtype)
        chosen = dispatch.choose("two_stream_gated_delta", backend, problem)
        plan = Plan(block_size, scale, Operands(dtype), documents is not None, causal)
        out, noisy_out, final = _folded(chosen, plan, chunk, clean_p, noisy_p, starts, state)
    else:
        route = routes.route_i if form == "route_i" else routes.route_ii
        out, noisy_out, final = route(clean_p, noisy_p, block=block_size, chunk=chunk, starts=starts, state=state,
                                      scale=scale, dtype=dtype)
    return TwoStreamOutput(out[:, :tokens], None if noisy is None else noisy_out[:, :, :tokens], final)
