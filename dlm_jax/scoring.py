"""What a model looks like to objectives and decoders, which never import one.

Letters: B batch, T tokens, S cache entries, C wanted outputs, R chosen rows, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.nn.visibility import Visibility
from dlm_jax.types import Params


@struct.dataclass
class Streams:
    """What recurrent layers are told of a training forward: T = (1 + views) L tokens, a clean stream and views of it.

    The clean stream is causal. A view's block starts from the clean state before its first token, and every token of it
    reads the state at its end; blocks are counted from the row's first token.

    Attributes:
      documents: (B, L) int32; the clean state begins anew where the number changes, at a multiple of block_size. None
        where a row is one document.
      views: W, noisy streams after the clean one, each L tokens.
      block_size: tokens.
      causal: a view's token reads the state right after itself instead of the one at its block's end.
    """

    documents: Array | None = None
    views: int = struct.field(pytree_node=False, default=0)
    block_size: int = struct.field(pytree_node=False, default=1)
    causal: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class Window:
    """What recurrent layers are told of a decoding forward.

    Of a row's T tokens the first `advance` go on from the cached state; the `read` after them are a block that starts
    where these ended, is read at its end and leaves no trace; the others are padding.

    Attributes:
      advance, read: (B,) int32 tokens.
      tentative: `Cache.commit` follows, so what was read before this pass is kept beside it; at most the cache's
        `window` tokens may advance.
    """

    advance: Array
    read: Array
    tentative: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class Pass:
    """What every layer is told of one forward.

    Attributes:
      positions: (B, T) int32 logical positions, the only thing RoPE sees.
      visibility: which keys each of the T tokens sees: the T tokens themselves without a cache, its S entries with
        one, the S entries followed by the T tokens where the cache is only read. A rule of S + T keys with `slots` sees
        the entries as they were before this pass writes to them.
      slots: (B, T) int32 cache entry that each token's key and value are written to; S discards it. None only reads
        the cache, whatever the kinds of layers.
      recurrence: schedule of recurrent layers. None: every token with an entry in the cache advances the state, and
        they come first in their row; without a cache, every token.
    """

    positions: Array
    visibility: Visibility
    slots: Array | None = None
    recurrence: Streams | Window | None = None

    def take(self, wanted: Array) -> "Pass":
        """Returns what the (B, C) tokens `wanted` are told as queries; keys stay as they are."""
        return self.replace(positions=jnp.take_along_axis(self.positions, wanted, axis=1),
                            visibility=self.visibility.take(wanted), slots=None)


@runtime_checkable
class Cache(Protocol):
    """What layers keep of earlier tokens, whatever they keep; pure, so every change is a new cache.

    Entries are told apart by rank (`nn.visibility`), so attention needs no crop. A recurrent state has no entries: what
    it holds of a pass is settled by `commit`.
    """

    @property
    def capacity(self) -> int:
        """S, entries a row."""

    @property
    def batch(self) -> int:
        """B, rows."""

    def grow(self, capacity: int) -> Self:
        """Returns the cache with empty entries added at the end, up to a capacity no smaller than the present one."""

    def take(self, rows: Array) -> Self:
        """Returns the cache of the (R,) int32 rows, in that order, repeats allowed."""

    def insert(self, rows: Array, other: Self) -> Self:
        """Returns the cache with the R rows of another of the same capacity in place of its own (R,) rows."""

    def commit(self, accepted: Array) -> Self:
        """Returns the cache that has read no more than the first (B,) int32 `accepted` tokens of the last pass.

        0 rolls the pass back. Attention answers with itself: what is beyond is hidden by rank and overwritten later.
        """


class Scorer(Protocol):
    """Pure functions with the parameters already bound."""

    vocab_size: int
    shift: int  # the output at index i predicts the token at i + shift; outputs are never moved
    bidirectional: bool  # whether the family's own visibility is whole, or causal
    block_size: int | None  # tokens of the blocks the model was trained on, None where unknown
    noisy_shift: int | None  # the output at index i of a mask of a causal model predicts i + this; None: not trained to
    views: tuple[str, ...]  # that `view` takes
    recurrent: bool  # whether it has layers that read `Pass.recurrence`

    def view(self, name: str) -> Scorer:
        """Returns the scorer of a view, "ar" (this one) or "diffusion": a dual model's, or the one with its adapter."""

    def hidden(self, tokens: Array, told: Pass, cache: Cache | None = None, wanted: Array | None = None
               ) -> tuple[Array, Cache | None]:
        """Runs the body of the model.

        Args:
          tokens: (B, T) int32 token ids.
          told: positions, visibility, slots.
          cache: of capacity S, or None.
          wanted: (B, C) int32 indices of the tokens whose outputs are computed in the last layer; None for all T.

        Returns:
          (B, T, D), or (B, C, D), hidden states after the final norm, and the updated cache (None without one).
        """

    def head(self, hidden: Array) -> Array:
        """Maps (..., D) hidden states to (..., V) float32 logits."""

    def head_tile(self, hidden: Array, index: Array, count: int) -> tuple[Array, Array]:
        """Maps (..., D) hidden states to their logits over one of `count` parts of the vocabulary.

        Returns:
          (..., U) float32 logits, -inf where another part has the token; (U,) int32 ids, in ascending order.
        """

    def init_cache(self, batch: int, capacity: int, window: int = 0) -> Cache:
        """Returns an empty cache of `capacity` entries a row, that can undo passes of `window` tokens."""

    def __call__(self, tokens: Array, positions: Array | None = None, visibility: Visibility | None = None) -> Array:
        """Returns (B, T, V) float32 logits; positions and visibility default to the family's own."""


class Model(Protocol):
    """A hashable description of a network; its parameters stand beside it."""

    config: Any

    def scorer(self, params: Params) -> Scorer:
        """Binds parameters; call it inside the function that is compiled."""
