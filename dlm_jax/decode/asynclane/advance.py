"""What becomes of the lanes after a forward: a lane forks, completes and is succeeded, stops, or goes on.

Letters: B batch, N seats, G canvas length.

Source: AsyncLane (arXiv 2606.08411), Secs. 3.2-3.3, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.asynclane import boundary
from dlm_jax.decode.asynclane import lanes as table
from dlm_jax.decode.asynclane.boundary import Classes
from dlm_jax.decode.asynclane.lanes import (
    ACTIVE, COMMIT, COMPLETE, DONE, EXHAUSTED, FORK, GENERATE, REFINE, SPAWN, STOP, WAITING, Seats)
from dlm_jax.decode.asynclane.state import FORCED, State
from dlm_jax.decode.request import Request

MODES = ("asynclane", "blockwise", "coupled", "commit_and_advance")
CONTINUATIONS = ("block", "remainder")
EOS_FRONTIERS = ("stop", "spawn")


@struct.dataclass
class Plan:
    """The numbers and kinds that say when a lane forks and what follows it; fields as of `AsyncLane`."""

    block_size: Any
    steps: Any
    rho_min: Any
    t_min: Any
    lane_capacity: Any
    mode: str = struct.field(pytree_node=False)
    continuation_length: str = struct.field(pytree_node=False)
    eos_frontier: str = struct.field(pytree_node=False)


def age(state: State, seats: Seats) -> State:
    """Returns the state with every active lane one forward older."""
    lanes = state.lanes
    row, number = jnp.arange(seats.number.shape[0])[:, None], jnp.where(seats.active, seats.number,
                                                                         lanes.role.shape[1])
    seen = jnp.zeros(lanes.role.shape, bool).at[row, number].set(True, mode="drop")
    now = state.iteration[:, None]
    active = jnp.sum(seats.active, axis=1)
    tallies = dict(state.counts.tallies)
    tallies["max_active"] = jnp.maximum(tallies["max_active"], active)
    return state.replace(
        counts=state.counts.replace(tallies=tallies),
        lanes=lanes.replace(step=lanes.step + seen, first=jnp.where(seen & (lanes.first == 0), now, lanes.first)))


def refine(state: State, plan: Plan) -> State:
    """Returns the state after lanes that refine are done: complete, or their steps at an end."""
    lanes = state.lanes
    candidates = (lanes.state == ACTIVE) & (lanes.role == REFINE) & (lanes.first > 0) & ~state.done[:, None]
    full = table.run_length(state.filled, lanes.start, lanes.length) >= lanes.length
    over = candidates & (full | (lanes.step >= budget(plan)))
    wakes = jnp.zeros_like(over)
    if plan.mode == "coupled":  # the continuation, the next lane of the table, has waited for this one
        wakes = (lanes.state == WAITING) & jnp.pad(over, ((0, 0), (1, 0)))[:, :-1]
    return state.replace(lanes=lanes.replace(
        state=jnp.where(over, DONE, jnp.where(wakes, ACTIVE, lanes.state)),
        end=jnp.where(over, jnp.where(full, COMPLETE, EXHAUSTED), lanes.end),
        last=jnp.where(over, state.iteration[:, None], lanes.last)))


def budget(plan: Plan) -> Array:
    """Returns () int32 steps that a lane may take."""
    return jnp.where(plan.steps > 0, plan.steps, plan.block_size)


@struct.dataclass
class Turn:
    """What the lane that generates does at the end of an iteration; every array (B,).

    Attributes:
      number, start, length: int32 of the lane.
      prefix: int32 tokens before its boundary, 0 for none. reach: int32 tokens before its first mask or end (Eq. 9).
      splits: bool, it hands its prefix over. refused: bool, it would, but there is no room.
      stops: bool, it completes and the answer ends. spawns: bool, it completes and is succeeded.
    """

    number: Array
    start: Array
    length: Array
    prefix: Array
    reach: Array
    splits: Array
    refused: Array
    stops: Array
    spawns: Array


def turn(request: Request, state: State, seats: Seats, plan: Plan, classes: Classes) -> Turn:
    """Decides whether the lane that generates forks, is succeeded, stops or goes on.

    Args:
      request: the batch.
      state: after the forward, its lanes one step older.
      seats: the lanes that were active in it.
      plan: when lanes fork and how they go on.
      classes: of the boundary.
    """
    number, here = seats.number[:, 0], seats.generates
    lane = state.lanes.take(number[:, None])
    start, length, step = (x[:, 0] for x in (lane.start, lane.length, lane.step))
    filled, ends = state.filled, state.ends(request, classes)
    at = lambda flag, place: jnp.take_along_axis(
        flag, jnp.minimum(place, request.capacity - 1)[:, None], axis=1)[:, 0] & (place < request.max_new_tokens)
    halts = lambda place: at(ends, place) & (plan.eos_frontier == "stop")

    index = jnp.arange(request.capacity, dtype=jnp.int32)
    count = jnp.sum(filled & (index >= start[:, None]) & (index < (start + length)[:, None]), axis=1)
    prefix = _split(request, state, plan, classes, filled, ends, start, length)
    # counts are whole, so the slack only keeps float32 from refusing an equal share
    ready = here & (prefix > 0) & (count + 1e-4 >= plan.rho_min * length) & (step >= plan.t_min)
    ready &= (start + prefix < request.max_new_tokens) & ~halts(start + prefix)
    unfinished = jnp.sum((state.lanes.state == ACTIVE) | (state.lanes.state == WAITING), axis=1)
    splits = ready & ((unfinished + 1 <= plan.lane_capacity) | (plan.mode == "commit_and_advance"))

    completes = here & ~splits & ((count >= length) | (step >= budget(plan)))
    reach = table.run_length(filled & ~ends, start[:, None], length[:, None])[:, 0]
    stops = completes & ((reach == 0) | (start + reach >= request.max_new_tokens) | halts(start + reach))
    return Turn(number, start, length, prefix, reach, splits, ready & ~splits, stops, completes & ~stops)


def generate(request: Request, state: State, taken: Turn, plan: Plan, forced: Array) -> State:
    """Returns the state after the lane that generates has forked, been succeeded, stopped or gone on.

    Args:
      request: the batch.
      state: after the forward.
      taken: its turn.
      plan: how lanes go on.
      forced: (B, G) int32 tokens that a fork which commits its prefix writes on masks.
    """
    splits, commits = taken.splits, plan.mode == "commit_and_advance"
    goes = taken.start + jnp.where(splits, taken.prefix, taken.reach)
    if commits:
        index = jnp.arange(request.capacity, dtype=jnp.int32)
        fill = splits[:, None] & (index >= taken.start[:, None]) & (index < goes[:, None]) & ~state.filled
        state = state.replace(
            tokens=jnp.where(fill, forced, state.tokens), origin=jnp.where(fill, FORCED, state.origin),
            writer=jnp.where(fill, taken.number[:, None], state.writer)).tally(commits=jnp.sum(fill, axis=1))
    state = state.replace(lanes=state.lanes.put(
        taken.number, splits | taken.stops | taken.spawns, state=jnp.full_like(goes, DONE), last=state.iteration,
        end=jnp.select([splits, taken.stops], [COMMIT if commits else FORK, STOP], SPAWN),
        valid=jnp.where(splits, taken.prefix * commits, taken.reach)))
    if not commits:
        state = _add(state, splits, taken.number, REFINE, taken.start, taken.prefix, ACTIVE, new_event=True)
    length = jnp.minimum(plan.block_size, request.max_new_tokens - goes)
    if plan.continuation_length == "remainder":
        length = jnp.where(splits & (taken.prefix < taken.length), taken.length - taken.prefix, length)
    kind = jnp.where(splits & (plan.mode == "coupled"), WAITING, ACTIVE)
    state = _add(state, splits | taken.spawns, taken.number, GENERATE, goes, length, kind,
                 new_event=taken.spawns | commits)
    return state.replace(refused=jnp.where(taken.refused, taken.prefix, 0)).tally(
        forks_refused=taken.refused, **{"splits" if commits else "fork_pairs": splits})


def _split(request, state, plan, classes, filled, ends, start, length) -> Array:
    """Returns (B,) int32 the prefix at which the lane that generates may be split, 0 for none."""
    if plan.mode == "blockwise":
        return jnp.zeros_like(start)
    candidates = boundary.valid(classes, request, state.tokens, filled)
    return boundary.split(classes, candidates, filled, ends, start, length)


def _add(state: State, where: Array, parent: Array, role: int, start: Array, length: Array, kind: Array | int,
         new_event: Array | bool) -> State:
    """Returns the state with one lane more in the rows where it is made."""
    group = state.group + (where & new_event)
    fill = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), parent.shape)
    lanes = state.lanes.put(state.count, where, role=fill(role), start=start, length=length, parent=parent,
                            group=group, state=fill(kind))
    return state.replace(lanes=lanes, group=group, count=state.count + where)
