"""Cache policies that guided diffusion has beside those of `masked.caches`.

The first round computes everything. What is committed begins the answer, so `now.begin` is how much of it there is, and
a block that is decoded is one token.

Source: "FlashDLM", Sec. 3.2.1, Table 11, and its released code.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from dlm_jax.decode.masked.caches import CachePolicy, Delayed, Free, Prompt, Span
from dlm_jax.decode.masked.drafts import Now
from dlm_jax.decode.parts import Part, static
from dlm_jax.decode.request import Request


@struct.dataclass
class Aggressive(Part, CachePolicy):
    """From the last committed token on."""

    by_block = False

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.begin - 1, now.stop


@struct.dataclass
class Sliding(Part, CachePolicy):
    """Some tokens on either side of the last committed one, and no drafts beyond.

    Attributes:
      reach: tokens on either side.
    """

    by_block = False
    reach: int = static(128, least=2)

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        last = now.begin - 1
        return jnp.maximum(last - self.reach, now.first), jnp.minimum(last + self.reach, now.stop)

    def widths(self, request, block_length, several):
        """See `CachePolicy.widths`."""
        return (2 * self.reach,)


@struct.dataclass
class BlockBoundary(Part, CachePolicy):
    """The released variant of `Free`: blocks are counted from the prompt's first token.

    Where a block begins at the first mask, that token is drafted from its own output even if outputs are shifted.

    Attributes:
      block_length: tokens of a block.
    """

    by_block = False
    block_length: int = static(256, least=1)

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.begin - (now.request.prompt_length + now.begin) % self.block_length, now.stop

    def widths(self, request, block_length, several):
        """See `CachePolicy.widths`."""
        return (*super().widths(request, block_length, several), request.capacity + self.block_length)


def widths(policy: CachePolicy, request: Request, shift: int) -> tuple[int, ...]:
    """Returns the static widths that a round may have, ascending; the last holds the longest window.

    Args:
      policy: of the drafter.
      request: the batch; its shapes count.
      shift: of the drafter.
    """
    G, whole = request.capacity, request.entries
    # narrower windows are not worth a program of their own
    sizes = sorted({size + shift for size in policy.widths(request, min(G, max(G // 8, 64)), True)})
    # nor is the widest, for windows that never reach beyond what these hold
    if type(policy) in (Prompt, Free, Delayed, Aggressive, Sliding, BlockBoundary) and sizes[-1] < whole:
        return tuple(sizes)
    return (*(size for size in sizes if size < whole), whole)
