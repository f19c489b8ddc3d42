"""What an EOS does to the rest of an answer.

none: nothing, every token is decoded. fill: all after the first EOS becomes EOS (FreeCache for LLaDA). run: where the
committed tokens have no gap and end in several EOS, the rest becomes EOS (FreeCache for Dream). block: nothing after
the block that holds one is decoded (block diffusion). late_fill: as fill, but not once every token is committed, and
the tokens filled stay candidates of one more forward (d3LLM's released code).

Letters: B batch, G canvas length.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from dlm_jax.decode.state import DRAFTED, Canvas, Request

KINDS = ("none", "fill", "run", "block", "late_fill")
NONE, FILL, RUN, BLOCK, LATE_FILL = range(len(KINDS))


def masked(request: Request, canvas: Canvas) -> Array:
    """Returns (B, G) bool: the tokens still to come."""
    inside = jnp.arange(request.capacity) < request.max_new_tokens[:, None]
    return inside & (canvas.committed_at < 0)


def found(request: Request, canvas: Canvas) -> Array:
    """Returns (B, G) bool: committed EOS."""
    return (canvas.tokens == request.eos_id) & (canvas.committed_at >= 0)


def fill(
    kind: Array, request: Request, canvas: Canvas, run: Array, forward: Array, live: Array
) -> tuple[Canvas, Array]:
    """Puts EOS where the rule wants them.

    Args:
      kind: () int32 index into `KINDS`.
      request: the batch.
      canvas: after a forward's commits.
      run: () int32 EOS in a row, for "run".
      forward: (B,) int32 forwards after prefill so far.
      live: (B,) bool rows that may change.

    Returns:
      The canvas, and (B, G) bool tokens that stay candidates.
    """
    index, left, eos = jnp.arange(request.capacity), masked(request, canvas), found(request, canvas)
    behind = (index < request.max_new_tokens[:, None]) & (jnp.cumsum(eos, axis=1) - eos > 0)
    unfinished = jnp.any(left, axis=1, keepdims=True)
    length = jnp.argmax(left, axis=1)[:, None]  # tokens before the first mask, where there is one
    tail = (index < length) & (index >= length - run)
    gapless = jnp.all(left | (index < length) | (index >= request.max_new_tokens[:, None]), axis=1, keepdims=True)
    over = unfinished & gapless & (length >= run) & jnp.all(eos | ~tail, axis=1, keepdims=True)
    rest = jnp.select(
        [kind == FILL, kind == RUN, kind == LATE_FILL], [behind, left & over, behind & unfinished], False)
    rest &= live[:, None]
    fresh = rest & left
    filled = dataclasses.replace(
        canvas, tokens=jnp.where(rest, request.eos_id, canvas.tokens),
        committed_at=jnp.where(fresh, forward[:, None], canvas.committed_at),
        origin=jnp.where(fresh, DRAFTED, canvas.origin))
    return filled, fresh & (kind == LATE_FILL)
