"""Which tokens a forward recomputes; all others keep their cached keys and values.

Where the model's outputs are shifted, the token before the window predicts its first token, so a window starts one
earlier while that token is masked; FreeCache always does, its frozen prefix ends one token earlier.

Letters: B batch, W queries, G canvas length.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.masked.drafts import Now
from dlm_jax.decode.parts import Part, whole
from dlm_jax.decode.request import Request
from dlm_jax.nn import visibility as vis

Span = tuple[Array, Array]  # (B,) numbers of a window's first token and behind its last


@runtime_checkable
class CachePolicy(Protocol):
    """Chooses windows; subclass it, make it a `flax.struct.dataclass`, and write `window`.

    The first forward of a row computes everything, and so does one whose window would predict no token to come.
    """

    keeps: ClassVar[bool] = True  # whether there is a cache at all
    by_block: ClassVar[bool] = True  # whether it is made for answers of several blocks
    per_block: ClassVar[bool] = False  # a new block is due a refresh
    refresh_every: ClassVar[int] = 0  # forwards from refresh to refresh; 0 leaves it to `per_block`
    block_causal: ClassVar[bool] = False  # whether tokens see no later block; prompts then have blocks and run first

    def window(self, now: Now) -> Span:
        """Returns the numbers of the first token to compute and behind the last, (B,) int32 each."""
        raise NotImplementedError(f"{type(self).__name__} has no window(now)")

    def refresh(self, now: Now) -> Span:
        """Returns the window of a refresh: everything, but where `block_causal`."""
        return now.first, now.stop

    def limit(self, request: Request, number: Array, block_length: int) -> Array:
        """Returns the (B, W) ranks up to which the tokens `number` see: the whole row."""
        return jnp.full_like(number, vis.LAST)

    def widths(self, request: Request, block_length: int, several: bool) -> tuple[int, ...]:
        """Returns the widths of windows worth a program of their own, without the shift and the widest.

        Args:
          request: the batch; its shapes count.
          block_length: tokens of a block, or the canvas length where there is one.
          several: whether more than one block may be open.
        """
        sizes = [block_length]  # shrinking, or growing with the blocks that are open
        while sizes[-1] < request.capacity:
            sizes.append(min(2 * sizes[-1], request.capacity))
        return tuple(sizes)


@struct.dataclass
class NoCache(CachePolicy):
    """Every token, every time."""

    keeps = by_block = False

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.first, now.stop

    def widths(self, request, block_length, several):
        """See `CachePolicy.widths`."""
        return ()


@struct.dataclass
class _Refreshed(Part, CachePolicy):
    """A policy whose cache may be refreshed more often: `refresh_every`, forwards from full pass to full pass."""

    refresh_every: int = whole(0)


@struct.dataclass
class Prompt(_Refreshed):
    """One full pass, then the answer.

    Attributes:
      refresh_every: forwards from full pass to full pass; 0 is never again.
    """

    by_block = False

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.predicting(jnp.zeros_like(now.begin)), now.stop

    def widths(self, request, block_length, several):
        """See `CachePolicy.widths`."""
        return (request.capacity,)


@struct.dataclass
class Prefix(_Refreshed):
    """A full pass opens each block, then the block and what follows it (Fast-dLLM, arXiv 2505.22618, Sec. 3.2).

    Attributes:
      refresh_every: forwards from full pass to full pass; 0 leaves it at one a block.
    """

    per_block = True

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.predicting(now.begin), now.stop


@struct.dataclass
class Dual(_Refreshed):
    """A full pass opens each block, then the block alone (Fast-dLLM, arXiv 2505.22618, Sec. 3.2).

    Attributes:
      refresh_every: forwards from full pass to full pass; 0 leaves it at one a block.
    """

    per_block = True

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.predicting(now.begin), now.end

    def widths(self, request, block_length, several):
        """See `CachePolicy.widths`."""
        return super().widths(request, block_length, several) if several else (block_length,)


@struct.dataclass
class Free(_Refreshed):
    """One full pass, then the block and what follows (FreeCache); what lies before keeps the values of the last
    forward that held it, perhaps computed while it was masked.

    Attributes:
      refresh_every: forwards from full pass to full pass; 0 is never again.
      block_length: tokens of the blocks that are frozen; None freezes those that are decoded.

    Source: FlashDLM, Sec. 3.2; Table 11 freezes blocks of 256 and decodes blocks of 64.
    """

    block_length: int | None = whole(None, least=1)

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return self._start(now, now.begin), now.stop

    def _start(self, now: Now, number: Array) -> Array:
        size = now.block_length if self.block_length is None else self.block_length
        return number // size * size - now.shift


@struct.dataclass
class Delayed(Free):
    """As `Free`, but the window reaches back to the block of what the last forward committed, so that a block is frozen
    as it is when finished.

    Attributes:
      refresh_every, block_length: as of `Free`.

    Source: dKV-Cache (arXiv 2505.15781), the one-step delay, by blocks.
    """

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        latest = jnp.where(jnp.any(now.fresh, axis=1), jnp.argmax(now.fresh, axis=1), now.begin)
        return self._start(now, jnp.minimum(now.begin, latest)), now.stop


@struct.dataclass
class BlockCausal(CachePolicy):
    """The block alone, which sees no later one; a finished block is run once more, clean, before the next.

    Source: BD3-LM (arXiv 2503.09573), Alg. 2.
    """

    per_block = block_causal = True

    def window(self, now: Now) -> Span:
        """See `CachePolicy.window`."""
        return now.predicting(now.begin), now.end

    def refresh(self, now: Now) -> Span:
        """See `CachePolicy.refresh`: the block that is finished."""
        return now.begin - now.block_length, now.begin

    def limit(self, request: Request, number: Array, block_length: int) -> Array:
        """See `CachePolicy.limit`: the end of the token's own block; blocks begin where prompts end."""
        return request.position((number // block_length + 1) * block_length - 1)

    def widths(self, request, block_length, several):
        """See `CachePolicy.widths`."""
        return (block_length,)
