"""The two-stream gated delta rule one token at a time: the definition every other form is checked against.

Letters as in `streams`: B batch, W noisy views, T tokens, J key heads, H value heads, E key width, F value width.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta.streams import (Stream, TwoStreamOutput, accumulation_dtype, document_starts,
                                                pad_tokens, repeat_heads)


def _update(state, k, v, g, beta):
    """One write: decay, predict, correct; state (..., E, F), k (..., E), v (..., F), g and beta (...)."""
    decayed = jnp.exp(g)[..., None, None] * state
    error = v - jnp.einsum("...e,...ef->...f", k, decayed, precision="highest")
    return decayed + k[..., :, None] * (beta[..., None] * error)[..., None, :]


def _time_major(stream: Stream, heads: int, axis: int, dtype):
    """Key heads repeated, accumulation dtype, token axis first."""
    q, k = (repeat_heads(a, axis + 1, heads) for a in (stream.q, stream.k))
    return [jnp.moveaxis(a.astype(dtype), axis, 0) for a in (q, k, stream.v, stream.g, stream.beta)]


def sequential(clean: Stream, noisy: Stream | None = None, *, block_size: int = 1, documents: jax.Array | None = None,
               initial_state: jax.Array | None = None, scale: float | None = None,
               keep_states: bool = False, causal: bool = False) -> TwoStreamOutput:
    """Runs both recurrences token by token.

    Args:
      clean: arrays (B, T, ...).
      noisy: arrays (B, W, T, ...), or None.
      block_size: tokens per diffusion block, counted from token 0; document starts are multiples of it.
      documents: (B, T) int32; the state is zero where the number changes. None means one document a row.
      initial_state: (B, H, E, F) state before token 0, seen by a row's first document only.
      scale: readout factor; E**-0.5 when None.
      keep_states: also return the clean state after every token.
      causal: a noisy token reads the state after itself instead of the one at its block's end.
    Returns:
      TwoStreamOutput.
    Source: FLARE Eq. 9 (clean), Eq. 12 and Eq. 6 (noisy, block-end readout), A.4 (documents).
    """
    batch, tokens, heads, width = clean.v.shape
    dtype = accumulation_dtype(clean.v.dtype)
    scale = clean.q.shape[-1] ** -0.5 if scale is None else scale
    state = (jnp.zeros((batch, heads, clean.q.shape[-1], width), dtype) if initial_state is None
             else initial_state.astype(dtype))
    if documents is None:
        resets = jnp.zeros((batch, tokens), bool)
    else:
        starts = document_starts(documents, initial_state is not None)
        resets = starts == jnp.arange(tokens)[None, :]
    blocks = -(-tokens // block_size)
    split = lambda a: pad_tokens(a, 0, block_size).reshape(blocks, block_size, *a.shape[1:])
    xs = [split(a) for a in _time_major(clean, heads, 1, dtype)] + [split(resets.T)]
    if noisy is not None:
        xs += [split(a) for a in _time_major(noisy, heads, 2, dtype)]

    def clean_token(state, x):
        q, k, v, g, beta, reset = x
        state = _update(jnp.where(reset[:, None, None, None], 0.0, state), k, v, g, beta)
        out = scale * jnp.einsum("bhe,bhef->bhf", q, state, precision="highest")
        return state, (out, state) if keep_states else (out,)

    def block(state, x):
        # a document may begin with this block; its seed is then zero, like its first clean state
        seed = jnp.where(x[5][0][:, None, None, None], 0.0, state)
        outs = ()
        if noisy is not None:
            qn, kn, vn, gn, bn = x[6:]
            start = jnp.broadcast_to(seed[:, None], kn.shape[1:-1] + seed.shape[-2:])
            read = lambda q, s: scale * jnp.einsum("...bwhe,bwhef->...bwhf", q, s, precision="highest")

            def noisy_token(s, y):
                s = _update(s, *y[1:])
                return s, read(y[0], s) if causal else None

            end, running = lax.scan(noisy_token, start, (qn, kn, vn, gn, bn))
            outs = (running if causal else read(qn, end),)
        state, kept = lax.scan(clean_token, state, x[:6])
        return state, kept + outs

    state, outs = lax.scan(block, state, xs)
    join = lambda a: a.reshape(blocks * block_size, *a.shape[2:])[:tokens]
    out = jnp.moveaxis(join(outs[0]), 0, 1).astype(clean.v.dtype)
    states = jnp.moveaxis(join(outs[1]), 0, 1) if keep_states else None
    noisy_out = None if noisy is None else jnp.moveaxis(join(outs[-1]), 0, 2).astype(noisy.v.dtype)
    return TwoStreamOutput(out, noisy_out, state, states)
