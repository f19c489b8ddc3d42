"""Random-access training batches: what a step sees is a function of (rows, seed, step), on any number of hosts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from dlm_jax.data.sources import Row
from dlm_jax.data.tokenizer import encode_rows, fit_turns

Batch = dict[str, np.ndarray]


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
        self._turns = encode_rows(tokenizer, rows)
        self._pad = tokenizer.pad_token_id or 0
        share = batch_size // process_count
        self._mine = slice(process_index * share, (process_index + 1) * share)
        self._order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch_size)
        self._step = 0
        if self.report()["empty"] == len(rows):
            raise ValueError(f"length = {length}: no row has a response that fits behind its prompt; the shortest "
                             f"prompt has {min(len(prompt) for prompt, _ in self._turns)} tokens")

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        return len(self._turns)

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
        examples = [fit_turns(*self._turns[i], self.length, self._pad) for i in ids]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        return {**batch, "example_id": ids.astype(np.int32)}

    def report(self) -> dict[str, Any]:
        """Says what an epoch loses and wastes.

        Returns:
          rows; truncated, rows whose response lost its end; empty, rows left without a supervised token;
          padding_share, part of the batch area that is padding; longest_row, tokens; supervised_tokens.
        """
        prompt = np.array([len(p) for p, _ in self._turns])
        whole = prompt + np.array([len(r) for _, r in self._turns])
        kept = np.minimum(whole, self.length)
        return {
            "rows": len(self._turns),
            "truncated": int(np.sum(whole > self.length)),
            "empty": int(np.sum(prompt >= self.length)),
            "padding_share": float(1 - kept.sum() / (len(kept) * self.length)),
            "longest_row": int(whole.max()),
            "supervised_tokens": int(np.maximum(kept - prompt, 0).sum()),
        }

    def _identity(self) -> dict[str, int]:
        """Everything that decides which rows a step sees."""
        checksum = 0
        for prompt, response in self._turns:
            checksum = zlib.crc32(np.asarray([len(prompt), *prompt, *response], np.int32).tobytes(), checksum)
        return {"rows": len(self._turns), "checksum": checksum, "batch_size": self.batch_size,
                "length": self.length, "seed": self.seed}

    def state(self) -> dict[str, int]:
        """Returns the position (the same on every host) and what it is a position in, as plain integers."""
        return {"step": self._step, **self._identity()}

    def restore(self, state: dict[str, int]) -> None:
        """Continues from a position.

        Args:
          state: what `state` returned.

        Raises:
          ValueError: the position is one in other data, or with other batches.
        """
        mine = self._identity()
        other = {name: state.get(name) for name in mine if state.get(name) != mine[name]}
        if other or "step" not in state:
            here = {name: mine[name] for name in other}
            raise ValueError(f"the saved data position belongs to {other}, but this pipeline has {here}; "
                             "resume with the same rows, tokenizer and batches")
        self._step = int(state["step"])
