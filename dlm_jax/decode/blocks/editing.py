"""Tokens that are already there and that a later forward of the block may still change.

Letters: B batch, K block size.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.masked.drafts import Drafts
from dlm_jax.decode.parts import Part, number, whole


@struct.dataclass
class Editing(Part):
    """A known token of the block gives way to another that is sure enough, until a forward of the full block changes
    nothing.

    Attributes:
      threshold: in the confidence's unit, of the token that comes in.
      passes: forwards of a full block at most.

    Source: LLaDA2.1 (token editing).
    """

    threshold: float = number(0.9)
    passes: int = whole(16)

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
