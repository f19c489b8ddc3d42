"""Grouped-query attention under the visibility rule: the one seam through which every model asks for attention.

A model names a form and never a backend. The dense and the chunked form are plain jax and run anywhere. The kernel form
is `pallas_kernels.block_mask_attention`, which skips tiles nobody sees and picks its backend by platform; on a mesh of
several devices each runs it on its own rows and heads.

Form "auto" takes the kernel in programs for a TPU, in training, prefill and passes over a cache, wherever all of these
hold, and else the dense form while there are few logits, then the chunked one:

* visibility is a rule, not a dense mask;
* a row has at least `FEW` queries: with fewer, the dense form reads a cache at the speed of memory, too, and has no
  tiles to list (`launch/results/attention_tpu_compiler.md`);
* heads are 64, 128 or 256 wide, in float32 or bfloat16, and the tiles of one row fit the kernel's list of them;
* the devices are one, or a mesh whose axes divide rows and KV heads (`nn.devices`).

Letters: B batch, T query tokens, S keys, N query heads, K KV heads, G = N // K, H head dim, C query chunk.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import devices
from dlm_jax.nn.visibility import Visibility
from dlm_jax.types import HEADS, ROWS
from pallas_kernels import attention_problem, block_mask_attention

FORMS = ("auto", "reference", "chunked", "kernel")
CHUNK = 128  # queries a step of the chunked form
FEW = 8  # queries of a row below which "auto" does without the kernel
DENSE_LIMIT = 1 << 25  # logits (B x N x T x S) up to which the dense form is used by "auto": 128 MiB


def attention(
    q: Array, k: Array, v: Array, visibility: Visibility | Array, *, scale: float | None = None, form: str = "auto",
    heads_first: bool = False
) -> Array:
    """Softmax attention of every query over the keys it sees; a query that sees none gets zeros.

    Args:
      q: (B, T, N, H) queries.
      k: (B, S, K, H) keys, N a multiple of K.
      v: (B, S, K, H) values.
      visibility: the rule over T queries and S keys, or a dense (B or 1, T, S) bool mask (form "reference" only).
      scale: factor on the logits, unitless; default H ** -0.5.
      form: "reference" holds all T x S logits; "chunked" holds 128 x S at a time, forward and backward, so
        its memory is O(T); "kernel" skips tiles nobody sees; "auto" picks one of them, see above.
      heads_first: whether k and v are views of (B, K, S, H) arrays, such as a cache; the kernel reads them as they lie.

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
        form = _automatic(q, k, visibility, heads_first)
    if form == "reference":
        return _dense(q, k, v, visibility.dense() if ruled else visibility, scale)
    if form == "kernel":
        return _kernel(q, k, v, visibility, scale, heads_first)
    return _chunked(q, k, v, visibility, scale=scale)


def _automatic(q: Array, k: Array, visibility: Visibility | Array, heads_first: bool) -> str:
    """Returns the form that these arrays take by the rule at the top of this file."""
    B, T, N, _ = q.shape
    if not isinstance(visibility, Visibility):
        return "reference"
    if T >= FEW and attention_problem(q, k, heads_first=heads_first) is None and devices.can_share(q, B, k.shape[2]):
        return "kernel"
    return "reference" if B * N * T * k.shape[1] <= DENSE_LIMIT or T <= CHUNK else "chunked"


def _kernel(q: Array, k: Array, v: Array, visibility: Visibility, scale: float, heads_first: bool) -> Array:
    B, K = q.shape[0], k.shape[2]
    run = functools.partial(block_mask_attention, scale=scale, heads_first=heads_first)
    if not devices.can_share(q, B, K):
        alone = devices.mesh_of(q).empty  # then the caller knows better, who asked for a kernel by name
        return run(q, k, v, visibility, backend=None if alone else "xla")
    heads = jax.P(ROWS, None, HEADS)
    rule = jax.tree.map(lambda x: jax.P(ROWS if x.shape[0] == B else None), visibility)
    return devices.share(run, (q, k, v, visibility), (heads, heads, heads, rule), heads)


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
