"""Packed rows: what an objective does to a document is what it would do to a row with that document alone.

A packed batch holds several documents a row, one after another (`base.PACKED_KEYS`); `length`, `prompt_length` and
`example_id` have an entry a document then, 0 where a row has fewer than N. An objective lays documents out as rows of
their own, and what it made of them is put back where they stood: draws, layouts and weights are those of the document
alone.

Letters: B rows, N most documents a row, T tokens, R = B (N + 1) documents as rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_OF_ROWS = ("length", "prompt_length", "example_id")


def packed(batch: dict[str, Array]) -> bool:
    """Returns whether a batch holds several documents a row."""
    return "documents" in batch


def each(batch: dict[str, Array], prepare: Callable[[dict[str, Array]], Any]) -> Any:
    """Prepares every document of a batch by itself.

    Args:
      batch: arrays by key; packed or not.
      prepare: makes the rows of an unpacked batch: a tree of arrays (R, T, ...) with a method `replace` and a field
        `documents`. A row of length 0 must be one that is wholly padding.

    Returns:
      What `prepare` made; of a packed batch (B, T, ...) arrays, with the documents' numbers in `documents`.
    """
    if not packed(batch):
        return prepare(batch)
    return together(prepare(apart(batch)), batch).replace(documents=batch["documents"])


def apart(batch: dict[str, Array]) -> dict[str, Array]:
    """Returns the documents of a packed batch as rows of an unpacked one, an empty one after the N of every row.

    Args:
      batch: packed.

    Returns:
      `tokens` and, where there is one, `loss_mask` (R, T); the other keys that the batch has of (R,).
    """
    (B, T), N = batch["tokens"].shape, batch["start"].shape[1]
    one_more = lambda x: jnp.pad(x, ((0, 0), (0, 1)))
    found = {name: one_more(batch[name]).reshape(-1) for name in _OF_ROWS if name in batch}
    index = jnp.arange(T, dtype=jnp.int32)
    at = jnp.minimum(one_more(batch["start"])[:, :, None] + index, T - 1).reshape(B, -1)
    rows = lambda name: jnp.take_along_axis(batch[name], at, axis=1).reshape(B * (N + 1), T)
    found["tokens"] = rows("tokens")
    if "loss_mask" in batch:
        found["loss_mask"] = rows("loss_mask") & (index < found["length"][:, None])
    return found


def together(rows: Any, batch: dict[str, Array]) -> Any:
    """Undoes `apart`: puts what was made of every document's tokens where the documents stand in their rows.

    Args:
      rows: tree of arrays (R, T, ...).
      batch: packed.

    Returns:
      The tree with arrays (B, T, ...); padding holds what was made of an empty row.
    """
    documents, positions = batch["documents"], batch["positions"]
    (B, T), N = documents.shape, batch["start"].shape[1]
    at = jnp.where(documents < 0, N, documents) * T + positions

    def put(x):
        flat = x.reshape(B, (N + 1) * T, *x.shape[2:])
        return jnp.take_along_axis(flat, at.reshape(B, T, *[1] * (x.ndim - 2)), axis=1)

    return jax.tree.map(put, rows)
