"""The one forward of a ReFusion step: what each phase asks of the model, and what the model answers.

A row has n tails, one query a slot, and behind them the window of its block. Infilling token by token needs the tails
alone, so a batch that only infills runs n queries a row.

Letters: B batch, n slots of a block, k slot size, W = n * k block length, G generation capacity, S cache entries,
Q = n + W queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.canvas import scatter
from dlm_jax.decode.queries import Keys, Queries, ask
from dlm_jax.decode.refusion.state import (
    COMMITTED, FRESH, INFILL_MANY, INFILL_ONE, JUDGE, KIND, PLAN, RECOMPUTE, REDRAFT, State, window)
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Scorer


@struct.dataclass
class Read:
    """What the model answered; what a row's phase did not ask for is anything.

    Attributes:
      token: (B, n, k) int32 drawn from the logits at each place of the block. confidence: (B, n, k) its probability.
      of_draft: (B, n, k) probability of each draft by the logits of the token before it; nothing of a slot's first.
      slot_token: (B, n) int32 drawn from the logits of each slot's tail.
    """

    token: Array
    confidence: Array
    of_draft: Array
    slot_token: Array


def run(score: Scorer, request: Request, state: State, sampler: Sampler, *, tails: bool, compat: bool
        ) -> tuple[Read, State]:
    """Runs the model over every row's queries.

    Args:
      score: the model.
      request: the batch.
      state: of the rows.
      sampler: of tokens.
      tails: whether rows ever infill by their tails alone.
      compat: whether a mask counts as an answer and redrafts are greedy, as in the released code.

    Returns:
      The answers, and the state with the forward's keys, values and counts.
    """
    B, n, k = state.draft.shape
    queries = _queries(request, state)
    # a row wants the outputs of its window, or of its tails
    place = jnp.arange(n * k, dtype=jnp.int32)
    wanted = jnp.where((state.phase == INFILL_ONE)[:, None], jnp.minimum(place, n - 1), n + place)
    hidden, cache = ask(score, request, queries, state.cache, wanted, keys=_keys(request, state, queries),
                        widths=(n, n + n * k) if tails else None)
    wanted_number = jnp.take_along_axis(queries.number, wanted, axis=1)
    window_following = window(jnp.roll(state.draft, -1, axis=-1))

    def read(count):
        logits = score.head(hidden[:, :count])
        if not compat:  # a mask is no answer
            logits = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)
        keys = sampling.draw_keys(request.keys, state.counts.after_prefill(), wanted_number[:, :count])
        token = sampler.draw(logits, keys)
        if compat:  # the released code redrafts greedily at any temperature
            token = jnp.where((state.phase == REDRAFT)[:, None], sampling.likeliest(logits), token)
        total = jax.nn.logsumexp(logits, axis=-1)
        probability = lambda ids: jnp.exp(jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - total)
        found = token, probability(token), probability(window_following[:, :count])
        return tuple(jnp.pad(x, ((0, 0), (0, n * k - count))) for x in found)

    if tails:
        found = jax.lax.cond(jnp.any(queries.active[:, n:]), lambda: read(n * k), lambda: read(n))
    else:
        found = read(n * k)
    token, confidence, following = (x.reshape(B, n, k) for x in found)
    counts = state.counts.add(jnp.array(KIND)[state.phase], jnp.sum(queries.active, axis=1), ~state.done)
    return (Read(token, confidence, jnp.roll(following, 1, axis=-1), found[0][:, :n]),
            state.replace(cache=cache, counts=counts))


def _queries(request: Request, state: State) -> Queries:
    """Returns each row's tails and window, as its phase has them."""
    B, n, k = state.draft.shape
    phase, number = state.phase[:, None, None], state.number()
    whole = jnp.broadcast_to(state.slot_chosen[..., None], (B, n, k))
    active = jnp.select(
        [phase == PLAN, (phase == INFILL_MANY) | (phase == RECOMPUTE), phase == INFILL_ONE],
        [jnp.broadcast_to(state.slot_open[..., None], (B, n, k)), whole & state.tagged, jnp.zeros_like(whole)],
        whole) & ~state.done[:, None, None]
    masked = (phase == PLAN) | ((phase == REDRAFT) & ~state.tagged)

    # a tail is the newest token of a slot that is infilled, or a committed one that was never fed
    infill = (state.phase == INFILL_ONE)[:, None]
    slot_newest = jnp.maximum(jnp.sum(state.tagged, axis=-1) - 1, 0)
    slot_pending = jnp.maximum(state.slot_pending, 0)
    slot_number = jnp.where(infill, number[..., 0] + slot_newest, slot_pending)
    slot_token = jnp.where(infill, jnp.take_along_axis(state.draft, slot_newest[..., None], axis=-1)[..., 0],
                           jnp.take_along_axis(state.canvas.tokens, slot_pending, axis=1))
    slot_active = jnp.where(infill, state.slot_chosen, state.slot_pending >= 0) & ~state.done[:, None]

    join = lambda slots, tokens: jnp.concatenate([slots, window(tokens)], axis=1)
    queried = join(slot_number, number)
    return Queries(
        tokens=join(slot_token, jnp.where(masked, request.mask_id, state.draft)),
        number=queried,
        active=join(slot_active, active),
        limit=join(jnp.full_like(slot_number, COMMITTED), jnp.full_like(number, FRESH)),
        group=join(slot_number // k, _group(request, state)),
        order=queried)


def _group(request: Request, state: State) -> Array:
    """Returns the (B, n, k) group of the block's tokens: one for all that are read jointly, else their slot's."""
    joint = jnp.isin(state.phase, jnp.array((PLAN, JUDGE, RECOMPUTE)))[:, None, None]
    return jnp.where(joint, request.capacity, state.number() // state.draft.shape[2])  # no slot has that number


def _keys(request: Request, state: State, queries: Queries) -> Keys:
    """Returns committed keys by rank and drafts by group: jointly, or slot by slot while infilling."""
    B, n, k = state.draft.shape
    infilling = jnp.isin(state.phase, jnp.array((INFILL_MANY, INFILL_ONE)))[:, None, None]
    window_seen = queries.active[:, n:] | window(infilling & state.slot_chosen[..., None] & state.tagged)
    canvas_group = scatter(jnp.full_like(state.canvas_rank, vis.NONE), state.window_number(), window_seen,
                           window(_group(request, state)))
    canvas_slot = jnp.arange(request.capacity, dtype=jnp.int32) // k
    canvas_group = jnp.where((canvas_group < 0) & (state.canvas_rank == FRESH), canvas_slot, canvas_group)
    number = request.numbers()
    prompt = lambda value: jnp.broadcast_to(value, (B, request.prompt_capacity)).astype(jnp.int32)
    rank = prompt(jnp.where(number[:, : request.prompt_capacity] < 0, COMMITTED, vis.NONE))
    join = lambda before, canvas: jnp.concatenate([before, canvas], axis=1)
    return Keys(join(rank, state.canvas_rank), join(prompt(vis.NONE), canvas_group), number)
