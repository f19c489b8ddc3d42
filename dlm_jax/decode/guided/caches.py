"""Which tokens the drafter computes anew each round: parts of `Guided`.

The first round computes everything. What lies before a window is read as it was last computed, perhaps while it was
masked.

Letters: B batch, G generation capacity.

Source: "FlashDLM", Sec. 3.2.1, Table 11, and its released code.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.parts import Part, static, whole
from dlm_jax.decode.request import Request


@struct.dataclass
class Progress:
    """How far a batch has come.

    Attributes:
      request: the batch.
      length: (B,) int32 committed tokens, which are the first of the answer.
      latest: (B,) int32 how many of them the last round committed.
      shift: of the drafter, static.
    """

    request: Request
    length: Array
    latest: Array
    shift: int = struct.field(pytree_node=False)


class Window(Protocol):
    """Says where the drafter's window begins and ends."""

    def window(self, now: Progress) -> tuple[Array, Array]:
        """Returns the (B,) numbers of the first token of the window and of the one behind its last."""

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """Returns the static widths that a round may have, ascending; the last holds the longest window."""


def _shrinking(request: Request, longest: int) -> tuple[int, ...]:
    """Returns widths for a window that begins later and later; narrower ones are not worth a program of their own."""
    G = request.capacity
    return (*(w for w in (G // 8, G // 4, G // 2) if w >= 64), min(longest, request.entries))


@struct.dataclass
class NoCache(Part):
    """Everything, every time."""

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        return -now.request.prompt_length, now.request.max_new_tokens

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        del shift
        return (request.entries,)


@struct.dataclass
class Prompt(Part):
    """All but the prompt."""

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        return jnp.zeros_like(now.length), now.request.max_new_tokens

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        del shift
        return (request.capacity,)


@struct.dataclass
class Free(Part):
    """FreeCache: from the block on that holds the first mask.

    Attributes:
      block_length: tokens of a block that is kept once it is whole; blocks begin with the answer.
    """

    block_length: int = whole(256, least=1)

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        return now.length // self.block_length * self.block_length - now.shift, now.request.max_new_tokens

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        return _shrinking(request, request.capacity + shift)


@struct.dataclass
class Delayed(Part):
    """FreeCache a round later: from the block on of the first token that the last round committed.

    A block is then kept as it is when finished.

    Attributes:
      block_length: as in `Free`.
    """

    block_length: int = whole(256, least=1)

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        before = now.length - now.latest
        return before // self.block_length * self.block_length - now.shift, now.request.max_new_tokens

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        return _shrinking(request, request.capacity + shift)


@struct.dataclass
class Aggressive(Part):
    """From the last committed token on."""

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        return now.length - 1, now.request.max_new_tokens

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        del shift
        return _shrinking(request, request.capacity)


@struct.dataclass
class Sliding(Part):
    """Some tokens on either side of the last committed one, and no drafts beyond.

    Attributes:
      reach: tokens on either side.
    """

    reach: int = static(128, least=2)

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        last = now.length - 1
        return (jnp.maximum(last - self.reach, -now.request.prompt_length),
                jnp.minimum(last + self.reach, now.request.max_new_tokens))

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        del shift
        return (min(2 * self.reach, request.entries),)


@struct.dataclass
class BlockBoundary(Part):
    """The released variant of `Free`: blocks are counted from the prompt's first token.

    Where a block begins at the first mask, that token is drafted from its own output even if outputs are shifted.

    Attributes:
      block_length: tokens of a block.
    """

    block_length: int = static(256, least=1)

    def window(self, now: Progress) -> tuple[Array, Array]:
        """See `Window.window`."""
        position = now.request.prompt_length + now.length
        return now.length - position % self.block_length, now.request.max_new_tokens

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """See `Window.widths`."""
        del shift
        return _shrinking(request, request.capacity + self.block_length)
