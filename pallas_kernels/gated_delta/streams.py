"""Types, checks and layouts shared by every form of the two-stream gated delta rule.

Letters: B batch, W noisy views, T tokens, J key heads, H value heads, C chunk, E key width, F value width.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Stream(NamedTuple):
    """One token stream; a noisy stream carries a view axis W after the batch axis of every array.

    Attributes:
      q: (B, T, J, E) queries, usually L2-normalised; the readout scale is applied by the operator.
      k: (B, T, J, E) keys, usually L2-normalised.
      v: (B, T, H, F) values.
      g: (B, T, H) log gates, natural logarithm, at most 0.
      beta: (B, T, H) write strengths in [0, 1]; beta = 0 with g = 0 leaves the state untouched (padding).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class TwoStreamOutput(NamedTuple):
    """What `two_stream_gated_delta` returns.

    Attributes:
      out: (B, T, H, F) clean outputs, dtype of v.
      noisy_out: (B, W, T, H, F) noisy outputs read at their block's end, or None without a noisy stream.
      final_state: (B, H, E, F) clean state after the last token, accumulation dtype.
      states: (B, T, H, E, F) clean state after every token, or None unless asked for.
    """

    out: jax.Array
    noisy_out: jax.Array | None
    final_state: jax.Array
    states: jax.Array | None = None


def accumulation_dtype(dtype) -> jnp.dtype:
    """The dtype of states and sums: float64 for float64 inputs, float32 otherwise."""
    return jnp.promote_types(dtype, jnp.float32)


def check_stream(stream: Stream, name: str, lead: tuple[str, ...]) -> None:
    """Raises ValueError naming the first array of a stream whose rank, shape or dtype does not fit.

    Args:
      stream: the five arrays.
      name: how the caller calls this stream.
      lead: letters of the axes before the head axis, ("B", "T") or ("B", "W", "T").
    Raises:
      ValueError: with the offending shape, the accepted one and the remedy.
    """
    n = len(lead)
    for field, tail in (("q", "J, E"), ("k", "J, E"), ("v", "H, F"), ("g", "H"), ("beta", "H")):
        array = getattr(stream, field)
        wanted = n + len(tail.split(", "))
        if array.ndim != wanted:
            raise ValueError(f"{name}.{field} has shape {array.shape}; expected rank {wanted}, "
                             f"({', '.join(lead)}, {tail}). Add or drop axes before the call.")
        if array.shape[:n] != stream.q.shape[:n]:
            raise ValueError(f"{name}.{field} has leading axes {array.shape[:n]} but {name}.q has "
                             f"{stream.q.shape[:n]}; all five arrays share ({', '.join(lead)}).")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}.{field} has dtype {array.dtype}; expected a floating dtype. Cast it first.")
    if stream.q.shape != stream.k.shape:
        raise ValueError(f"{name}.q {stream.q.shape} and {name}.k {stream.k.shape} differ; "
                         "they share heads J and width E.")
    heads = stream.v.shape[n]
    for field in ("g", "beta"):
        if getattr(stream, field).shape[n] != heads:
            raise ValueError(f"{name}.{field} has {getattr(stream, field).shape[n]} heads; {name}.v has {heads}. "
                             "Gates and write strengths are per value head.")
    if heads % stream.q.shape[n]:
        raise ValueError(f"{name} has {heads} value heads and {stream.q.shape[n]} key heads; "
                         "value heads must be a multiple of key heads (value head h reads key head h // ratio).")


def check_blocks(block_size: int, chunk_size: int) -> None:
    """Raises ValueError unless 1 <= block_size <= chunk_size and block_size divides chunk_size."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}; expected a positive integer such as 64.")
    if not 1 <= block_size <= chunk_size or chunk_size % block_size:
        raise ValueError(f"block_size={block_size} with chunk_size={chunk_size}; block_size must divide chunk_size "
                         f"(1 <= block_size <= chunk_size). Choose a chunk_size that is a multiple of {block_size}.")


def check_documents(documents: jax.Array, shape: tuple[int, int], block_size: int) -> None:
    """Raises ValueError for a wrong shape, or (when the values are known) for a start inside a block.

    Args:
      documents: (B, T) int32 document numbers; a document starts where the number changes.
      shape: the (B, T) of the streams.
      block_size: tokens per diffusion block.
    Source: FLARE A.4, "document starts are block-aligned".
    """
    if documents.shape != shape:
        raise ValueError(f"documents has shape {documents.shape}; expected (B, T) = {shape}.")
    if not jnp.issubdtype(documents.dtype, jnp.integer):
        raise ValueError(f"documents has dtype {documents.dtype}; expected integers.")
    if isinstance(documents, jax.core.Tracer):
        return  # values are unknown under jit; the caller's data pipeline must align starts
    rows, starts = np.nonzero(np.diff(np.asarray(documents), axis=1))
    wrong = [(int(r), int(t) + 1) for r, t in zip(rows, starts) if (t + 1) % block_size]
    if wrong:
        raise ValueError(f"a document starts at (row, token) {wrong[0]}, inside a block of {block_size}; "
                         f"starts must be multiples of block_size. Pad each document to a multiple of {block_size}.")


def document_starts(documents: jax.Array, has_initial_state: bool) -> jax.Array:
    """(B, T) int32 first token index of each token's document, -1 for a row's first document if it carries a state."""
    index = jnp.arange(documents.shape[1], dtype=jnp.int32)[None, :]
    new = jnp.concatenate([jnp.zeros_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], 1)
    first = -1 if has_initial_state else 0
    return jax.lax.cummax(jnp.where(new, index, first), axis=1)


def pad_tokens(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pads an axis of any shape with zeros to a multiple; zero beta, gate and key leave the recurrence untouched."""
    extra = -array.shape[axis] % multiple
    if not extra:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, extra)
    return jnp.pad(array, widths)


def repeat_heads(array: jax.Array, axis: int, heads: int) -> jax.Array:
    """Repeats key heads, one axis of any shape, consecutively so that value head h reads key head h // (heads // J)."""
    return array if array.shape[axis] == heads else jnp.repeat(array, heads // array.shape[axis], axis=axis)
