"""Packed training batches: documents one after another in rows of a fixed length, from a mixture of sources.

Rows are packed greedily and source by source: documents are taken in order, one longer than a row is cut, and one that
would merely overflow is put off and starts the next row. Every row of a batch is then drawn from the sources by their
weights, and a source yields its rows without repetition. One that is exhausted has weight 0 until all are, which ends
the epoch; the next one shuffles anew.

Letters: B rows, T tokens, N most documents a row.

Source: FLARE, C.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dlm_jax.data.pipeline import Batch, check_position, own_rows
from dlm_jax.data.sources import Row
from dlm_jax.data.tokenizer import fit_turns
from dlm_jax.data.turns import Turns

Document = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its response
OF_DOCUMENTS = ("start", "length", "prompt_length", "truncated", "empty", "example_id")  # (N,) a row; others are (T,)
OF_PACKS = ("start", "documents", "positions")  # what only packed rows have


class Packer:
    """An endless iterator of packed batches; stands where a `Pipeline` does.

    The position is what was taken of each source and of the draws between them, the same on every host and for any
    number of hosts.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Row]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        length: int,
        seed: int,
        align: int = 1,
        weights: Sequence[float] | None = None,
        most: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Encodes the rows of every source once; batches are laid out when they are asked for.

        Args:
          sources: training rows of each source; a packed row holds documents of one.
          tokenizer: a tokenizer with a chat template.
          batch_size: packed rows of the global batch, a multiple of process_count.
          length: T, tokens a packed row, a multiple of align.
          seed: of shuffles and draws.
          align: tokens; every document starts at a multiple of it.
          weights: of each source, in any unit; default its number of packed rows.
          most: N; default twice what a row holds of documents of mean length.
          process_index: which slice of every global batch is yielded here.
          process_count: number of slices.

        Raises:
          ValueError: no rows, no row with a supervised token, a batch or length that does not divide, or weights that
            are none.
        """
        if align < 1 or length % align:
            raise ValueError(f"length = {length} is no multiple of align = {align}: packed rows are whole blocks; pick "
                             f"{-(-length // max(align, 1)) * max(align, 1)}, or blocks that divide it")
        if weights is not None and (len(weights) != len(sources) or not all(0 < w < np.inf for w in weights)):
            raise ValueError(f"weights = {weights}: expected a positive number for each of the {len(sources)} sources")
        if not sources:
            raise ValueError("no sources; give the training rows of at least one")
        self._mine = own_rows(batch_size, process_index, process_count)
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self._align, self._pad = align, tokenizer.pad_token_id or 0
        self._turns = [Turns(rows, tokenizer) for rows in sources]
        for turns in self._turns:
            turns.check(length)
        self._sizes = [self._aligned(turns) for turns in self._turns]
        self._firsts = np.cumsum([0, *map(len, self._turns)])  # number of each source's first document
        self.most = most or min(length // align, max(int(np.ceil(2 * length / size.mean())) for size in self._sizes))
        self._identity = {
            "rows": int(self._firsts[-1]), "checksum": [turns.checksum() for turns in self._turns],
            "batch_size": batch_size, "length": length, "seed": seed, "align": align, "documents": self.most,
            "weights": None if weights is None else [float(weight) for weight in weights]}
        self._step, self._draws = 0, 0
        self._begin(epoch=0)
        self._rows = [self._count(number) for number in range(len(sources))]
        self._weights = np.asarray(self._rows if weights is None else weights, np.float64)

    def _begin(self, epoch: int) -> None:
        """Shuffles every source anew."""
        self._epoch, self._taken = epoch, [0] * len(self._turns)
        self._order = [np.random.default_rng([self.seed, epoch, source]).permutation(len(turns))
                       for source, turns in enumerate(self._turns)]

    def _aligned(self, turns: Turns) -> np.ndarray:
        """Tokens that each document takes of a row."""
        return -(-np.minimum(turns.prompts + turns.responses, self.length) // self._align) * self._align

    def __len__(self) -> int:
        """Number of packed rows in the first epoch; others differ by a few."""
        return sum(self._rows)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Returns this process's part of the next global batch: (B, ...) of what `lay_out` returns."""
        rows = [self._next_row() for _ in range(self.batch_size)][self._mine]
        self._step += 1
        made = [lay_out([(self._firsts[source] + i, self._turns[source][i]) for i in documents], length=self.length,
                        most=self.most, align=self._align, pad_id=self._pad) for source, documents in rows]
        return {name: np.stack([row[name] for row in made]) for name in made[0]}

    def _next_row(self) -> tuple[int, np.ndarray]:
        """Draws a source and takes a row of it: its number, and those of the row's documents."""
        left = [taken < len(turns) for taken, turns in zip(self._taken, self._turns)]
        if not any(left):
            self._begin(self._epoch + 1)
            left = [True] * len(left)
        share = np.cumsum(np.where(left, self._weights, 0.0))
        # a draw follows its number, so that the number is all there is to save
        point = np.random.default_rng([self.seed, self._draws]).random() * share[-1]
        self._draws += 1
        source = int(np.searchsorted(share, point, side="right"))
        documents = self._take(source, self._taken[source])
        self._taken[source] += len(documents)
        return source, documents

    def _take(self, source: int, first: int) -> np.ndarray:
        """Returns the documents of one row of a source, greedily from number `first` of its order."""
        documents = self._order[source][first : first + self.most]
        fit = np.cumsum(self._sizes[source][documents]) <= self.length
        return documents[fit]

    def _count(self, source: int) -> int:
        """Returns the number of rows in a source's epoch."""
        rows, first = 0, 0
        while first < len(self._turns[source]):
            first += len(self._take(source, first))
            rows += 1
        return rows

    def report(self) -> dict[str, Any]:
        """Says what an epoch loses and wastes.

        Returns:
          What `Turns.report` says of all sources; packed_rows; padding_share, part of their area that holds no
          document's token.
        """
        each = [turns.report(self.length) for turns in self._turns]
        found = {name: (max if name == "longest_row" else sum)(one[name] for one in each) for name in each[0]}
        kept = sum(np.minimum(turns.prompts + turns.responses, self.length).sum() for turns in self._turns)
        return found | {"packed_rows": len(self), "padding_share": float(1 - kept / (len(self) * self.length))}

    def state(self) -> dict[str, Any]:
        """Returns the position (the same on every host) and what it is a position in, as plain values."""
        return {"step": self._step, "epoch": self._epoch, "draws": self._draws, "taken": list(self._taken),
                **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a position.

        Args:
          state: what `state` returned.

        Raises:
          ValueError: the position is one in other data, or with other batches.
        """
        check_position(state, self.state(), ("step", "epoch", "draws", "taken"))
        self._begin(int(state["epoch"]))
        self._step, self._draws = int(state["step"]), int(state["draws"])
        self._taken = [int(taken) for taken in state["taken"]]


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
