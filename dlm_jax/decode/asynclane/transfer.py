"""Lane-local denoising: what each lane's outputs draft, and which drafts it writes.

Letters: B batch, N seats, n of them that are taken, R room of a lane, A room ahead, C = N R + A outputs, V vocabulary.

Source: AsyncLane (arXiv 2606.08411), Sec. 3.2, Eq. 8.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import parts, sampling
from dlm_jax.decode.asynclane.boundary import Classes
from dlm_jax.decode.asynclane.forward import Reading, Windows
from dlm_jax.decode.asynclane.lanes import REFINE, Seats
from dlm_jax.decode.asynclane.state import AHEAD, CHOSEN, Rooms, State
from dlm_jax.decode.canvas import scatter
from dlm_jax.decode.masked import commit
from dlm_jax.decode.masked.commit import CommitRule
from dlm_jax.decode.masked.confidence import Confidence
from dlm_jax.decode.masked.drafts import Clock, Drafts
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Scorer


@struct.dataclass
class Rules:
    """The parts of the decoder that a transfer asks.

    Attributes:
      commit, confidence, sampler: see `AsyncLane`.
      budget: () int32 forwards that a lane may take.
      future: () float32 threshold of drafts ahead.
      forces: whether the tokens that a fork would commit at once are drawn, static.
    """

    commit: CommitRule
    confidence: Confidence
    sampler: Sampler
    budget: Any
    future: Any
    forces: bool = struct.field(pytree_node=False)


@struct.dataclass
class Verdict:
    """What becomes of the outputs; every array (B, C).

    Attributes:
      tokens: int32 drafts.
      writes: bool, which of them are written: by the commit rule, or as drafts ahead.
      unending: int32 drafts of the lane that generates, ends of an answer left out.
      suppressed: bool, drafts of lanes that refine in whose place the model would have ended the answer.
    """

    tokens: Array
    writes: Array
    unending: Array
    suppressed: Array


def judge(score: Scorer, request: Request, state: State, seats: Seats, view: Windows, reading: Reading, rules: Rules,
          rooms: Rooms, classes: Classes) -> Verdict:
    """Drafts the tokens of all lanes and chooses those to write; the vocabulary is read for taken seats alone.

    Args:
      score: the model.
      request: the batch.
      state: before the drafts are written.
      seats: the active lanes.
      view, reading: their tokens and the model's answers.
      rules: of the decoder.
      rooms: of the shapes.
      classes: tells tokens that end an answer.
    """
    N, R = rooms.lanes, rooms.block

    def of(count):
        keep = lambda x: jnp.concatenate([x[:, : count * R], x[:, N * R :]], axis=1)
        gap = lambda x: jnp.pad(x, ((0, 0), (0, (N - count) * R)))
        part = jax.tree.map(lambda x: x[:, :count], seats)
        found = _judged(score, request, state, part, keep(view.number), keep(reading.hidden), keep(reading.wanted),
                        rules, rooms, classes)
        return jax.tree.map(lambda x: jnp.concatenate([gap(x[:, : count * R]), x[:, count * R :]], axis=1), found)

    taken = jnp.max(jnp.sum(seats.active, axis=1))
    branches = [lambda count=count: of(count) for count in rooms.counts]
    return jax.lax.switch(jnp.sum(taken > jnp.array(rooms.counts[:-1], jnp.int32)), branches)


def _judged(score, request, state, seats, number, hidden, wanted, rules, rooms, classes) -> Verdict:
    B, n = seats.active.shape
    R, ids = rooms.block, classes.ending(request.eos_id)
    refines = jnp.repeat(seats.active & (seats.lane.role == REFINE), R, axis=1)
    refines = jnp.pad(refines, ((0, 0), (0, rooms.ahead)))
    raw = score.head(hidden)
    logits = jnp.where(refines[..., None] & ids, -jnp.inf, raw)
    answers = jnp.where(jnp.arange(raw.shape[-1]) == request.mask_id, -jnp.inf, logits)  # a mask is no answer
    unending = jnp.where(ids, -jnp.inf, answers)
    keys = sampling.draw_keys(request.keys, state.counts.after_prefill(), number)
    draws, ties = (jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, use)))(keys) for use in (0, 1))
    tokens = rules.sampler.draw(answers, draws)
    at = lambda x: jnp.take_along_axis(x, jnp.clip(number, 0, request.capacity - 1), axis=1)
    eligible = wanted & ~at(state.filled)
    drafts = Drafts(tokens, logits, eligible, number, ties, rules.sampler, rules.confidence)
    sure = parts.shaped(rules.confidence, "of", rules.confidence.of(drafts), number.shape)
    sure = jnp.where(eligible, sure, -jnp.inf)

    # a rule sees each lane as a row of its own
    own = lambda x: x[:, : n * R].reshape(B * n, R, *x.shape[2:])
    confidence = own(sure)
    lanes = Drafts(own(tokens), own(logits), own(eligible), own(number), own(ties), rules.sampler, rules.confidence,
                   confidence, confidence)
    flat = lambda x: x.reshape(-1)
    clock = Clock(flat(seats.lane.step), jnp.zeros(B * n, jnp.int32), lanes.count, flat(seats.lane.length), R)
    chosen = commit.chosen(rules.commit, lanes, clock)
    # a lane that ends without a token ends the answer: what a rule has waited for all its life is written with its last
    idle = (clock.step + 1 >= rules.budget) & ~jnp.any(chosen, axis=1)
    chosen = (chosen | (idle[:, None] & lanes.eligible)).reshape(B, n * R)
    ahead = slice(n * R, None)
    certain = eligible[:, ahead] & (sure[:, ahead] >= rules.confidence.level(rules.future)) & ~ids[tokens[:, ahead]]
    wished = refines & (jnp.max(jnp.where(ids, raw, -jnp.inf), axis=-1) > jnp.max(unending, axis=-1))
    return Verdict(tokens, jnp.concatenate([chosen, certain], axis=1),
                   sampling.likeliest(unending) if rules.forces else tokens, wished)


def write(state: State, seats: Seats, view: Windows, verdict: Verdict, rooms: Rooms) -> State:
    """Returns the state with the chosen tokens and drafts written, by whom, and counted.

    Args:
      state: before.
      seats: the active lanes.
      view, verdict: their tokens, and what becomes of them.
      rooms: of the shapes.
    """
    ahead = jnp.arange(view.number.shape[1]) >= rooms.lanes * rooms.block
    spread = jnp.concatenate([jnp.repeat(seats.number, rooms.block, axis=1),
                              jnp.repeat(seats.number[:, :1], rooms.ahead, axis=1)], axis=1)
    put = lambda into, values: scatter(into, view.number, verdict.writes, values)
    count = lambda where: jnp.sum(verdict.writes & where, axis=1)
    return state.replace(
        tokens=put(state.tokens, verdict.tokens), writer=put(state.writer, spread),
        origin=put(state.origin, jnp.where(ahead, AHEAD, CHOSEN)),
    ).tally(commits=count(~ahead), drafts=count(ahead), eos_suppressed=count(verdict.suppressed))
