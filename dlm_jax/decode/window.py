"""One forward of a diffusion model over a window of every row: queries gathered, keys and values written in place.

A row's tokens have three numbers. Its index counts prompt and answer without gaps and is its logical position; its
entry is its place in the buffers of P + G; a generated token also has its number g in the answer. Which keys a query
sees does not depend on the window: every token of the row, or those up to the end of its own block. What a window
leaves out keeps the key and value that an earlier forward wrote, so a cache policy is no more than a choice of window.

Letters: B batch, W queries, C wanted tokens, P prompt capacity, G canvas length, S = P + G, D model width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.decode.state import Request
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass, Scorer


def total(request: Request) -> Array:
    """Returns (B,) int32 tokens of each row, prompt and answer."""
    return request.prompt_length + request.max_new_tokens


def entries(request: Request, index: Array) -> Array:
    """Returns the (B, W) buffer entries of (B, W) indices."""
    length = request.prompt_length[:, None]
    return jnp.where(index < length, index, request.prompt_capacity + index - length)


def ranks(request: Request, block_length: int = 0) -> Array:
    """Returns (B, S) int32 ranks for the visibility rule, -1 on padding.

    Args:
      request: the batch.
      block_length: 0 lets every token see every other (rank 0). Else ranks number the blocks and a token sees up to
        the end of its own; blocks of that many tokens end where the prompt ends, so a prompt's first may be shorter.
    """
    P, length = request.prompt_capacity, request.prompt_length[:, None]
    entry = jnp.arange(P + request.capacity, dtype=jnp.int32)
    index = jnp.where(entry < P, entry, length + entry - P)
    valid = jnp.where(entry < P, entry < length, index < total(request)[:, None])
    number = (index + -length % block_length) // block_length if block_length else jnp.zeros_like(index)
    return jnp.where(valid, number, vis.NONE)


def unconditional(request: Request) -> Request:
    """Returns a request of 2B rows: every row, then every row with its prompt masked (classifier-free guidance)."""
    hidden = jnp.full_like(request.prompt, request.mask_id)
    twice = lambda x: jnp.concatenate([x, x])
    return dataclasses.replace(
        request, prompt=jnp.concatenate([request.prompt, hidden]), prompt_length=twice(request.prompt_length),
        max_new_tokens=twice(request.max_new_tokens))


def forward(score: Scorer, request: Request, tokens: Array, cache: Any, start: Array, stop: Array, wanted: Array,
            rank: Array, widths: tuple[int, ...]) -> tuple[Array, Any]:
    """Runs the tokens [start, stop) of every row and returns what predicts the wanted tokens.

    The body is compiled once for each width, and a forward takes the smallest that holds the longest window of the
    batch, so a shrinking window costs less and less.

    Args:
      score: the model.
      request: the batch.
      tokens: (B, G) int32 canvas, masks where nothing is committed.
      cache: a `KVCache` of capacity S, which gets the window's keys and values; or None, where the window must be
        the whole row.
      start, stop: (B,) int32 indices; a row with start >= stop has no queries.
      wanted: (B, C) int32 numbers g of the tokens to predict; those whose output is not in the window get anything.
      rank: (B, S) int32, see `ranks`.
      widths: ascending, static; the last is at least the longest window.

    Returns:
      (B, C, D) hidden states, and the cache.
    """
    buffer = jnp.concatenate([request.prompt, tokens], axis=1)
    S = buffer.shape[1]
    # the one place that knows the shift: the output at index i predicts the token at i + shift
    outputs = request.prompt_length[:, None] + wanted - score.shift - start[:, None]

    def run(width, cache):
        index = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        valid = index < stop[:, None]
        entry = jnp.clip(entries(request, index), 0, S - 1)
        own = jnp.where(valid, jnp.take_along_axis(rank, entry, axis=1), vis.NONE)
        keys, slots = (own, None) if cache is None else (rank, jnp.where(valid, entry, S))
        seen = vis.by_rank(jnp.zeros_like(own), own, keys)
        hidden, cache = score.hidden(
            jnp.take_along_axis(buffer, entry, axis=1), Pass(index, seen, slots), cache)
        return jnp.take_along_axis(hidden, jnp.clip(outputs, 0, width - 1)[..., None], axis=1), cache

    if len(widths) == 1:
        return run(widths[0], cache)
    needed = jnp.max(stop - start)
    choice = jnp.sum(needed > jnp.array(widths[:-1]))
    out = jax.eval_shape(lambda cache: run(widths[0], cache)[0], cache)
    hidden = jnp.zeros(out.shape, out.dtype)
    for number, width in enumerate(widths):
        # loops of one trip or none: they write to the cache in place, where the branches of a switch copy it
        trip = lambda carry, width=width: (jnp.zeros((), bool), *run(width, carry[2]))
        _, hidden, cache = jax.lax.while_loop(lambda carry: carry[0], trip, (choice == number, hidden, cache))
    return hidden, cache
