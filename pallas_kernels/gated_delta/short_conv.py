"""The two-stream causal short convolution, left to XLA: a handful of shifted multiply-adds that fuse into one loop.

Letters: B batch, W noisy views, T tokens, D channels, L lags (filter width).
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.streams import check_documents, document_starts


def _lagged(x, lag, history):
    """x delayed by `lag` tokens along axis -2, earlier tokens taken from the history's tail."""
    if lag == 0:
        return x
    tokens = x.shape[-2]
    return jnp.concatenate([history[..., history.shape[-2] - lag:, :], x], axis=-2)[..., :tokens, :]


def short_conv(clean: jax.Array, weight: jax.Array, noisy: jax.Array | None = None, *, block_size: int = 1,
               documents: jax.Array | None = None, state: jax.Array | None = None):
    """Depthwise causal convolution of a clean stream and of noisy views that look back into it.

    A noisy position reads noisy tokens for lags inside its block and clean tokens for earlier ones; nothing crosses a
    document start. No bias and no activation.

    Args:
      clean: (B, T, D) inputs.
      weight: (D, L) filter; weight[:, i] multiplies the token i positions back.
      noisy: (B, W, T, D) inputs of noisy views, or None.
      block_size: tokens per diffusion block, counted from token 0.
      documents: (B, T) integers; a document starts where the number changes, at a multiple of block_size.
      state: (B, L - 1, D) raw inputs before token 0, oldest first, seen by each row's first document; zeros when None.
    Returns:
      (out (B, T, D), noisy out (B, W, T, D) or None, new state (B, L - 1, D)): the last L - 1 clean inputs, for
      decoding; zeros for those before the last document's start.
    Raises:
      ValueError: for shapes that do not fit.
    Source: FLARE Eqs. 19 and 20, A.4.
    """
    if clean.ndim != 3:
        raise ValueError(f"clean has shape {clean.shape}; expected (B, T, D).")
    batch, tokens, channels = clean.shape
    if weight.ndim != 2 or weight.shape[0] != channels:
        raise ValueError(f"weight has shape {weight.shape}; expected (D, L) with D = {channels}.")
    lags = weight.shape[1]
    if noisy is not None and (noisy.ndim != 4 or (noisy.shape[0], *noisy.shape[2:]) != clean.shape):
        raise ValueError(f"noisy has shape {noisy.shape}; expected (B, W, T, D) matching clean {clean.shape}.")
    if block_size < 1:
        raise ValueError(f"block_size={block_size}; expected a positive integer.")
    if state is not None and state.shape != (batch, lags - 1, channels):
        raise ValueError(f"state has shape {state.shape}; expected (B, L - 1, D) = {(batch, lags - 1, channels)}.")
    if documents is not None:
        check_documents(documents, (batch, tokens), block_size)
    history = jnp.zeros((batch, lags - 1, channels), clean.dtype) if state is None else state.astype(clean.dtype)
    index = jnp.arange(tokens)
    if documents is None:
        reach = index[None, :] + lags  # how many tokens back the document still holds
    else:
        first = document_starts(documents, state is not None)
        reach = jnp.where(first < 0, index + lags, index - first)
    offset = index % block_size  # how many tokens back the block still holds
    out = jnp.zeros_like(clean)
    noisy_out = None if noisy is None else jnp.zeros_like(noisy)
    for lag in range(lags):
        source = jnp.where((lag <= reach)[..., None], _lagged(clean, lag, history), 0)
        out = out + weight[:, lag].astype(clean.dtype) * source
        if noisy is not None:
            # a block's document start is its own start or earlier, so in-block lags need no document test
            inside = _lagged(noisy, lag, jnp.zeros_like(noisy, shape=(*noisy.shape[:2], lags - 1, channels)))
            mixed = jnp.where((lag <= offset)[:, None], inside, source[:, None])
            noisy_out = noisy_out + weight[:, lag].astype(clean.dtype) * mixed
    new_state = jnp.concatenate([history, clean], axis=1)[:, tokens:]
    if documents is not None:
        held = jnp.arange(lags - 1, 0, -1)  # how many tokens before the next one
        new_state = jnp.where((held <= reach[:, -1:] + 1)[..., None], new_state, 0)
    return out, noisy_out, new_state
