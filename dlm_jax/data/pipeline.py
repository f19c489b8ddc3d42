"""Random-access training batches: what a step sees is a function of (rows, seed, step), on any number of hosts."""

from __future__ import annotations

import array
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from dlm_jax.data.sources import Row
from dlm_jax.data.tokenizer import encode_rows, fit_turns

Batch = dict[str, np.ndarray]
ENCODED_AT_ONCE = 1 << 14  # rows whose ids are Python lists at one time


class Pipeline:
    """An endless iterator of training batches over a shuffled, repeated file.

    Rows are reshuffled every epoch; a batch may span two epochs, so none is ever short. The position is the
    number of batches taken: it is the same on every host and for any number of hosts.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        length: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Encodes the rows once; batches are padded when they are asked for.

        Args:
          rows: the training rows.
          tokenizer: a tokenizer with a chat template.
          batch_size: rows of the global batch, a multiple of process_count.
          length: T, tokens a row.
          seed: of the shuffle.
          process_index: which slice of every global batch is yielded here.
          process_count: number of slices.

        Raises:
          ValueError: no rows, no row with a supervised token, a length under 2, or a batch that does not divide.
        """
        if not rows:
            raise ValueError("no training rows; give at least one")
        if length < 2:
            raise ValueError(f"length = {length}: a row needs room for at least 2 tokens")
        if batch_size < 1 or process_count < 1 or batch_size % process_count:
            raise ValueError(f"batch_size = {batch_size} cannot be split over {process_count} processes evenly")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index = {process_index}: expected 0 to {process_count - 1}")
        self.batch_size, self.length, self.seed = batch_size, length, seed
        parts = (rows[i : i + ENCODED_AT_ONCE] for i in range(0, len(rows), ENCODED_AT_ONCE))
        self._ids, self._starts = _packed(turns for part in parts for turns in encode_rows(tokenizer, part))
        # of all that decides which rows a step sees: each row as its prompt's length, prompt and response
        checksum = zlib.crc32(np.insert(self._ids, self._starts[:-1:2], self._sizes()[0]))
        self._identity = {"rows": len(rows), "checksum": checksum, "batch_size": batch_size, "length": length,
                          "seed": seed}
        self._pad = tokenizer.pad_token_id or 0
        share = batch_size // process_count
        self._mine = slice(process_index * share, (process_index + 1) * share)
        self._order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch_size)
        self._step = 0
        if self.report()["empty"] == len(rows):
            raise ValueError(f"length = {length}: no row has a response that fits behind its prompt; the shortest "
                             f"prompt has {self._sizes()[0].min()} tokens")

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        return len(self._starts) // 2

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._step)
        self._step += 1
        return batch

    def batch(self, step: int) -> Batch:
        """Returns this process's part of the global batch of one step.

        Args:
          step: 0 or more.

        Returns:
          tokens (B, T) int32 right-padded; loss_mask (B, T) bool, the supervised response tokens; prompt_length
          and length (B,) int32; truncated and empty (B,) bool; example_id (B,) int32, the row's index in the file.
        """
        ids = np.asarray(self._order[step])[self._mine]
        examples = [fit_turns(*self._turns(i), self.length, self._pad) for i in ids]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        return {**batch, "example_id": ids.astype(np.int32)}

    def report(self) -> dict[str, Any]:
        """Says what an epoch loses and wastes.

        Returns:
          rows; truncated, rows whose response lost its end; empty, rows left without a supervised token;
          padding_share, part of the batch area that is padding; longest_row, tokens; supervised_tokens.
        """
        prompt, response = self._sizes()
        whole = prompt + response
        kept = np.minimum(whole, self.length)
        return {
            "rows": len(self),
            "truncated": int(np.sum(whole > self.length)),
            "empty": int(np.sum(prompt >= self.length)),
            "padding_share": float(1 - kept.sum() / (len(kept) * self.length)),
            "longest_row": int(whole.max()),
            "supervised_tokens": int(np.maximum(kept - prompt, 0).sum()),
        }

    def _turns(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a row's prompt and response."""
        start, middle, end = self._starts[2 * row : 2 * row + 3]
        return self._ids[start:middle], self._ids[middle:end]

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every prompt and of every response, (rows,) int64."""
        sizes = np.diff(self._starts)
        return sizes[::2], sizes[1::2]

    def state(self) -> dict[str, int]:
        """Returns the position (the same on every host) and what it is a position in, as plain integers."""
        return {"step": self._step, **self._identity}

    def restore(self, state: dict[str, int]) -> None:
        """Continues from a position.

        Args:
          state: what `state` returned.

        Raises:
          ValueError: the position is one in other data, or with other batches.
        """
        mine = self._identity
        other = {name: state.get(name) for name in mine if state.get(name) != mine[name]}
        if other or "step" not in state:
            here = {name: mine[name] for name in other}
            raise ValueError(f"the saved data position belongs to {other}, but this pipeline has {here}; "
                             "resume with the same rows, tokenizer and batches")
        self._step = int(state["step"])


def _packed(turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Joins all ids: (tokens,) int32, and (2 rows + 1,) int64 where prompts and responses start, and the end."""
    ids, starts = array.array("i"), array.array("q", [0])
    for turn in itertools.chain.from_iterable(turns):
        ids.extend(turn)
        starts.append(len(ids))
    return np.frombuffer(ids, np.int32), np.frombuffer(starts, np.int64)
