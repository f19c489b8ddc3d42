"""Which tokens are open: the whole answer, its blocks from left to right, or several blocks at once.

Letters: B batch, G canvas length, n blocks of a canvas.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.masked.drafts import Drafts, places
from dlm_jax.decode.parts import Part, number, static


@runtime_checkable
class Schedule(Protocol):
    """Opens blocks; blocks are numbered from 0, and all before the first mask's are finished."""

    @property
    def several(self) -> bool:
        """Whether more than one unfinished block may be open; static."""
        return False

    def block_length(self, capacity: int) -> int:
        """Returns the tokens of a block for a canvas of that length; static."""
        raise NotImplementedError(f"{type(self).__name__} has no block_length(capacity)")

    def opened(self, opened: Array, masked: Array, tokens: Array, ended: Array) -> Array:
        """Returns the (B,) int32 number of blocks open.

        Args:
          opened: (B,) int32 blocks open so far, the first unfinished one included.
          masked: (B, G) bool tokens still to come.
          tokens: (B,) int32 answer length.
          ended: (B,) bool rows whose EOS has filled what follows.
        """
        return opened

    def forced(self, chosen: Array, drafts: Drafts, masked: Array, tokens: Array, opened: Array) -> Array:
        """Returns (B, C) bool: candidates that are committed besides the `chosen` ones; arguments as of `opened`."""
        return jnp.zeros_like(chosen)


@struct.dataclass
class Whole(Schedule):
    """The answer is one block (Dream)."""

    def block_length(self, capacity: int) -> int:
        """See `Schedule.block_length`."""
        return capacity


@struct.dataclass
class Ahead(Part):
    """When blocks open before their predecessors are finished.

    Attributes:
      add: committed share of the newest block at which the next opens.
      sure: committed share at which a block's successor is sure to get a token a forward.

    Source: d3LLM (arXiv 2601.07568), multi-block decoding: block_add_threshold, decoded_token_threshold.
    """

    add: float = number(0.1, most=1.0)
    sure: float = number(0.95, most=1.0)


@struct.dataclass
class Blocks(Part, Schedule):
    """Blocks from left to right (LLaDA's semi-autoregressive decoding).

    Attributes:
      length: tokens of a block.
      ahead: opens blocks early; None opens one when its predecessor is finished.
    """

    length: int = static(32, least=1)
    ahead: Ahead | None = None

    @property
    def several(self) -> bool:
        """See `Schedule.several`."""
        return self.ahead is not None

    def block_length(self, capacity: int) -> int:
        """See `Schedule.block_length`."""
        return self.length

    def opened(self, opened: Array, masked: Array, tokens: Array, ended: Array) -> Array:
        """See `Schedule.opened`."""
        if self.ahead is None:
            return opened
        done = progress(masked, tokens, self._size(masked))
        newest = jnp.take_along_axis(done, jnp.minimum(opened, done.shape[1])[:, None] - 1, axis=1)[:, 0]
        more = (newest >= jnp.minimum(self.ahead.add, 1.0)) & ~ended
        return jnp.minimum(opened + more, done.shape[1])

    def forced(self, chosen: Array, drafts: Drafts, masked: Array, tokens: Array, opened: Array) -> Array:
        """See `Schedule.forced`: an unfinished block must commit a token if it got none and its turn has come."""
        if self.ahead is None:
            return jnp.zeros_like(chosen)
        ready = progress(masked, tokens, self._size(masked)) >= self.ahead.sure
        B, n = ready.shape
        split = lambda x: jnp.any(x.reshape(B, n, -1), axis=2)
        turn = jnp.concatenate([jnp.ones((B, 1), bool), ready[:, :-1]], axis=1)  # the prompt is ready
        turn &= (jnp.arange(n) < opened[:, None]) & split(masked)
        turn &= (jnp.cumsum(turn, axis=1) == 1) & ~split(chosen)
        inside = jnp.repeat(turn, masked.shape[1] // n, axis=1) & drafts.eligible
        return inside & (places(drafts.confidence, inside) == 0)

    def _size(self, masked: Array) -> int:
        return min(self.length, masked.shape[1])


def progress(masked: Array, tokens: Array, block_length: int) -> Array:
    """Returns (B, n) float32 committed share of each block; 1 for blocks that a row does not have.

    Args:
      masked: (B, G) bool.
      tokens: (B,) int32 answer length.
      block_length: G is a multiple of it.
    """
    B, G = masked.shape
    left = jnp.sum(masked.reshape(B, G // block_length, block_length), axis=2)
    size = jnp.clip(tokens[:, None] - jnp.arange(0, G, block_length), 1, block_length)
    return 1.0 - left / size
