"""The folded two-stream gated delta rule as a scan over chunks: any backend, any dtype.

Only chunk-start states are kept for the backward pass, so memory does not depend on the block size.
Letters as in `streams`; R = H // J value heads per key head, N chunks.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta.chunk import ChunkStream, Plan, chunk_backward, chunk_forward
from pallas_kernels.gated_delta.streams import Stream

# axes of (clean arrays), (noisy arrays) mapped at each level: value heads inside a key head, key heads, batch rows
_CLEAN_GROUP, _NOISY_GROUP = Stream(None, None, 1, 1, 1), Stream(None, None, 2, 2, 2)
_CLEAN_HEAD, _NOISY_HEAD = Stream(1, 1, 1, 1, 1), Stream(2, 2, 2, 2, 2)
_BATCH = Stream(0, 0, 0, 0, 0)


def _rows(stream: Stream) -> ChunkStream:
    """(C,) gates to (1, C) rows."""
    return ChunkStream(stream.q, stream.k, stream.v, stream.g[None, :], stream.beta[None, :])


def _views(noisy: Stream | None) -> tuple[ChunkStream, ...]:
    if noisy is None:
        return ()
    return tuple(_rows(Stream(*(a[w] for a in noisy))) for w in range(noisy.q.shape[0]))


def _unrow(stream: ChunkStream) -> Stream:
    return Stream(stream.q, stream.k, stream.v, stream.g[0], stream.beta[0])


def _over_heads(function, noisy, starts, extra_in, extra_out):
    """Maps a one-head function over value-head groups, key heads and batch rows.

    extra_in and extra_out give, per further argument and result, the axes at the three levels.
    """
    levels = (_CLEAN_GROUP, _NOISY_GROUP), (_CLEAN_HEAD, _NOISY_HEAD), (_BATCH, _BATCH)
    for level, (clean_axes, noisy_axes) in enumerate(levels):
        in_axes = (clean_axes, None if noisy is None else noisy_axes, None if starts is None or level < 2 else 0,
                   *(axes[level] for axes in extra_in))
        function = jax.vmap(function, in_axes=in_axes, out_axes=tuple(axes[level] for axes in extra_out))
    return function


_STATE, _OUT, _NOISY_OUT, _GATE, _NOISY_GATE = (0, 0, 0), (1, 1, 0), (2, 2, 0), (1, 1, 0), (2, 2, 0)


def _forward_chunk(plan, clean, noisy, starts, state):
    def head(clean, noisy, starts, state):
        row = None if starts is None else starts[None, :]
        out, views, state = chunk_forward(plan, _rows(clean), _views(noisy), state, row)
        return (out, state) if noisy is None else (out, state, jnp.stack(views))
    outs = (_OUT, _STATE) + (() if noisy is None else (_NOISY_OUT,))
    return _over_heads(head, noisy, starts, (_STATE,), outs)(clean, noisy, starts, state)


def _backward_chunk(plan, clean, noisy, starts, state, d_out, d_noisy, d_next):
    def head(clean, noisy, starts, state, d_next, d_out, *d_noisy):
        row = None if starts is None else starts[None, :]
        views = _views(noisy)
        d_views = () if noisy is None else tuple(d_noisy[0][w] for w in range(len(views)))
        d_clean, d_views, d_state = chunk_backward(plan, _rows(clean), views, state, row, d_out, d_views, d_next)
        result = (d_state, *_unrow(d_clean))
        return result if noisy is None else result + tuple(jnp.stack(x) for x in zip(*map(_unrow, d_views)))
    ins = (_STATE, _STATE, _OUT) + (() if noisy is None else (_NOISY_OUT,))
    outs = (_STATE,) + (_OUT,) * 5 + (() if noisy is None else (_NOISY_OUT,) * 5)
    args = (state, d_next, d_out) + (() if noisy is None else (d_noisy,))
    result = _over_heads(head, noisy, starts, ins, outs)(clean, noisy, starts, *args)
    return result[0], Stream(*result[1:6]), None if noisy is None else Stream(*result[6:])


def _group(stream: Stream | None, axis: int) -> Stream | None:
    """Splits value heads H into (J, R) so that a value head finds its key head by position."""
    if stream is None:
        return None
    keys = stream.q.shape[axis]
    split = lambda a: a.reshape(*a.shape[:axis], keys, a.shape[axis] // keys, *a.shape[axis + 1:])
    return Stream(stream.q, stream.k, split(stream.v), split(stream.g), split(stream.beta))


def _take(tree, chunk, size, axis):
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, chunk * size, size, axis), tree)


def _put(buffers, values, chunk, size, axis):
    write = lambda b, x: lax.dynamic_update_slice_in_dim(b, x.astype(b.dtype), chunk * size, axis)
    return jax.tree.map(write, buffers, values)


def forward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None,
            state: jax.Array, keep_states: bool):
    """Forward pass over whole chunks.

    Args:
      plan: static choices of the chunk algebra.
      chunk_size: tokens per chunk; divides T.
      clean: arrays (B, T, ...).
      noisy: arrays (B, W, T, ...), or None.
      starts: (B, T) int32 from `streams.document_starts`, or None.
      state: (B, H, E, F) initial state, accumulation dtype.
      keep_states: also return chunk-start states.
    Returns:
      out (B, T, H, F), noisy out (B, W, T, H, F) or None, final state, chunk-start states (N, B, H, E, F) or None.
    """
    batch, tokens, heads, width = clean.v.shape
    clean_g, noisy_g = _group(clean, 2), _group(noisy, 3)
    grouped = (batch, clean.q.shape[2], heads // clean.q.shape[2], *state.shape[2:])
    buffers = (jnp.zeros_like(clean_g.v),) + (() if noisy is None else (jnp.zeros_like(noisy_g.v),))

    def step(carry, chunk):
        state, buffers = carry
        begin = chunk * chunk_size
        here = None if starts is None else _take(starts, chunk, chunk_size, 1) - begin
        result = _forward_chunk(plan, _take(clean_g, chunk, chunk_size, 1), _take(noisy_g, chunk, chunk_size, 2), here,
                                state)
        outs = (_put(buffers[0], result[0], chunk, chunk_size, 1),)
        if noisy is not None:
            outs += (_put(buffers[1], result[2], chunk, chunk_size, 2),)
        return (result[1], outs), (state if keep_states else None)

    (last, buffers), kept = lax.scan(step, (state.reshape(grouped), buffers), jnp.arange(tokens // chunk_size))
    noisy_out = None if noisy is None else buffers[1].reshape(noisy.v.shape)
    kept = kept.reshape(-1, *state.shape) if keep_states else None
    return buffers[0].reshape(clean.v.shape), noisy_out, last.reshape(state.shape), kept


def backward(plan: Plan, chunk_size: int, clean: Stream, noisy: Stream | None, starts: jax.Array | None,
             kept: jax.Array, d_out: jax.Array, d_noisy: jax.Array | None, d_final: jax.Array):
    """Reverse scan: recomputes each chunk from its start state and pulls cotangents back through it.

    Args:
      plan, chunk_size, clean, noisy, starts: as for `forward`.
      kept: (N, B, H, E, F) chunk-start states.
      d_out, d_noisy, d_final: cotangents of the outputs and of the final state, in their shapes.

    Returns:
      d_clean, d_noisy (or None), d_initial_state (B, H, E, F).
    """
    tokens, acc = clean.v.shape[1], d_final.dtype
    clean_g, noisy_g = _group(clean, 2), _group(noisy, 3)
    keys, ratio = clean.q.shape[2], clean.v.shape[2] // clean.q.shape[2]
    grouped = (clean.v.shape[0], keys, ratio, *d_final.shape[2:])
    d_out = d_out.reshape(clean_g.v.shape)
    d_noisy = None if noisy is None else d_noisy.reshape(noisy_g.v.shape)
    buffers = jax.tree.map(jnp.zeros_like, (clean_g, noisy_g))
    # cotangents of shared key heads come out per value head: the group axis follows the head axis
    reduce = lambda s, axis: Stream(s.q.sum(axis), s.k.sum(axis), s.v, s.g, s.beta)

    def step(carry, x):
        d_state, (clean_buffer, noisy_buffer) = carry
        chunk, state = x
        begin = chunk * chunk_size
        here = None if starts is None else _take(starts, chunk, chunk_size, 1) - begin
        d_state, d_clean, d_views = _backward_chunk(
            plan, _take(clean_g, chunk, chunk_size, 1), _take(noisy_g, chunk, chunk_size, 2), here,
            state.reshape(grouped).astype(acc), _take(d_out, chunk, chunk_size, 1).astype(acc),
            None if noisy is None else _take(d_noisy, chunk, chunk_size, 2).astype(acc), d_state)
        clean_buffer = _put(clean_buffer, reduce(d_clean, 3), chunk, chunk_size, 1)
        if noisy is not None:
            noisy_buffer = _put(noisy_buffer, reduce(d_views, 4), chunk, chunk_size, 2)
        return (d_state, (clean_buffer, noisy_buffer)), None

    chunks = jnp.arange(tokens // chunk_size)
    (d_state, (d_clean, d_views)), _ = lax.scan(step, (d_final.reshape(grouped), buffers), (chunks, kept), reverse=True)
    shape_back = lambda ds, s: None if s is None else Stream(*(a.reshape(b.shape) for a, b in zip(ds, s)))
    return shape_back(d_clean, clean), shape_back(d_views, noisy), d_state.reshape(d_final.shape)
