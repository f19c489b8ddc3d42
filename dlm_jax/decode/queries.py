"""The one way to ask the model: which tokens a forward reads, what each sees, and which outputs are wanted.

Keys and values are written in place, so what a forward leaves out keeps what an earlier one wrote, and a cache policy
is no more than a choice of queries.

Letters: B batch, Q queries, C wanted outputs, P prompt capacity, S = P + G buffer entries, D model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.ledger import PREFILL, Counts
from dlm_jax.decode.request import Request
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Pass, Scorer, Window


@struct.dataclass
class Queries:
    """Tokens that a forward reads, in any order; every array (B, Q).

    Attributes:
      tokens: int32 ids.
      number: int32, see `request`.
      active: bool; the others see nothing, are seen by none and write nothing.
      limit: int32 largest rank that each sees.
      group: int32 group whose keys each sees besides, negative for none; None where no query has one.
      order: int32, keys of the group up to this order are seen; None lets a group see itself whole.
      kept: bool, whose keys and values the cache keeps; queries then see its entries as they were before, by rank, and
        besides them the queries of their own group, so that a token may be read in several groups. None keeps all and
        has every query see what the forward writes.
    """

    tokens: Array
    number: Array
    active: Array
    limit: Array
    group: Array | None = None
    order: Array | None = None
    kept: Array | None = None


@struct.dataclass
class Keys:
    """How the entries of the buffers stand in the visibility rule; every array (B, S) int32.

    Attributes:
      rank: negative where only a group sees the entry, or none.
      group, order: None where no entry has a group.
    """

    rank: Array
    group: Array | None = None
    order: Array | None = None


def window(request: Request, tokens: Array, start: Array, stop: Array, width: int) -> Queries:
    """Returns queries for the tokens [start, stop) of every row, each of which sees the whole row.

    Args:
      request: the batch.
      tokens: (B, G) int32 canvas, masks where nothing is committed.
      start, stop: (B,) int32 numbers; a row with start >= stop has no queries.
      width: Q, static.
    """
    number = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    read = jnp.take_along_axis(request.buffer(tokens), request.entry(number), axis=1)
    return Queries(read, number, number < stop[:, None], jnp.full_like(number, vis.LAST))


def ask(score: Scorer, request: Request, queries: Queries, cache: Cache | None, wanted: Array | None = None, *,
        keys: Keys | None = None, recurrence: Window | None = None, widths: tuple[int, ...] | None = None,
        optional: bool = False) -> tuple[Array, Cache | None]:
    """Runs the model over queries.

    The body is compiled once for each width, and a forward takes the smallest that holds the last active query of the
    batch, so queries that are rarely needed stand last and cost nothing when they are not.

    Args:
      score: the model.
      request: the batch.
      queries: what is read.
      cache: of capacity S, which gets the active queries' keys and values; None where the queries see each other alone.
      wanted: (B, C) int32 indices of queries whose outputs are computed, where they are within the width, else anything
        comes back; None for all Q.
      keys: of the entries after this forward; None ranks them by position, the queries' groups being theirs.
      recurrence: see `Pass`.
      widths: ascending, static, the last one Q; None for Q alone.
      optional: whether a forward without any active query is left out; its outputs are then zeros.

    Returns:
      (B, C, D) or (B, Q, D) hidden states, and the cache.
    """
    Q = queries.number.shape[1]
    if wanted is None:
        wanted = jnp.broadcast_to(jnp.arange(Q, dtype=jnp.int32), queries.number.shape)
    if keys is None:
        keys = _keys(request, queries)

    def run(width, cache):
        part = jax.tree.map(lambda x: x[:, :width], queries)
        entry = request.entry(part.number)
        kept = part.active if part.kept is None else part.active & part.kept
        told = Pass(request.position(part.number), _visibility(part, keys, entry, cache is not None),
                    None if cache is None else jnp.where(kept, entry, request.entries), recurrence)
        index = jnp.clip(wanted, 0, width - 1)
        if index.shape[1] < width:
            return score.hidden(part.tokens, told, cache, index)
        hidden, cache = score.hidden(part.tokens, told, cache)
        return jnp.take_along_axis(hidden, index[..., None], axis=1), cache

    widths = (Q,) if widths is None else widths
    if len(widths) == 1 and not optional:
        return run(Q, cache)
    needed = jnp.max(jnp.where(queries.active, jnp.arange(1, Q + 1), 0))
    choice = jnp.sum(needed > jnp.array(widths[:-1]))
    out = jax.eval_shape(lambda cache: run(widths[0], cache)[0], cache)
    hidden = jnp.zeros(out.shape, out.dtype)
    for place, width in enumerate(widths):
        # loops of one trip or none: they write to the cache in place, where the branches of a switch copy it
        trip = lambda carry, width=width: (jnp.zeros((), bool), *run(width, carry[2]))
        needs = (choice == place) & ((needed > 0) | (not optional))
        _, hidden, cache = jax.lax.while_loop(lambda carry: carry[0], trip, (needs, hidden, cache))
    return hidden, cache


def _keys(request: Request, queries: Queries) -> Keys:
    """Returns keys ranked by position; what queries of a group write is of their group and of no rank."""
    rank = request.ranks()
    if queries.group is None or queries.kept is not None:
        return Keys(rank)
    row = jnp.arange(request.batch)[:, None]
    entry = jnp.where(queries.active & (queries.group >= 0), request.entry(queries.number), request.entries)
    none = jnp.full_like(rank, vis.NONE)
    order = None if queries.order is None else none.at[row, entry].set(queries.order, mode="drop")
    return Keys(rank.at[row, entry].set(vis.NONE, mode="drop"),
                none.at[row, entry].set(queries.group, mode="drop"), order)


def _visibility(queries: Queries, keys: Keys, entry: Array, cached: bool) -> vis.Visibility:
    cut = lambda x: jnp.where(queries.active, x, vis.NONE)
    own = lambda x: x if cached or x is None else cut(jnp.take_along_axis(x, entry, axis=1))
    rank, group, order = own(keys.rank), own(keys.group), own(keys.order)
    floor = jnp.zeros_like(queries.limit)
    if queries.kept is not None:  # the entries by rank, and these queries by group
        none = jnp.full_like(queries.limit, vis.NONE)
        mine, join = cut(queries.group), lambda *ends: jnp.concatenate(ends, axis=1)
        return vis.Visibility(floor, cut(queries.limit), mine, floor, join(rank, none),
                              join(jnp.full_like(rank, vis.NONE), mine), jnp.zeros_like(join(rank, none)))
    if queries.group is None and group is not None:
        raise ValueError("keys have groups and queries have none: give Queries(group=...), -1 where there is none")
    if queries.group is None:
        return vis.by_rank(floor, cut(queries.limit), rank)
    return vis.Visibility(
        floor, cut(queries.limit), cut(queries.group), floor if queries.order is None else queries.order, rank, group,
        jnp.zeros_like(rank) if order is None else order)


def prefill(score: Scorer, request: Request, window: int = 0, length: Array | None = None, limit: Array | None = None
            ) -> tuple[Array, Cache, Counts]:
    """Runs the prompts and keeps what a cache keeps of them.

    Args:
      score: the model.
      request: the batch.
      window: tokens of a later pass that may be undone.
      length: (B,) int32 first tokens of each prompt that are run; None for all.
      limit: (B, P) int32 largest rank that each token sees; None for its own.

    Returns:
      (B, 1, D) hidden state of the last token that was run, a cache of capacity S, and counts with the prefill.
    """
    P = request.prompt_capacity
    length = request.prompt_length if length is None else length
    position = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), request.prompt.shape)
    valid = position < length[:, None]
    seen = vis.causal(valid)
    if limit is not None:
        seen = vis.by_rank(jnp.zeros_like(limit), jnp.where(valid, limit, vis.NONE), jnp.where(
            valid, position, vis.NONE))
    hidden, cache = score.hidden(
        request.prompt, Pass(position, seen, jnp.where(valid, position, P)),
        score.init_cache(request.batch, P, window), jnp.maximum(length - 1, 0)[:, None])
    counts = Counts.zeros(request.batch).add(PREFILL, length, (request.max_new_tokens > 0) & (length > 0))
    return hidden, cache.grow(request.entries), counts
