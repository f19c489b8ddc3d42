"""What is written into blocks besides drafts: other tokens in place of known ones, and the end of thinking.

Letters: B batch, K block size, G canvas length.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.masked.drafts import Drafts
from dlm_jax.decode.parts import Part, number, whole

RETRACTING = 4


@struct.dataclass
class Editing(Part):
    """A known token of the block gives way to another that is sure enough, until a forward of the full block changes
    nothing. Where the other is the mask, the token is taken back and drafted again; so that every block ends, no longer
    than for `RETRACTING` times as many forwards as it has tokens and passes.

    Attributes:
      threshold: in the confidence's unit, of the token that comes in.
      passes: forwards of a full block at most, all told.

    Source: LLaDA2.1 (token editing).
    """

    threshold: float = number(0.9)
    passes: int = whole(16)

    def retracts(self, step: Array, size: int, known: Array) -> Array:
        """Returns (B, K) bool: the tokens that a mask may take the place of.

        Args:
          step: (B,) int32 forwards of the block so far.
          size: K.
          known: (B, K) bool, as of `edits`.
        """
        return known & (step < RETRACTING * (size + jnp.asarray(self.passes)))[:, None]

    def edits(self, drafts: Drafts, confidence: Array, tokens: Array, known: Array) -> Array:
        """Returns (B, K) bool: the tokens that change.

        Args:
          drafts: of every token of the block.
          confidence: (B, K) float32 of each draft.
          tokens: (B, K) int32 the block.
          known: (B, K) bool, the answer's tokens that are no masks.
        """
        return known & (drafts.tokens != tokens) & (confidence > drafts.measure.level(self.threshold))

    def over(self, began: Array, edited: Array, taken: Array) -> Array:
        """Returns (B,) bool: the full blocks that stay as they are.

        Args:
          began: (B,) bool, blocks that were full before the last forward.
          edited: (B,) bool, blocks that it changed.
          taken: (B,) int32 forwards of the full block so far, the last one included.
        """
        return began & ~edited | (taken >= jnp.asarray(self.passes))


@struct.dataclass
class Thinking(Part):
    """A budget of thought: the token that ends it is written where the budget is spent, if it has not come before.

    Attributes:
      tokens: the budget.
      end: id of the token.

    Source: Nemotron-Labs-Diffusion (max_thinking_tokens).
    """

    tokens: int = whole()
    end: int = whole()

    def place(self, canvas: Canvas, start: Array, size: int) -> tuple[Array, Array]:
        """Returns (B,) int32 numbers of the token in the blocks that begin at (B,) `start`, and whether it is due."""
        index = jnp.arange(canvas.tokens.shape[1])
        said = (canvas.tokens == self.end) & (canvas.committed_at >= 0) & (index < start[:, None])
        return jnp.maximum(start, self.tokens), (start + size > self.tokens) & ~jnp.any(said, axis=1)
