"""The checked entry of block-mask attention.

Letters: B batch, T query tokens, S keys, N query heads, K key heads, G = N // K, H head width.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention import blocked_xla, flash_gpu, flash_tpu
from pallas_kernels.attention.mask_spec import Mask
from pallas_kernels.attention.tiles import pad_mask

# The decode form scores every query head against every key head, K times the needed products, and in return reads the cache in
# place. It pays while that stays a few thousand rows of work per key; beyond, transposing the cache is cheaper.
_PACKED_WORK = 4096


class _Call(NamedTuple):
    """Static part of a call."""

    backend: str
    scale: float
    block_q: int
    block_k: int
    packed: tuple[int, int]   # (N, K) when heads were folded into the row axes, else (1, 1)


def _grouped(q, keys):
    return q.reshape(q.shape[0], keys, q.shape[1] // keys, *q.shape[2:])


def _heads(call: _Call, q, mask):
    """Key head of each row in the decode form, whose rows are (token, head) pairs; padding rows match nothing visible anyway."""
    if call.packed == (1, 1):
        return None
    (heads, keys), rows_k = call.packed, mask.rank_k.shape[1]
    number = lambda rows, n: jax.lax.rem(jnp.arange(rows, dtype=jnp.int32), jnp.full((rows,), n, jnp.int32))
    return flash_tpu.Heads(number(q.shape[2], heads) // (heads // keys), number(rows_k, keys))


def _run_forward(call: _Call, q, k, v, mask):
    """Head-major arrays (B, N, T, H) and (B, K, S, H) to out (B, N, T, H) and log-sum-exp (B, N, 1, T)."""
    args = (mask, call.scale, call.block_q, call.block_k)
    if call.backend == "xla":
        out, lse = blocked_xla.forward(_grouped(q, k.shape[1]), k, v, *args)
        return out.reshape(q.shape), lse.reshape(*q.shape[:2], 1, q.shape[2])
    if call.backend == "gpu":
        return flash_gpu.forward(q, k, v, *args)
    return flash_tpu.forward(q, k, v, *args, _heads(call, q, mask), interpret=call.backend == "interpret")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, q, k, v, mask):
    return _run_forward(call, q, k, v, mask)[0]


def _attend_fwd(call, q, k, v, mask):
    out, lse = _run_forward(call, q, k, v, mask)
    return out, (q, k, v, mask, out, lse)


def _attend_bwd(call, residuals, d_out):
    q, k, v, mask, out, lse = residuals
    delta = jnp.sum(out.astype(lse.dtype) * d_out.astype(lse.dtype), -1)[:, :, None]
    args = (mask, call.scale, call.block_q, call.block_k)
    if call.backend == "xla":
        group = lambda a: _grouped(a, k.shape[1])
        dq, dk, dv = blocked_xla.backward(group(q), k, v, *args, group(lse[:, :, 0]), group(delta[:, :, 0]), group(d_out))
        return dq.reshape(q.shape), dk, dv, None
    if call.backend == "gpu":
        return (*flash_gpu.backward(q, k, v, *args, lse, delta, d_out), None)
    shape = k.shape
    if call.packed != (1, 1):
        k, v = (a.reshape(shape[0], 1, -1, shape[3]) for a in (k, v))
    dq, dk, dv = flash_tpu.backward(q, k, v, *args, lse, delta, d_out, _heads(call, q, mask), interpret=call.backend == "interpret")
    return dq, dk.reshape(shape), dv.reshape(shape), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _check(q, k, v, mask):
    for name, array, letters in (("q", q, "(B, T, N, H)"), ("k", k, "(B, S, K, H)"), ("v", v, "(B, S, K, H)")):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}; expected rank 4, {letters}. Split heads from width before the call.")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; expected a floating dtype. Cast it first.")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry.")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ; they share (B, S, K, H).")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype. Cast them to it.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or head width; expected (B, T, N, H) and (B, S, K, H).")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads over {k.shape[2]} key heads; query heads must be a multiple of key heads.")
    for field in Mask._fields:
        if not hasattr(mask, field):
            raise ValueError(f"the mask has no attribute {field!r}; it needs {', '.join(Mask._fields)} (see Mask).")
        array, tokens = getattr(mask, field), q.shape[1] if field.endswith("_q") else k.shape[1]
        if array.ndim != 2 or array.shape[1] != tokens or array.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"mask.{field} has shape {array.shape}; expected ({q.shape[0]}, {tokens}) or (1, {tokens}).")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"mask.{field} has dtype {array.dtype}; expected int32.")


def _problem(q, backend: str) -> str | None:
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"dtype {q.dtype} (kernels take float32 and bfloat16)"
    if backend != "interpret" and q.shape[3] not in (64, 128, 256):
        return f"head width {q.shape[3]} (kernels take 64, 128 and 256)"
    return None


def _round(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _default_blocks(queries: int, keys: int, backend: str) -> tuple[int, int]:
    """Tile edges: 512 amortises a grid step on TPU; the GPU kernel holds its tiles in registers; short axes take one tile."""
    if backend == "gpu":
        return 64, 64
    block_q = min(512, _round(queries, 128)) if queries >= 128 else _round(queries, 16)
    # an edge that divides the keys spares a padded copy of a long cache
    block_k = max((b for b in (512, 384, 256, 128) if keys % b == 0), default=min(512, _round(keys, 128)))
    return block_q, block_k


def block_mask_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask, *, scale: float | None = None, backend: str | None = None,
                         block_q: int | None = None, block_k: int | None = None) -> jax.Array:
    """softmax(scale q k^T) v over the keys each query may see, by tiles that hold at least one visible pair.

    A few queries against many keys take the decode form: all heads share one tile, the cache is read in place, and of it only key
    tiles with something visible, such as the valid prefix of each row.

    Args:
      q: (B, T, N, H) float32 or bfloat16 (float64 with the XLA form).
      k, v: (B, S, K, H), same dtype; query head n reads key head n // (N // K).
      mask: `Mask`, or any object with its seven int32 arrays (B, T) and (B, S); a batch axis of 1 is broadcast.
      scale: factor of the scores; H**-0.5 when None.
      backend: None picks by platform; "xla", "tpu", "gpu" or "interpret" insist.
      block_q, block_k: tile edges, for tuning; multiples of 128 on TPU.
    Returns:
      (B, T, N, H), dtype of q; zeros for a query that sees nothing.
    Raises:
      ValueError: for shapes, dtypes, tiles or backends that do not fit.
    Source: online softmax attention over the visibility rule of `mask_spec`.
    """
    _check(q, k, v, mask)
    batch, queries, heads, width = q.shape
    keys, key_heads = k.shape[1:3]
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        if value is not None and (value < 16 or value % 16):
            raise ValueError(f"{name}={value}; expected a multiple of 16 (of 128 on TPU), or None.")
    chosen = dispatch.choose("block_mask_attention", backend, functools.partial(_problem, q))
    mask = Mask(*(jnp.broadcast_to(jnp.asarray(getattr(mask, f), jnp.int32), (batch, getattr(mask, f).shape[1]))
                  for f in Mask._fields))
    packed = (chosen in ("tpu", "interpret") and heads > 1 and heads * queries * key_heads <= _PACKED_WORK and queries < keys
              and 16 % key_heads == 0)
    if packed:
        # rows are (token, head) pairs, so that a long cache is neither transposed nor copied
        q = q.reshape(batch, 1, queries * heads, width)
        mask = Mask(*(jnp.repeat(a, heads, axis=1) for a in mask[:4]), *(jnp.repeat(a, key_heads, axis=1) for a in mask[4:]))
    else:
        q, k, v = (jnp.moveaxis(a, 2, 1) for a in (q, k, v))
    rows_q, rows_k = q.shape[2], mask.rank_k.shape[1]
    default_q, default_k = _default_blocks(rows_q, rows_k, chosen)
    block_q, block_k = default_q if block_q is None else block_q, default_k if block_k is None else block_k
    padded_q, padded_k = _round(rows_q, block_q), _round(rows_k, block_k)

    def pad(a, axis, n):  # not even a no-op pad of a long cache
        return a if a.shape[axis] == n else jnp.pad(a, [(0, n - a.shape[axis] if i == axis else 0) for i in range(4)])
    k, v = (pad(a, 1, padded_k // key_heads) if packed else pad(a, 2, padded_k) for a in (k, v))
    scale = width ** -0.5 if scale is None else float(scale)
    call = _Call(chosen, scale, block_q, block_k, (heads, key_heads) if packed else (1, 1))
    out = _attend(call, pad(q, 2, padded_q), k, v, pad_mask(mask, padded_q, padded_k))[:, :, :rows_q]
    return out.reshape(batch, queries, heads, width) if packed else jnp.moveaxis(out, 1, 2)
