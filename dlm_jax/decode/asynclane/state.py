"""What an AsyncLane row carries from iteration to iteration.

Letters: B batch, M lanes of a table, G canvas length, S = P + G buffer entries.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.asynclane import lanes as table
from dlm_jax.decode.asynclane.boundary import Classes
from dlm_jax.decode.asynclane.lanes import Lanes
from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.ledger import Counts
from dlm_jax.decode.request import Request, bucket
from dlm_jax.scoring import Cache

NOTHING, CHOSEN, AHEAD, FORCED = -1, 0, 1, 2  # how a token came to be written: by the rule, as a draft, at a fork

TALLIES = ("iterations", "groups", "reuse", "lane_forwards", "fork_pairs", "splits", "forks_refused", "drafts",
           "commits", "eos_suppressed", "max_active")


@dataclasses.dataclass(frozen=True)
class Rooms:
    """Shapes of the compiled step, each as large as the numbers of a decoder need and no more than a bucket larger.

    Attributes:
      block: tokens of a lane at most.
      ahead: tokens of a lookahead window at most.
      lanes: N, lanes at once at most.
    """

    block: int
    ahead: int
    lanes: int

    @classmethod
    def of(cls, block_size: int, lookahead: int, lane_capacity: int) -> "Rooms":
        """Returns the rooms for a decoder's numbers."""
        return cls(bucket(block_size, least=8), bucket(lookahead, least=8) if lookahead else 0,
                   1 << (lane_capacity - 1).bit_length())

    def holds(self, other: "Rooms") -> bool:
        """Whether they are as large as others."""
        return self.block >= other.block and self.ahead >= other.ahead and self.lanes >= other.lanes

    def within(self, capacity: int) -> "Rooms":
        """Returns the rooms on a canvas of that length."""
        return Rooms(min(self.block, capacity), min(self.ahead, capacity), min(self.lanes, capacity))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of seats that have a program of their own, ascending."""
        return tuple(sorted({self.lanes, *(1 << i for i in range(self.lanes.bit_length()))}))


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: what lanes are certain to put out, whatever is still to come.
      tokens: (B, G) int32 the sequence that lanes work on, drafts ahead included; the mask where nothing is.
      origin: (B, G) int32 `CHOSEN`, `AHEAD`, `FORCED` or `NOTHING`. writer: (B, G) int32 lane that wrote it, or -1.
      reached: (B, G) int32 forward after prefill since which it is a lane's own, written and no draft ahead, or -1.
      lanes: the table. count: (B,) int32 lanes made. group: (B,) int32 events that made lanes, the first not counted.
      iteration: (B,) int32 of the last step. refused: (B,) int32 prefix that it did not fork at for want of room, or 0.
      age: (B,) int32 forwards since the last full pass, it included; of caches that are not the lanes' own.
      due: (B,) bool rows whose next forward is a full pass; of the same.
      done: (B,) bool.
      cache, guide_cache: the model's (None where it keeps nothing) and its guide's, where it has one.
    """

    canvas: Canvas
    tokens: Array
    origin: Array
    writer: Array
    reached: Array
    lanes: Lanes
    count: Array
    group: Array
    iteration: Array
    refused: Array
    age: Array
    due: Array
    done: Array
    cache: Cache | None
    counts: Counts
    guide_cache: Cache | None = None

    @property
    def filled(self) -> Array:
        """(B, G) bool tokens that are written."""
        return self.origin != NOTHING

    def ends(self, request: Request, classes: Classes) -> Array:
        """Returns (B, G) bool, the written tokens that end an answer."""
        return self.filled & classes.ends(self.tokens, request.eos_id)

    def known(self, request: Request, classes: Classes) -> Array:
        """Returns (B, G) bool, the tokens that are neither masks nor ends (Eq. 9)."""
        return self.filled & ~self.ends(request, classes)

    def tally(self, **amounts: Array) -> "State":
        """Adds (B,) amounts to the counts of those names."""
        found = dict(self.counts.tallies)
        for name, amount in amounts.items():
            found[name] = found[name] + amount.astype(jnp.int32)
        return self.replace(counts=self.counts.replace(tallies=found))


def start(request: Request, block_size: Array, cache: Cache | None) -> State:
    """Returns the state before the first iteration: masks, and the lane, blocks of () int32 tokens, that begins."""
    B, G = request.batch, request.capacity
    zero, nothing = jnp.zeros(B, jnp.int32), jnp.full((B, G), NOTHING, jnp.int32)
    canvas, active = Canvas.empty(request), request.max_new_tokens > 0
    counts = Counts.zeros(B).replace(tallies={name: zero for name in TALLIES})
    return State(
        canvas=canvas, tokens=canvas.tokens, origin=nothing, writer=nothing, reached=nothing,
        lanes=table.Lanes.root(request.max_new_tokens, block_size, G), count=active.astype(jnp.int32), group=zero,
        iteration=zero, refused=zero, age=zero, due=active, done=~active, cache=cache, counts=counts)
