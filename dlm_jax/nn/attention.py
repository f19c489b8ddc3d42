"""Grouped-query attention under the visibility rule: the one seam through which every model asks for attention.

A model names a form and never a backend. The dense and the chunked form are plain jax and run anywhere; the kernel form
picks its backend by platform inside `pallas_kernels`.

Letters: B batch, T query tokens, S keys, N query heads, K KV heads, G = N // K, H head dim, C query chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn.visibility import Visibility
from pallas_kernels import block_mask_attention

FORMS = ("auto", "reference", "chunked", "kernel")
CHUNK = 128  # queries a step of the chunked form
DENSE_LIMIT = 1 << 25  # logits (B x N x T x S) up to which the dense form is used by "auto": 128 MiB


def attention(
    q: Array, k: Array, v: Array, visibility: Visibility | Array, *, scale: float | None = None, form: str = "auto"
) -> Array:
    """Softmax attention of every query over the keys it sees; a query that sees none gets zeros.

    Args:
      q: (B, T, N, H) queries.
      k: (B, S, K, H) keys, N a multiple of K.
      v: (B, S, K, H) values.
      visibility: the rule over T queries and S keys, or a dense (B or 1, T, S) bool mask (form "reference" only).
      scale: factor on the logits, unitless; default H ** -0.5.
      form: "reference" holds all T x S logits; "chunked" holds 128 x S at a time, forward and backward, so
        its memory is O(T); "kernel" is `pallas_kernels.block_mask_attention`, which skips tiles nobody sees (on a
        mesh of several chips call it inside `jax.shard_map`); "auto" takes the first while there are few
        logits, then the second.

    Returns:
      (B, T, N, H) in q's dtype.

    Raises:
      ValueError: head counts that do not divide, an unknown form, a dense mask with a form that takes none, or a
        rule of another size.
    """
    T, S = q.shape[1], k.shape[1]
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} KV heads: pick a multiple")
    if form not in FORMS:
        raise ValueError(f"attention form {form!r}: expected one of {', '.join(map(repr, FORMS))}")
    ruled = isinstance(visibility, Visibility)
    if not ruled and form not in ("auto", "reference"):
        raise ValueError(f"attention form {form!r} takes a Visibility, not a dense mask: build one, or use 'reference'")
    shape = (visibility.query_length, visibility.key_length) if ruled else visibility.shape[1:]
    if tuple(shape) != (T, S):
        raise ValueError(f"visibility is over {shape} (queries, keys) but q and k hold {(T, S)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if form == "auto":
        form = "reference" if not ruled or q.shape[0] * q.shape[2] * T * S <= DENSE_LIMIT or T <= CHUNK else "chunked"
    if form == "reference":
        return _dense(q, k, v, visibility.dense() if ruled else visibility, scale)
    return (block_mask_attention if form == "kernel" else _chunked)(q, k, v, visibility, scale=scale)


def _dense(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * scale
    seen = mask[:, None, None]
    logits = jnp.where(seen, logits, -jnp.inf)
    # the maximum over an empty row is -inf; 0 keeps exp() and its gradient finite there
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weight = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = (weight / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
    # accumulated in float32 whatever its result; XLA on CPU cannot run some bfloat16 products with a float32 result
    out = jnp.einsum("bkgts,bskh->btkgh", weight, v)
    return out.reshape(B, T, N, H).astype(q.dtype)


def _chunked(q: Array, k: Array, v: Array, visibility: Visibility, *, scale: float) -> Array:
    B, T, N, H = q.shape
    chunks = -(-T // CHUNK)
    pad = chunks * CHUNK - T
    pieces = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(B, chunks, CHUNK, N, H)
    rule = visibility.map(lambda x: jnp.pad(x, ((0, 0), (0, pad))))

    @jax.checkpoint  # the backward pass recomputes a chunk's logits instead of storing all of them
    def one(chunk):
        part, start = chunk
        return _dense(part, k, v, rule.queries(start, CHUNK).dense(), scale)

    out = jax.lax.map(one, (jnp.moveaxis(pieces, 1, 0), CHUNK * jnp.arange(chunks)))
    return jnp.moveaxis(out, 0, 1).reshape(B, chunks * CHUNK, N, H)[:, :T]
