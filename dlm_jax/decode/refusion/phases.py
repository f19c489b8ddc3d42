"""What each phase of a ReFusion row makes of a forward, and where the row goes from there.

Every function concerns the rows in its phase and leaves the others as they are. Layouts are told apart as in `state`.

Letters: B batch, n slots of a block, k slot size.

Source: "ReFusion", Sec. 4.2, A.2, B.1.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dlm_jax.decode.canvas import AUTOREGRESSIVE, DRAFTED, scatter
from dlm_jax.decode.refusion import rules
from dlm_jax.decode.refusion.forward import Read
from dlm_jax.decode.refusion.state import (
    COMMITTED, FRESH, INFILL_MANY, INFILL_ONE, JUDGE, PLAN, RECOMPUTE, REDRAFT, REJUDGE, State, open_slots, window)
from dlm_jax.decode.request import Request


def plan(state: State, read: Read, slot_chosen: Array, slot_first_accepted: Array) -> State:
    """Takes the drafts of every open slot, and which slots are gone on with.

    Args:
      state, read: before, and what the forward said.
      slot_chosen: (B, n) bool.
      slot_first_accepted: (B, n) bool verdict on each draft's first token, which no later forward judges.
    """
    row = state.at(PLAN)
    slot, token = row[:, None], row[:, None, None]
    first = jnp.arange(state.draft.shape[2]) == 0
    return state.replace(
        draft=jnp.where(token & state.slot_open[..., None], read.token, state.draft),
        origin=jnp.where(token, DRAFTED, state.origin),
        tagged=jnp.where(token, slot_chosen[..., None] & first, state.tagged),
        slot_chosen=jnp.where(slot, slot_chosen, state.slot_chosen),
        slot_first_accepted=jnp.where(slot, slot_first_accepted, state.slot_first_accepted),
        slot_pending=jnp.where(slot, -1, state.slot_pending),
        canvas_rank=jnp.where(slot & (state.canvas_rank == FRESH), COMMITTED, state.canvas_rank))


def judge(state: State, accepted: Array, eos_id: Array, common: bool) -> tuple[State, Array]:
    """Finds the accepted prefix of the chosen drafts laid end to end, else tags what each slot has of its own.

    Args:
      state: before.
      accepted: (B, n, k) bool verdict on every draft but the slots' first.
      eos_id: () int32.
      common: whether slots are cut to the length that all of them have (Eq. 7).

    Returns:
      The state, and (B, n, k) bool tokens to commit: whole slots, or those up to an EOS; none where a row refines.
    """
    row, chosen, is_eos = state.at(JUDGE), state.slot_chosen, state.draft == eos_id
    run = rules.accepted_run(accepted.at[..., 0].set(state.slot_first_accepted), chosen)
    ends = jnp.any(run & is_eos, axis=(1, 2))[:, None, None]
    full = jnp.all(run, axis=-1, keepdims=True)
    prefix = run & jnp.where(ends, rules.through_first(run & is_eos), full) & row[:, None, None]
    own = rules.slot_runs(accepted, chosen)
    if common:
        own &= jnp.arange(own.shape[2]) < rules.common_length(own, chosen)[:, None, None]
    refines = (row & ~jnp.any(prefix, axis=(1, 2)))[:, None, None]
    return state.replace(tagged=jnp.where(refines, own, state.tagged)), prefix


def infill(state: State, read: Read, eos_id: Array) -> State:
    """Takes one more token in every chosen slot that is not complete; `eos_id` is () int32."""
    slot_length = jnp.sum(state.tagged, axis=-1)
    behind = jnp.maximum(slot_length - 1, 0)[..., None]
    slot_new = jnp.where(state.at(INFILL_MANY)[:, None], jnp.take_along_axis(read.token, behind, axis=-1)[..., 0],
                         read.slot_token)
    slot_grows = state.at(INFILL_MANY, INFILL_ONE)[:, None] & state.slot_chosen & ~_slot_complete(state, eos_id)
    grow = slot_grows[..., None] & (jnp.arange(state.draft.shape[2]) == slot_length[..., None])
    return state.replace(
        draft=jnp.where(grow, slot_new[..., None], state.draft),
        origin=jnp.where(grow, AUTOREGRESSIVE, state.origin),
        tagged=state.tagged | grow)


def redraft(state: State, read: Read, accepted: Array) -> State:
    """Takes new drafts of the rejected tails, or the verdict on them: at least one token more in every slot.

    Args:
      state, read: before, and what the forward said.
      accepted: (B, n, k) bool verdict on every draft but the slots' first.
    """
    rejected = state.at(REDRAFT)[:, None, None] & state.slot_chosen[..., None] & ~state.tagged
    forced = jnp.roll(state.tagged, 1, axis=-1).at[..., 0].set(True)
    runs = rules.slot_runs(accepted | forced, state.slot_chosen)
    return state.replace(draft=jnp.where(rejected, read.token, state.draft),
                         tagged=jnp.where(state.at(REJUDGE)[:, None, None], runs, state.tagged))


def settle(state: State, rows: Array, eos_id: Array) -> tuple[State, Array]:
    """Drops the chosen slots behind an EOS.

    Args:
      state: before.
      rows: (B,) bool that were refined by this forward.
      eos_id: () int32.

    Returns:
      The state, and (B,) bool which of the rows have every chosen slot complete.
    """
    chosen = state.slot_chosen
    slot_ends = jnp.any(state.tagged & (state.draft == eos_id), axis=-1) & chosen
    chosen = jnp.where(rows[:, None], rules.drop_after_eos(chosen, slot_ends), chosen)
    state = state.replace(slot_chosen=chosen, tagged=state.tagged & chosen[..., None])
    return state, rows & jnp.all(_slot_complete(state, eos_id) | ~chosen, axis=1)


def refined(state: State, rows: Array, eos_id: Array) -> Array:
    """Returns (B, n, k) bool: the tokens that (B,) refined rows commit, none behind an EOS."""
    return state.tagged & rules.through_first(state.tagged & (state.draft == eos_id)) & rows[:, None, None]


def commit(state: State, tokens: Array) -> State:
    """Writes tokens to the canvas.

    Args:
      state: before.
      tokens: (B, n, k) bool which of the block.
    """
    # the last token of an infilled slot was predicted but never fed: its key and value are still to come
    waits = state.at(INFILL_MANY, INFILL_ONE, PLAN)[:, None]
    slot_count = jnp.sum(tokens, axis=-1)
    slot_last = state.number()[..., 0] + slot_count - 1
    window_number, window_tokens = state.window_number(), window(tokens)
    return state.replace(
        canvas=state.canvas.commit(window_number, window_tokens, window(state.draft), window(state.origin),
                                   state.counts.after_prefill()),
        slot_pending=jnp.where(waits & (slot_count > 0), slot_last, state.slot_pending),
        canvas_rank=scatter(state.canvas_rank, window_number, window_tokens, jnp.where(waits, FRESH, COMMITTED)))


def close(request: Request, state: State, tokens: Array, slot_gone: Array, by_row: Array) -> State:
    """Closes slots, then opens the next block or ends the row.

    Args:
      request: the batch.
      state: before.
      tokens: (B, n, k) bool which of the block were committed now.
      slot_gone: (B, n) bool decoded together, lost where `by_row` holds.
      by_row: (B,) bool whether an EOS closes slots as the released code does, see `rules.closed_by_eos`.
    """
    n, k = state.draft.shape[1:]
    row = jnp.any(tokens, axis=(1, 2))
    slot_ends = jnp.any(tokens & (state.draft == request.eos_id), axis=-1)
    slot_closed = jnp.any(tokens, axis=-1) | rules.closed_by_eos(slot_ends, state.slot_open, slot_gone, by_row)
    slot_closed |= by_row[:, None] & slot_gone
    slot_open = state.slot_open & ~(slot_closed & row[:, None])
    eos_seen = state.eos_seen | jnp.any(slot_ends, axis=1)
    exhausted, more = row & ~jnp.any(slot_open, axis=1), open_slots(request, state.block + 1, n, k)
    done = state.done | (exhausted & (eos_seen | ~jnp.any(more, axis=1)))
    opens = exhausted & ~done
    return state.replace(slot_open=jnp.where(opens[:, None], more, slot_open), block=state.block + opens,
                         eos_seen=eos_seen, done=done)


def advance(state: State, committed: Array, recompute: Array, judges: bool, redrafts: bool) -> State:
    """Moves every row to its next phase.

    Args:
      state: before.
      committed: (B,) bool rows that committed now, which plan anew.
      recompute: (B,) bool rows that are complete but for a forward that gives them joint keys and values.
      judges: whether drafts are judged, or infilled at once.
      redrafts: whether rejected tails are drafted again, or infilled.
    """
    many = jnp.max(jnp.sum(state.tagged, axis=-1), axis=1) > 1
    phase = jnp.select(
        [committed, recompute, state.at(PLAN), state.at(JUDGE, REJUDGE), state.at(REDRAFT),
         state.at(INFILL_MANY, INFILL_ONE)],
        [PLAN, RECOMPUTE, JUDGE if judges else INFILL_ONE,
         REDRAFT if redrafts else jnp.where(many, INFILL_MANY, INFILL_ONE), REJUDGE, INFILL_ONE],
        state.phase)
    return state.replace(phase=phase, tagged=state.tagged & ~committed[:, None, None],
                         slot_chosen=state.slot_chosen & ~committed[:, None])


def _slot_complete(state: State, eos_id: Array) -> Array:
    """Returns (B, n) bool: every token is tagged, or an EOS is."""
    return jnp.all(state.tagged, axis=-1) | jnp.any(state.tagged & (state.draft == eos_id), axis=-1)
