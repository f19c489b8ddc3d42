"""Lanes whose drafts a causal guide judges: FlashDLM's guided commit as a commit rule of AsyncLane.

The guide reads the text from the first unfinished lane to the frontier, every mask of a lane filled with its draft, and
keeps the keys and values of what lies before: those tokens are final since it last read them. A prefix that is
committed at its fork is read once more; where a lane runs out of steps, its last drafts stand in for the masks it
leaves.

Letters: B batch, N seats, R room of a lane, G canvas length.

Source: "FlashDLM", Sec. 3.2.2, Algorithm 1, for each lane by itself.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.asynclane import lanes as table
from dlm_jax.decode.asynclane.forward import Windows
from dlm_jax.decode.asynclane.lanes import Seats
from dlm_jax.decode.asynclane.state import Rooms, State
from dlm_jax.decode.asynclane.transfer import Verdict
from dlm_jax.decode.canvas import scatter
from dlm_jax.decode.guided.acceptance import Acceptance, Exact, Proposal, Relaxed, Sure
from dlm_jax.decode.guided.model import GuidedScorer
from dlm_jax.decode.ledger import GUIDE
from dlm_jax.decode.masked.commit import CommitRule
from dlm_jax.decode.masked.confidence import Confidence
from dlm_jax.decode.masked.drafts import Clock, Drafts
from dlm_jax.decode.parts import Part
from dlm_jax.decode.queries import Queries, ask, prefill
from dlm_jax.decode.request import Request


@struct.dataclass
class GuideAgrees(Part, CommitRule):
    """A lane's drafts before the first that the guide turns down, and its first in any case; for `AsyncLane`.

    Attributes:
      accept: which drafts the guide agrees with: `Exact`, `TopK`, `Relative`, or one of your own.
    """

    accept: Acceptance = Exact()

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.accept, Relaxed | Sure):
            raise ValueError(f"accept = {self.accept!r} asks for all of the drafter's logits, which lanes do not keep: "
                             "take Exact(), TopK() or Relative()")

    def check(self, confidence: Confidence) -> None:
        """Raises ValueError: where another rule or decoder holds it, nobody asks the guide."""
        raise ValueError(f"commit holds {self!r}, whose guide AsyncLane alone asks, and only of its own rule: give "
                         "AsyncLane(commit=GuideAgrees()), or decode with Guided()")

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`: the first draft; `extended` adds what the guide agrees with."""
        del clock
        return drafts.eligible & (jnp.cumsum(drafts.eligible, axis=1) == 1)


def started(score: GuidedScorer, request: Request, state: State) -> State:
    """Returns the state with the guide's cache, which holds the prompt."""
    theirs = score.for_guide(request)
    _, cache, _ = prefill(score.guide, theirs)
    return state.replace(
        guide_cache=cache, counts=state.counts.add(GUIDE, theirs.prompt_length, request.max_new_tokens > 0))


def extended(score: GuidedScorer, request: Request, state: State, seats: Seats, view: Windows, verdict: Verdict,
             rule: GuideAgrees, rooms: Rooms) -> tuple[Verdict, State]:
    """Returns the verdict with what the guide agrees with, and the state with its cache and its forward.

    Args:
      score: both models.
      request: the batch.
      state: before the drafts are written.
      seats: the active lanes.
      view, verdict: their tokens and drafts.
      rule: of the guide.
      rooms: of the shapes.
    """
    theirs, G, own = score.for_guide(request), request.capacity, rooms.lanes * rooms.block
    number, tokens = view.number[:, :own], verdict.tokens[:, :own]
    masked = view.wanted[:, :own] & ~jnp.take_along_axis(state.filled, jnp.clip(number, 0, G - 1), axis=1)
    text = theirs.buffer(score.feed[scatter(state.tokens, number, masked, tokens)])
    begin = _unread(state, seats, G)[:, None]
    end = jnp.max(jnp.where(seats.active, seats.lane.stop, 0), axis=1)[:, None]
    read = begin - 1 + jnp.arange(G, dtype=jnp.int32)  # up to the token before each draft
    queries = Queries(jnp.take_along_axis(text, theirs.entry(read), axis=1), read, read < end - 1,
                      theirs.position(read))
    widths = tuple(sorted({min(2 * rooms.block, G), G}))
    hidden, cache = ask(score.guide, theirs, queries, state.guide_cache, jnp.maximum(number - begin, 0), widths=widths)
    agreed = masked & rule.accept.accepts(Proposal(tokens, None, score.guide.head(hidden), score.to_draft))
    known = state.filled | scatter(jnp.zeros_like(state.filled), number, agreed, True)
    reach = table.run_length(known, seats.lane.start, seats.lane.length)
    stop = jnp.repeat(seats.lane.start + reach, rooms.block, axis=1)
    writes = verdict.writes.at[:, :own].set(verdict.writes[:, :own] | (masked & (number < stop)))
    counts = state.counts.add(GUIDE, jnp.sum(queries.active, axis=1), ~state.done)
    return verdict.replace(writes=writes), state.replace(guide_cache=cache, counts=counts)


def _unread(state: State, seats: Seats, tokens: int) -> Array:
    """Returns (B,) int32 the first token that the guide must read: a lane's, or of a prefix that was just committed.

    Such a prefix may hold other tokens than the drafts which the guide last saw there.
    """
    lanes = state.lanes
    first = jnp.min(jnp.where(seats.active, seats.lane.start, tokens), axis=1)
    changed = (lanes.end == table.COMMIT) & (lanes.last == state.iteration[:, None] - 1)
    return jnp.minimum(first, jnp.min(jnp.where(changed, lanes.start, tokens), axis=1))
