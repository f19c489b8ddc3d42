"""What the parts of masked diffusion are told: where a row stands, what was drafted, and how far its plan has come.

Letters: B batch, C candidates, G canvas length, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler


@struct.dataclass
class Now:
    """Where every row stands when a forward begins; cache policies and schedules read it.

    Attributes:
      request: the batch.
      masked: (B, G) bool tokens still to come.
      fresh: (B, G) bool tokens that the last forward committed.
      begin, end: (B,) int32 numbers of the open blocks' first token, committed or not, and behind their last.
      opened: (B,) int32 blocks open, the finished ones included.
      block_length: tokens of a block, static.
      shift: the model's outputs at number n predict the token n + shift; static.
    """

    request: Request
    masked: Array
    fresh: Array
    begin: Array
    end: Array
    opened: Array
    block_length: int = struct.field(pytree_node=False)
    shift: int = struct.field(pytree_node=False)

    @property
    def first(self) -> Array:
        """(B,) int32 number of each row's first token, which is its prompt's."""
        return -self.request.prompt_length

    @property
    def stop(self) -> Array:
        """(B,) int32 number behind each row's last token."""
        return self.request.max_new_tokens

    def predicting(self, first: Array) -> Array:
        """Returns (B,) `first`, or one earlier where outputs are shifted and the (B,) token `first` is still masked."""
        at = jnp.clip(first, 0, self.masked.shape[1] - 1)[:, None]
        return first - self.shift * jnp.take_along_axis(self.masked, at, axis=1)[:, 0]


@struct.dataclass
class Clock:
    """How far a row's plan has come; commit rules read it. Every array (B,) int32.

    Attributes:
      step: steps taken in the block, or in the answer where it is one block.
      block: number of the block.
      left: tokens of the answer that are still masked.
      tokens: of the answer.
      block_length: tokens of a block, static.
      opened: masks that the block began with, where a prompt may hold its first tokens; None where none does.
    """

    step: Array
    block: Array
    left: Array
    tokens: Array
    block_length: int = struct.field(pytree_node=False)
    opened: Array | None = None

    @property
    def block_tokens(self) -> Array:
        """(B,) int32 tokens of this block that were to come; an answer's last may be short."""
        if self.opened is not None:
            return self.opened
        return jnp.clip(self.tokens - self.block * self.block_length, 1, self.block_length)

    def plan(self, steps: Array) -> tuple[Array, Array]:
        """Returns (B,) steps of each block, and (B,) steps of the whole answer.

        Args:
          steps: () int32 for the whole answer; 0 takes one a token.
        """
        blocks = jnp.maximum(-(-self.tokens // self.block_length), 1)
        whole = jnp.where(steps > 0, steps, blocks * jnp.minimum(self.tokens, self.block_length))
        return jnp.maximum(whole // blocks, 1), jnp.maximum(whole, 1)


@struct.dataclass
class Drafts:
    """What a forward drafted; confidences and commit rules read it.

    Attributes:
      tokens: (B, C) int32.
      logits: (B, C, V) float32 the model's own, the mask's included.
      eligible: (B, C) bool candidates: tokens still to come, of an open block.
      number: (B, C) int32 number of each token.
      keys: (B, C) PRNG keys.
      sampler: that drew the drafts.
      measure: the confidence asked for.
      confidence: (B, C) float32 its verdicts, the larger the surer; -inf where nothing is eligible.
      order: (B, C) float32 by which the surest are found: the confidence, unless a rule disturbs it.
    """

    tokens: Array
    logits: Array
    eligible: Array
    number: Array
    keys: Array
    sampler: Sampler
    measure: Any = None
    confidence: Array | None = None
    order: Array | None = None

    @property
    def count(self) -> Array:
        """(B,) int32 candidates."""
        return jnp.sum(self.eligible, axis=1)

    @property
    def place(self) -> Array:
        """(B, C) int32 place of each candidate, 0 for the surest; ties go to the earlier one, others stand beyond."""
        return places(self.order, self.eligible)

    def surest(self, count: Array | int) -> Array:
        """Returns (B, C) bool: the (B,) or () `count` surest candidates."""
        return self.eligible & (self.place < jnp.reshape(jnp.asarray(count), (-1, 1)))

    def reach(self, threshold: Array | float) -> Array:
        """Returns (B, C) bool: the candidates as sure as a threshold in the confidence's own unit."""
        return self.eligible & (self.confidence >= self.measure.level(threshold))


def places(score: Array, eligible: Array) -> Array:
    """Returns the (B, C) int32 place of each candidate, 0 for the best; ties go to the earlier one.

    Args:
      score: (B, C) float32.
      eligible: (B, C) bool; the others get a place beyond all.
    """
    score = jnp.where(eligible, score, -jnp.inf)
    mine, theirs = score[:, :, None], score[:, None, :]
    index = jnp.arange(score.shape[1])
    before = (theirs > mine) | ((theirs == mine) & (index[None, :] < index[:, None]))
    return jnp.where(eligible, jnp.sum(before & eligible[:, None, :], axis=2), score.shape[1])
