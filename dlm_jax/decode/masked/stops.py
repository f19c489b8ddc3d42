"""What an EOS does to the rest of an answer.

Letters: B batch, G canvas length.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.parts import Part, whole
from dlm_jax.decode.request import Request


@struct.dataclass
class Board:
    """An answer as a stop sees it.

    Attributes:
      masked: (B, G) bool tokens still to come.
      eos: (B, G) bool committed EOS.
      length: (B,) int32 tokens of the answer.
    """

    masked: Array
    eos: Array
    length: Array

    @property
    def index(self) -> Array:
        """(G,) int32 numbers."""
        return jnp.arange(self.masked.shape[1], dtype=jnp.int32)

    @property
    def behind(self) -> Array:
        """(B, G) bool tokens of the answer behind its first committed EOS."""
        return (self.index < self.length[:, None]) & (jnp.cumsum(self.eos, axis=1) - self.eos > 0)


def board(request: Request, canvas: Canvas) -> Board:
    """Returns what stops see of a canvas."""
    inside = jnp.arange(request.capacity) < request.max_new_tokens[:, None]
    committed = canvas.committed_at >= 0
    return Board(inside & ~committed, (canvas.tokens == request.eos_id) & committed, request.max_new_tokens)


@runtime_checkable
class Stop(Protocol):
    """Ends answers; subclass it, make it a `flax.struct.dataclass`, and write `fill`."""

    late: ClassVar[bool] = False  # whether filled tokens stay candidates of one more forward
    by_block: ClassVar[bool] = False  # whether it is made for answers of several blocks
    fills: ClassVar[bool] = False  # whether an EOS fills all behind it, so that no further block need open

    def fill(self, board: Board) -> Array:
        """Returns (B, G) bool: the tokens that become EOS."""
        raise NotImplementedError(f"{type(self).__name__} has no fill(board)")

    def ends(self, board: Board, finished: Array) -> Array:
        """Returns (B,) bool: the rows that end though masks are left.

        Args:
          board: the answer.
          finished: (B, G) bool tokens of the blocks finished, all False where the last forward finished none.
        """
        return jnp.zeros(finished.shape[:1], bool)


@struct.dataclass
class Never(Stop):
    """Every token is decoded (LLaDA, Dream)."""

    def fill(self, board: Board) -> Array:
        """See `Stop.fill`."""
        return jnp.zeros_like(board.masked)


@struct.dataclass
class Fill(Stop):
    """All after the first EOS becomes EOS (FreeCache for LLaDA)."""

    fills = True

    def fill(self, board: Board) -> Array:
        """See `Stop.fill`."""
        return board.behind


@struct.dataclass
class LateFill(Stop):
    """As `Fill`, but not once every token is committed, and the tokens filled stay candidates of one more forward
    (d3LLM's released code)."""

    late = fills = True

    def fill(self, board: Board) -> Array:
        """See `Stop.fill`."""
        return board.behind & jnp.any(board.masked, axis=1, keepdims=True)


@struct.dataclass
class Run(Part, Stop):
    """Where the committed tokens have no gap and end in several EOS, the rest becomes EOS (FreeCache for Dream).

    Attributes:
      length: EOS in a row.
    """

    length: int = whole(1, least=1)

    def fill(self, board: Board) -> Array:
        """See `Stop.fill`."""
        left, index = board.masked, board.index
        first = jnp.argmax(left, axis=1)[:, None]  # tokens before the first mask, where there is one
        tail = (index < first) & (index >= first - self.length)
        outside = (index < first) | (index >= board.length[:, None])
        over = jnp.all(left | outside, axis=1, keepdims=True) & (first >= self.length)
        return left & over & jnp.all(board.eos | ~tail, axis=1, keepdims=True)


@struct.dataclass
class AfterBlock(Stop):
    """Nothing after the block that holds an EOS is decoded (block diffusion, SDAR)."""

    by_block = True

    def fill(self, board: Board) -> Array:
        """See `Stop.fill`."""
        return jnp.zeros_like(board.masked)

    def ends(self, board: Board, finished: Array) -> Array:
        """See `Stop.ends`."""
        return jnp.any(board.eos & finished, axis=1)


@struct.dataclass
class Settled(Stop):
    """Nothing is decoded once an EOS has no mask before it."""

    def fill(self, board: Board) -> Array:
        """See `Stop.fill`."""
        return jnp.zeros_like(board.masked)

    def ends(self, board: Board, finished: Array) -> Array:
        """See `Stop.ends`."""
        return jnp.any(board.eos & (jnp.cumsum(board.masked, axis=1) == 0), axis=1)
