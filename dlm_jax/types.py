"""Shared vocabulary of the library: what a model looks like to objectives and decoders.

Letters: B batch, T query tokens, S keys, D model width, K KV heads, H head dim, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

Array = jax.Array
Params = Any  # nested dict of arrays, as Linen makes it


class Scorer(Protocol):
    """The model as objectives and decoders see it: pure functions with the parameters already bound."""

    vocab_size: int
    shift: int  # the output at index i predicts the token at i + shift; outputs are never moved
    bidirectional: bool  # whether the family's own visibility is whole, or causal
    block_size: int | None  # tokens of the blocks the model was trained on, None where unknown

    def view(self, name: str) -> "Scorer":
        """Returns the scorer of a view of a dual model, "ar" (this one) or "diffusion"."""

    def hidden(
        self,
        tokens: Array,
        positions: Array,
        visibility: Any,
        cache: Any | None = None,
        slots: Array | None = None,
    ) -> tuple[Array, Any | None]:
        """Runs the body of the model.

        Args:
          tokens: (B, T) int32 token ids.
          positions: (B, T) int32 logical positions, the only thing RoPE sees.
          visibility: which keys each query sees: the T tokens themselves without a cache, its S entries with one, the
            S entries followed by the T tokens where the cache is only read.
          cache: a `KVCache` of capacity S, or None.
          slots: (B, T) int32 cache entry that each token's key and value are written to; S discards it. None only
            reads the cache.

        Returns:
          (B, T, D) hidden states after the final norm, and the updated cache (None without one).
        """

    def head(self, hidden: Array) -> Array:
        """Maps (..., D) hidden states to (..., V) float32 logits."""

    def init_cache(self, batch: int, capacity: int) -> Any:
        """Returns an empty cache of `capacity` entries a row."""

    def __call__(self, tokens: Array, positions: Array | None = None, visibility: Any | None = None) -> Array:
        """Returns (B, T, V) float32 logits; positions and visibility default to the family's own."""
