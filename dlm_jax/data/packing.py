"""Documents packed into rows of training batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlm_jax.data.tokenizer import fit_turns

Document = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its response
OF_DOCUMENTS = ("start", "length", "prompt_length", "truncated", "empty", "example_id")  # (N,) a row; others are (T,)
OF_PACKS = ("start", "documents", "positions")  # what only packed rows have


def lay_out(documents: Sequence[tuple[int, Document]], *, length: int, most: int, align: int, pad_id: int
            ) -> dict[str, np.ndarray]:
    """Lays documents out one after another as one row of a packed training batch.

    Args:
      documents: number and ids of each; the caller has seen to it that they fit.
      length: T, tokens of the row.
      most: N, documents that the arrays have room for.
      align: tokens; every document starts at a multiple of it, and what fills it up to the next is its own.
      pad_id: id of fillers and padding.

    Returns:
      tokens (T,) int32, loss_mask (T,) bool; documents (T,) int32 number of each token's document, -1 on padding, and
      positions (T,) int32, which restart with it; for each document start, length, prompt_length and example_id (N,)
      int32, and truncated and empty (N,) bool, see `tokenizer.fit_turns`; 0 where there is none.
    """
    row = {"tokens": np.full(length, pad_id, np.int32), "loss_mask": np.zeros(length, bool),
           "documents": np.full(length, -1, np.int32), "positions": np.zeros(length, np.int32)}
    row |= {name: np.zeros(most, bool if name in ("truncated", "empty") else np.int32) for name in OF_DOCUMENTS}
    start = 0
    for number, (example_id, turns) in enumerate(documents):
        found = fit_turns(*turns, length, pad_id)
        size = int(found["length"])
        end = min(start + -(-size // align) * align, length)
        for name in ("tokens", "loss_mask"):
            row[name][start:end] = found[name][: end - start]
        row["documents"][start:end], row["positions"][start:end] = number, np.arange(end - start)
        found |= {"start": start, "example_id": example_id}
        for name in OF_DOCUMENTS:
            row[name][number] = found[name]
        start = end
    row["positions"][start:] = np.arange(length - start)
    return row
