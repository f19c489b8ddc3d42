"""What an iteration asks of the model: a refresh where one is due, and one forward for all lanes of a row.

A lane reads its window, its own tokens and a few ahead, and of the cache what lies before it. Windows may overlap, so
every lane is a group of queries: it sees the cache by rank, its own window whole, and of its siblings nothing but what
the cache keeps of them. No copy of the cache, no call a lane.

Letters: B batch, N seats, R room of a lane, A room ahead, F = shift + R + A queries a lane, C = N R + A outputs,
D model width, S = P + G buffer entries.

Source: AsyncLane (arXiv 2606.08411), Eqs. 2-3, 11-12.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.asynclane import lanes as table
from dlm_jax.decode.asynclane.boundary import Classes
from dlm_jax.decode.asynclane.caches import Compact
from dlm_jax.decode.asynclane.lanes import GENERATE, Seats
from dlm_jax.decode.asynclane.state import Rooms, State
from dlm_jax.decode.ledger import DENOISE, PREFILL, REFRESH
from dlm_jax.decode.masked.caches import CachePolicy
from dlm_jax.decode.masked.drafts import Now
from dlm_jax.decode.queries import Queries, ask, window
from dlm_jax.decode.request import Request
from dlm_jax.scoring import Scorer


@struct.dataclass
class Windows:
    """Which tokens an iteration may write.

    Attributes:
      number: (B, C) int32 of the tokens, a lane's room after the other, then those ahead of the one that generates.
      wanted: (B, C) bool which of them are a lane's, or within its lookahead.
      stop: (B, N) int32 number behind the last token that each lane reads.
    """

    number: Array
    wanted: Array
    stop: Array


@struct.dataclass
class Reading:
    """What the model answered.

    Attributes:
      hidden: (B, C, D) outputs that predict the tokens of `Windows`.
      wanted: (B, C) bool those that mean something.
    """

    hidden: Array
    wanted: Array


def windows(request: Request, seats: Seats, rooms: Rooms, lookahead: Array, refine_lookahead: bool) -> Windows:
    """Returns the windows of the active lanes.

    Args:
      request: the batch.
      seats: the lanes.
      rooms: of the shapes.
      lookahead: () int32 w.
      refine_lookahead: whether lanes that refine see what is ahead of them.
    """
    lane, limit = seats.lane, request.max_new_tokens[:, None]
    sees = jnp.where((lane.role == GENERATE) | refine_lookahead, lookahead, 0)
    stop = jnp.minimum(limit, lane.stop + sees)
    inside = jnp.arange(rooms.block, dtype=jnp.int32)
    own = lane.start[..., None] + inside
    ahead = lane.stop[:, :1] + jnp.arange(rooms.ahead, dtype=jnp.int32)
    flat = lambda x: x.reshape(request.batch, -1)
    return Windows(
        jnp.concatenate([flat(own), ahead], axis=1),
        jnp.concatenate([flat((inside < lane.length[..., None]) & seats.active[..., None]),
                         (ahead < stop[:, :1]) & seats.generates[:, None]], axis=1),
        stop)


def read(score: Scorer, request: Request, state: State, seats: Seats, view: Windows, policy: Compact, rooms: Rooms,
         classes: Classes) -> tuple[Reading, State]:
    """Runs the model with the lanes' own cache.

    Args:
      score: the model.
      request: the batch.
      state: of the iteration that begins, its number already counted.
      seats: the active lanes.
      view: their windows.
      policy: what is kept and when it is refreshed.
      rooms: of the shapes.
      classes: tells tokens that end an answer.

    Returns:
      The answers, and the state with the cache and the counts.
    """
    live, first = ~state.done, state.iteration == 1
    beat = jnp.maximum(policy.refresh_interval, 1)
    due = live & (first | ((policy.refresh_interval > 0) & ((state.iteration - 1) % beat == 0)))
    reuse = due & jnp.where(first, policy.reuse_prefill, policy.reuse_refresh_logits)
    lane = state.lanes
    reach = table.run_length(state.known(request, classes), lane.start, lane.length)
    meaningful = jnp.max(jnp.where(lane.made, lane.start + reach, 0), axis=1)
    stop = jnp.minimum(request.max_new_tokens, meaningful + policy.margin)
    fresh, cache = _refresh(score, request, state, due, stop, view.number)
    positions = request.prompt_length + stop
    counts = state.counts.add(jnp.where(first, PREFILL, REFRESH), positions, due)

    covered = seats.active & reuse[:, None] & (seats.lane.stop <= stop[:, None])
    asking = seats.active & ~covered
    of_lane, cache, positions = _lanes(score, request, state, seats, asking, view, policy, rooms, cache)
    counts = counts.add(DENOISE, positions, jnp.any(asking, axis=1))
    spread = jnp.concatenate([jnp.repeat(covered, rooms.block, axis=1),
                              jnp.repeat(covered[:, :1], rooms.ahead, axis=1)], axis=1)
    groups = table.events(seats.lane.group, seats.active)
    state = state.replace(cache=cache, counts=counts).tally(
        groups=groups, reuse=groups - table.events(seats.lane.group, asking), lane_forwards=jnp.sum(asking, axis=1))
    within = ~spread | (view.number < stop[:, None])  # a lookahead is cut where the refresh ends
    return Reading(jnp.where(spread[..., None], fresh, of_lane), view.wanted & within), state


def _refresh(score, request, state, due, stop, number):
    """Reads the tokens up to `stop` of the rows that are due; returns what predicts the tokens `number`."""
    begin = -request.prompt_length
    queries = window(request, state.tokens, begin, jnp.where(due, stop, begin), request.entries)
    limit = jnp.broadcast_to(request.position(stop[:, None] - 1), queries.number.shape)
    G = request.capacity
    widths = sorted({request.prompt_capacity + -(-G // part) for part in (4, 2, 1)})
    outputs = jnp.maximum(number - score.shift - begin[:, None], 0)
    return ask(score, request, queries.replace(limit=limit), state.cache, outputs, widths=tuple(widths), optional=True)


def _lanes(score, request, state, seats, asking, view, policy, rooms, cache):
    """Reads the windows of the lanes that ask; returns (B, C, D) outputs, the cache, and (B,) tokens read."""
    B, N = asking.shape
    shift, lane = score.shift, seats.lane
    F = shift + rooms.block + rooms.ahead
    place = jnp.arange(F, dtype=jnp.int32)
    number = lane.start[..., None] - shift + place
    active = asking[..., None] & (number < view.stop[..., None]) & (number >= -request.prompt_length[:, None, None])
    writes = jnp.ones_like(asking) if policy.prefix_state == "live" else lane.role == GENERATE
    kept = writes[..., None] & (number >= lane.start[..., None]) & (number < lane.stop[..., None])
    flat = lambda x: jnp.broadcast_to(x, number.shape).reshape(B, N * F)
    numbers = flat(number)
    seat = jnp.arange(N, dtype=jnp.int32)
    queries = Queries(
        tokens=jnp.take_along_axis(request.buffer(state.tokens), request.entry(numbers), axis=1), number=numbers,
        active=flat(active), limit=flat((request.position(lane.start) - shift - 1)[..., None]),
        group=flat(seat[:, None]), kept=flat(kept))
    # a query predicts the token `shift` behind it; where nothing stands before the first token, it predicts itself
    own = jnp.arange(rooms.block, dtype=jnp.int32)
    least = jnp.maximum(shift - request.position(lane.start), 0)
    own = jnp.maximum(jnp.broadcast_to(own, (B, N, rooms.block)), least[..., None]) + F * seat[:, None]
    ahead = lane.length[:, :1] + jnp.arange(rooms.ahead, dtype=jnp.int32)
    wanted = jnp.concatenate([own.reshape(B, -1), ahead], axis=1)
    hidden, cache = ask(score, request, queries, cache, wanted, widths=tuple(F * n for n in rooms.counts),
                        optional=True)
    return hidden, cache, jnp.sum(active, axis=(1, 2))


def read_shared(score: Scorer, request: Request, state: State, seats: Seats, view: Windows, policy: CachePolicy,
                rooms: Rooms, widths: tuple[int, ...]) -> tuple[Reading, State]:
    """Runs the model over one window of the row that all lanes share, as a cache policy of masked diffusion has it.

    Args:
      score, request, state, seats, view, rooms: as of `read`.
      policy: what is computed anew.
      widths: of windows that have a program of their own, ascending.
    """
    live, lane, shift = ~state.done, seats.lane, score.shift
    masked = ~state.filled & (jnp.arange(request.capacity) < request.max_new_tokens[:, None])
    begin = jnp.min(jnp.where(seats.active, lane.start, request.capacity), axis=1)
    end = jnp.max(jnp.where(seats.active, lane.stop, 0), axis=1)
    fresh = (state.reached == state.counts.after_prefill()[:, None]) & state.filled
    now = Now(request, masked, fresh, begin, end, jnp.ones_like(begin), rooms.block, shift)
    due = state.due | ((policy.refresh_every > 0) & (state.age >= policy.refresh_every))
    start, stop = policy.window(now)
    asked = view.wanted & jnp.take_along_axis(masked, jnp.clip(view.number, 0, request.capacity - 1), axis=1)
    asked &= jnp.arange(view.number.shape[1]) < rooms.lanes * rooms.block  # a lane may wait for what is ahead of it
    before, behind = start[:, None] + shift > view.number, stop[:, None] + shift <= view.number
    useless = jnp.any(asked & (before | behind) & (request.position(view.number) > 0), axis=1)
    whole = due | useless if policy.keeps else jnp.ones_like(due)
    start, stop = (jnp.where(whole, edge, other) for edge, other in zip((now.first, now.stop), (start, stop)))
    start, stop = jnp.maximum(start, now.first), jnp.minimum(stop, now.stop)
    stop = jnp.where(live, stop, start)
    queries = window(request, state.tokens, start, stop, widths[-1])
    outputs = jnp.maximum(view.number - shift - start[:, None], 0)
    hidden, cache = ask(score, request, queries, state.cache, outputs, widths=widths)
    kind = jnp.where(whole & policy.keeps, REFRESH, DENOISE)
    counts = state.counts.add(kind, stop - start, live)
    state = state.replace(cache=cache, counts=counts, age=jnp.where(whole, 1, state.age + 1),
                          due=jnp.zeros_like(due)).tally(
                              groups=live, reuse=live & whole & policy.keeps)
    return Reading(hidden, view.wanted & (view.number - shift < stop[:, None])), state
