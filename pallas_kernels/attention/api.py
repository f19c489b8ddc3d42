"""The checked entry of block-mask attention.

Letters: B batch, T query tokens, S keys, N query heads, K key heads, G = N // K, H head width.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention import blocked_xla, flash_gpu, flash_tpu
from pallas_kernels.attention.scores import Scoring
from pallas_kernels.attention.tiles import pad_mask
from pallas_kernels.attention.visibility import Visibility

# The decode form scores every query head against every key head, K times the needed products, and in return reads the
# cache in place. It pays while that stays a few thousand rows of work per key; beyond, a transposed cache is cheaper.
_PACKED_WORK = 4096
# The TPU kernels keep their list of tiles in scalar memory, 1 MiB in all; this many take half of it.
_MAX_TILES = 1 << 16
_EDGE = 512  # of a tile


class _Call(NamedTuple):
    """Static part of a call."""

    backend: str
    score: Scoring
    block_q: int
    block_k: int
    packed: tuple[int, int]   # (N, K) when heads were folded into the row axes, else (1, 1)


def _grouped(q, keys):
    return q.reshape(q.shape[0], keys, q.shape[1] // keys, *q.shape[2:])


def _heads(call: _Call, q, mask):
    """Key head of each (token, head) row of the decode form; padding rows match nothing visible anyway."""
    if call.packed == (1, 1):
        return None
    (heads, keys), rows_k = call.packed, mask.rank_k.shape[1]
    number = lambda rows, n: jax.lax.rem(jnp.arange(rows, dtype=jnp.int32), jnp.full((rows,), n, jnp.int32))
    return flash_tpu.Heads(number(q.shape[2], heads) // (heads // keys), number(rows_k, keys))


def _run_forward(call: _Call, q, k, v, mask):
    """Head-major arrays (B, N, T, H) and (B, K, S, H) to out (B, N, T, H) and log-sum-exp (B, N, 1, T)."""
    args = (mask, call.score, call.block_q, call.block_k)
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
    args = (mask, call.score, call.block_q, call.block_k)
    if call.backend == "xla":
        group = lambda a: _grouped(a, k.shape[1])
        dq, dk, dv = blocked_xla.backward(group(q), k, v, *args, group(lse[:, :, 0]), group(delta[:, :, 0]),
                                          group(d_out))
        return dq.reshape(q.shape), dk, dv, None
    if call.backend == "gpu":
        return (*flash_gpu.backward(q, k, v, *args, lse, delta, d_out), None)
    shape = k.shape
    if call.packed != (1, 1):
        k, v = (a.reshape(shape[0], 1, -1, shape[3]) for a in (k, v))
    dq, dk, dv = flash_tpu.backward(q, k, v, *args, lse, delta, d_out, _heads(call, q, mask),
                                    interpret=call.backend == "interpret")
    return dq, dk.reshape(shape), dv.reshape(shape), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _check(q, k, v, mask):
    for name, array, letters in (("q", q, "(B, T, N, H)"), ("k", k, "(B, S, K, H)"), ("v", v, "(B, S, K, H)")):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}; expected rank 4, {letters}. "
                             "Split heads from width before the call.")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; expected a floating dtype. Cast it first.")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry.")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ; they share (B, S, K, H).")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype. Cast them to it.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or head width; "
                         "expected (B, T, N, H) and (B, S, K, H).")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads over {k.shape[2]} key heads; "
                         "query heads must be a multiple of key heads.")
    if not isinstance(mask, Visibility):
        raise ValueError(f"the mask is of type {type(mask).__name__}; expected a Visibility. Build one with by_rank.")
    for field in (f.name for f in dataclasses.fields(Visibility)):
        array, tokens = getattr(mask, field), q.shape[1] if field.endswith("_q") else k.shape[1]
        if array.ndim != 2 or array.shape[1] != tokens or array.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"mask.{field} has shape {array.shape}; "
                             f"expected ({q.shape[0]}, {tokens}) or (1, {tokens}).")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"mask.{field} has dtype {array.dtype}; expected int32.")


def _round(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _Layout(NamedTuple):
    """How a backend cuts a call: query heads folded into rows, tile edges, padded rows, tiles of one batch row.

    packed: all heads share the row axes, those of keys, too.
    """

    packed: bool
    fold: int
    block_q: int
    block_k: int
    rows_q: int
    rows_k: int
    tiles: int


def _layout(q, k, block_q: int | None, block_k: int | None, backend: str, heads_first: bool = False) -> _Layout:
    """Tile edges default to 512, which amortises a grid step, on TPU; GPU kernels hold their tiles in registers."""
    (_, queries, heads, _), (_, keys, key_heads, _) = q.shape, k.shape
    mosaic = backend in ("tpu", "interpret")
    packed = (mosaic and not heads_first and heads > 1 and heads * queries * key_heads <= _PACKED_WORK
              and queries < keys and 16 % key_heads == 0)
    # the query heads of a key head fill a tile that few queries of one head would not
    fold = heads if packed else heads // key_heads if mosaic and queries < _EDGE else 1
    queries, keys = queries * fold, keys * key_heads if packed else keys
    if block_q is None:
        block_q = 64 if backend == "gpu" else min(_EDGE, _round(queries, 128)) if queries >= 128 else _round(
            queries, 16)
    if block_k is None:
        # an edge that divides the keys spares a padded copy of a long cache; few rows afford longer tiles of keys
        longest = (2048, 1024) if heads_first and block_q <= 128 else ()
        block_k = 64 if backend == "gpu" else max((b for b in (*longest, _EDGE, 384, 256, 128) if keys % b == 0),
                                                  default=min(_EDGE, _round(keys, 128)))
    rows_q, rows_k = _round(queries, block_q), _round(keys, block_k)
    return _Layout(packed, fold, block_q, block_k, rows_q, rows_k, rows_q // block_q * (rows_k // block_k))


def _problem(q, k, edges: dict[str, int | None], heads_first: bool, backend: str) -> str | None:
    """Why a kernel backend cannot take these arrays or tile edges, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"dtype {q.dtype} (kernels take float32 and bfloat16)"
    if backend != "interpret" and q.shape[3] not in (64, 128, 256):
        return f"head width {q.shape[3]} (kernels take 64, 128 and 256)"
    for name, edge in edges.items():
        if backend == "tpu" and edge and edge % 128:
            return f"{name}={edge} (TPU tiles are multiples of 128)"
        if backend == "gpu" and edge and edge & (edge - 1):
            return f"{name}={edge} (GPU tiles are powers of two)"
    layout = _layout(q, k, **edges, backend=backend, heads_first=heads_first)
    if backend == "tpu" and layout.tiles > _MAX_TILES:
        return f"{layout.tiles} tiles for {q.shape[1]} queries and {k.shape[1]} keys (scalar memory lists {_MAX_TILES})"
    if backend == "gpu":
        wanted = flash_gpu.shared_memory(q.shape[3], layout.block_q, layout.block_k, q.dtype)
        limit = dispatch.shared_memory()
        if wanted > limit:
            return (f"{wanted} bytes of shared memory for {q.dtype} tiles of {layout.block_q} queries and "
                    f"{layout.block_k} keys of width {q.shape[3]} (a block here has {limit})")
    return None


def attention_problem(q: jax.Array, k: jax.Array, backend: str | None = None, heads_first: bool = False) -> str | None:
    """Why no kernel takes these arrays, or None where one does.

    Args:
      q: (B, T, N, H), or its shape and dtype.
      k: (B, S, K, H), or its shape and dtype.
      backend: one of "tpu", "gpu" and "interpret"; None asks of the one that would be picked, "xla" has no kernel.
      heads_first: see `block_mask_attention`.
    """
    backend = dispatch.automatic_backend() if backend is None else backend
    if backend == "xla":
        return "backend 'xla' has no kernel"
    return dispatch.device_problem(backend) or _problem(
        q, k, {"block_q": None, "block_k": None}, heads_first, backend)


def _attend_rows(call: _Call, tiles: int, q, k, v, mask: Visibility):
    """`_attend`, in groups of batch rows where the work list of all of them would outgrow scalar memory."""
    batch = q.shape[0]
    size = max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * tiles <= _MAX_TILES))
    if call.backend != "tpu" or size == batch:
        return _attend(call, q, k, v, mask)
    grouped = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), (q, k, v, mask))
    return jax.lax.map(lambda rows: _attend(call, *rows), grouped).reshape(q.shape)


def block_mask_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Visibility, *, scale: float | None = None,
                         soft_cap: float | None = None, backend: str | None = None, block_q: int | None = None,
                         block_k: int | None = None, heads_first: bool = False) -> jax.Array:
    """softmax(scale q k^T) v over the keys each query may see, by tiles that hold at least one visible pair.

    Of a long cache only key tiles with something visible are read, such as the valid prefix of each row, and in place:
    with few queries all heads share one tile where tokens come before heads, and the query heads of a key head do where
    heads come first. (Heads of width 64 fill half a TPU's lanes: the compiler then copies the cache to pad them.)

    Args:
      q: (B, T, N, H) float32 or bfloat16 (float64 with the XLA form).
      k, v: (B, S, K, H), same dtype; query head n reads key head n // (N // K).
      mask: who sees whom, arrays (B, T) and (B, S); a batch axis of 1 is broadcast.
      scale: factor of the scores; H**-0.5 when None.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) before the softmax; no cap when None.
      backend: None picks by platform; "xla", "tpu", "gpu" or "interpret" insist.
      block_q, block_k: tile edges, for tuning; multiples of 16, of 128 on TPU, powers of two on GPU.
      heads_first: whether k and v are views of (B, K, S, H) arrays, and are read as those lie.
    Returns:
      (B, T, N, H), dtype of q; zeros for a query that sees nothing.
    Raises:
      ValueError: for shapes, dtypes, tiles or backends that do not fit.
    Source: online softmax attention over the rule of `Visibility`.
    """
    _check(q, k, v, mask)
    batch, queries, heads, width = q.shape
    key_heads = k.shape[2]
    edges = {"block_q": block_q, "block_k": block_k}
    for name, value in edges.items():
        if value is not None and (value < 16 or value % 16):
            raise ValueError(f"{name}={value}; expected a multiple of 16, or None.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap}; expected a positive number, or None for no cap.")
    chosen = dispatch.choose("block_mask_attention", backend, functools.partial(_problem, q, k, edges, heads_first))
    layout = _layout(q, k, **edges, backend=chosen, heads_first=heads_first)
    mask = jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(a, jnp.int32), (batch, a.shape[1])), mask)
    fold, fold_k = layout.fold, key_heads if layout.packed else 1
    # rows are (token, head) pairs, of all heads so that a long cache is neither transposed nor copied
    q = jnp.moveaxis(q.reshape(batch, queries, heads // fold, fold, width), 2, 1).reshape(batch, -1, queries * fold,
                                                                                         width)
    mask = mask.map(lambda a: jnp.repeat(a, fold, axis=1), lambda a: jnp.repeat(a, fold_k, axis=1))
    in_place = layout.packed and key_heads > 1   # the axis of a single key head moves without a copy
    if not in_place:
        k, v = (jnp.moveaxis(a, 2, 1) for a in (k, v))
    rows = q.shape[2]

    def pad(a, axis, n):  # not even a no-op pad of a long cache
        return a if a.shape[axis] == n else jnp.pad(a, [(0, n - a.shape[axis] if i == axis else 0) for i in range(4)])
    k, v = (pad(a, 1, layout.rows_k // key_heads) if in_place else pad(a, 2, layout.rows_k) for a in (k, v))
    score = Scoring(width ** -0.5 if scale is None else float(scale), None if soft_cap is None else float(soft_cap))
    call = _Call(chosen, score, layout.block_q, layout.block_k, (heads, key_heads) if in_place else (1, 1))
    mask = pad_mask(mask, layout.rows_q, layout.rows_k)
    out = _attend_rows(call, layout.tiles, pad(q, 2, layout.rows_q), k, v, mask)[:, :, :rows]
    out = out.reshape(batch, heads // fold, queries, fold, width)
    return jnp.moveaxis(out, 1, 2).reshape(batch, queries, heads, width)
