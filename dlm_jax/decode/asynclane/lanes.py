"""The lane table: which stretch of an answer is denoised by whom, as arrays of a fixed size.

Lanes are numbered in order of creation and never leave the table. At most one unfinished lane generates, and it starts
behind all others; the stretches of unfinished lanes are disjoint; lanes that refine have no children. So the tree is a
spine, its depth-first order is the order of positions, and a canvas of G tokens has room for 2 G lanes at most.

Letters: B batch, M lanes of a table, N lanes at once, G canvas length.

Source: AsyncLane (arXiv 2606.08411), Eqs. 1, 6, 9, 10 and Algorithm 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

ROLES = ("gen", "ref")
GENERATE, REFINE = range(len(ROLES))
STATES = ("empty", "active", "waiting", "done")
EMPTY, ACTIVE, WAITING, DONE = range(len(STATES))
ENDS = ("open", "fork", "spawn", "commit", "stop", "complete", "exhausted")
OPEN, FORK, SPAWN, COMMIT, STOP, COMPLETE, EXHAUSTED = range(len(ENDS))


@struct.dataclass
class Lanes:
    """Lanes, one a column; every array (B, M) int32.

    Attributes:
      role: index into `ROLES`.
      start, length: the tokens [start, start + length) that the lane may write.
      step: forwards that it has seen, its own clock.
      parent: number of the lane that it comes of, -1 for the first.
      group: number of the event that made it; both lanes of a fork have the same.
      state: index into `STATES`.
      end: how it ended, index into `ENDS`.
      valid: tokens that were final when it ended (Eq. 9), 0 where it forked.
      first, last: first iteration that it saw, and the one that ended it; 0 for none.
    """

    role: Array
    start: Array
    length: Array
    step: Array
    parent: Array
    group: Array
    state: Array
    end: Array
    valid: Array
    first: Array
    last: Array

    @classmethod
    def root(cls, tokens: Array, block_size: Array, capacity: int) -> "Lanes":
        """Returns a table with the first lane of every row.

        Args:
          tokens: (B,) int32 answer lengths.
          block_size: () int32.
          capacity: G.
        """
        zero = jnp.zeros((tokens.shape[0], 2 * capacity), jnp.int32)
        table = cls(*(zero,) * len(cls.__dataclass_fields__))
        first = jnp.zeros_like(tokens)
        return table.put(first, tokens > 0, length=jnp.minimum(block_size, tokens), parent=first - 1,
                         state=first + ACTIVE)

    def take(self, number: Array) -> "Lanes":
        """Returns the lanes of (B, N) numbers as a table of N columns."""
        return jax.tree.map(lambda x: jnp.take_along_axis(x, jnp.clip(number, 0, x.shape[1] - 1), axis=1), self)

    def put(self, number: Array, where: Array, **values: Array) -> "Lanes":
        """Returns the table with fields of one lane a row replaced.

        Args:
          number: (B,) int32.
          where: (B,) bool rows in which it is.
          values: field -> (B,) int32.
        """
        here = (jnp.arange(self.role.shape[1]) == number[:, None]) & where[:, None]
        return self.replace(**{
            name: jnp.where(here, value[:, None], getattr(self, name)) for name, value in values.items()})

    @property
    def made(self) -> Array:
        """(B, M) bool, the columns that hold a lane."""
        return self.state != EMPTY

    @property
    def stop(self) -> Array:
        """(B, M) int32 number behind each lane's last token."""
        return self.start + self.length


@struct.dataclass
class Seats:
    """The active lanes of every row: the one that generates first, where there is one, then the others by number.

    Attributes:
      number: (B, N) int32 of the lane.
      active: (B, N) bool, the seats that are taken.
      lane: those lanes, N columns; an empty seat's are anything.
    """

    number: Array
    active: Array
    lane: Lanes

    @property
    def generates(self) -> Array:
        """(B,) bool, whether the first seat's lane generates."""
        return self.active[:, 0] & (self.lane.role[:, 0] == GENERATE)


def seats(lanes: Lanes, live: Array, count: int) -> Seats:
    """Seats the active lanes.

    Args:
      lanes: the table.
      live: (B,) bool rows that are not done.
      count: N; no row has more active lanes.
    """
    active = (lanes.state == ACTIVE) & live[:, None]
    generates = active & (lanes.role == GENERATE)
    refines = active & ~generates
    place = jnp.where(generates, 0, jnp.cumsum(refines, axis=1) - 1 + jnp.any(generates, axis=1, keepdims=True))
    row, place = jnp.arange(active.shape[0])[:, None], jnp.where(active, place, count)
    index = jnp.broadcast_to(jnp.arange(active.shape[1], dtype=jnp.int32), active.shape)
    number = jnp.zeros((active.shape[0], count), jnp.int32).at[row, place].set(index, mode="drop")
    taken = jnp.arange(count) < jnp.sum(active, axis=1)[:, None]
    return Seats(number, taken, lanes.take(number))


def next_unset(known: Array) -> Array:
    """Returns (B, G + 1) int32: the first index from each on where (B, G) `known` does not hold, G for none."""
    G = known.shape[1]
    index = jnp.where(known, G, jnp.arange(G, dtype=jnp.int32))
    index = jnp.concatenate([index, jnp.full_like(index[:, :1], G)], axis=1)
    return jax.lax.cummin(index, axis=1, reverse=True)


def run_length(known: Array, start: Array, length: Array) -> Array:
    """Returns (B, N) int32 how many tokens of each lane come before its first that is not known (Eq. 9).

    Args:
      known: (B, G) bool, tokens that are written and end nothing.
      start, length: (B, N) int32 of the lanes.
    """
    unset = next_unset(known)
    first = jnp.take_along_axis(unset, jnp.clip(start, 0, known.shape[1]), axis=1)
    return jnp.clip(first - start, 0, length)


def emitted(lanes: Lanes, filled: Array, ends: Array) -> tuple[Array, Array]:
    """Returns what the depth-first walk of the tree puts out; of lanes that go on, what it will in any case.

    A lane that passed its tokens on gives its final ones, a leaf those before its first mask, and one that generates no
    end token either. What a leaf gives, its children give as well, so nothing is ever taken back.

    Args:
      lanes: the table.
      filled: (B, G) bool tokens that are written.
      ends: (B, G) bool those of them that end an answer.

    Returns:
      (B, G) bool the tokens of the answer, and (B, G) bool the end token behind them, where there is one.
    """
    G = filled.shape[1]
    generates = lanes.role == GENERATE
    passed = (lanes.end == SPAWN) | (lanes.end == COMMIT)
    leaf = generates & ~passed & (lanes.end != FORK)
    own = run_length(filled & ~ends, lanes.start, lanes.length)
    count = jnp.select([~lanes.made | (lanes.end == FORK), generates & passed, generates],
                       [jnp.zeros_like(own), lanes.valid, own], run_length(filled, lanes.start, lanes.length))
    row = jnp.arange(filled.shape[0])[:, None]
    edge = jnp.zeros((filled.shape[0], G + 1), jnp.int32)
    edge = edge.at[row, lanes.start].add((count > 0).astype(jnp.int32))
    edge = edge.at[row, lanes.start + count].add(-(count > 0).astype(jnp.int32))
    inside = jnp.cumsum(edge, axis=1)[:, :G] > 0
    behind = jnp.max(jnp.where(leaf & lanes.made & (own < lanes.length), lanes.start + own, -1), axis=1)
    return inside, ends & (jnp.arange(G) == behind[:, None])


def events(group: Array, where: Array) -> Array:
    """Returns (B,) int32 how many distinct groups there are among some lanes, |G_t| of Eq. 11.

    Args:
      group: (B, N) int32.
      where: (B, N) bool which lanes.
    """
    same = (group[:, :, None] == group[:, None, :]) & where[:, :, None] & where[:, None, :]
    earlier = jnp.tril(jnp.ones((group.shape[1],) * 2, bool), -1)
    return jnp.sum(where & ~jnp.any(same & earlier, axis=2), axis=1)
