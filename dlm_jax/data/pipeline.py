"""Random-access training batches: what a step sees is a function of (rows, seed, step), on any number of hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from dlm_jax.data.sources import Row
from dlm_jax.data.tokenizer import fit_turns
from dlm_jax.data.turns import Turns

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
        self._mine = own_rows(batch_size, process_index, process_count)
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self._turns = Turns(rows, tokenizer)
        self._turns.check(length)
        # of all that decides which rows a step sees
        self._identity = {"rows": len(rows), "checksum": self._turns.checksum(), "batch_size": batch_size,
                          "length": length, "seed": seed}
        self._pad = tokenizer.pad_token_id or 0
        self._order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch_size)
        self._step = 0

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
          What `Turns.report` says; and padding_share, part of the batch area that is padding.
        """
        kept = np.minimum(self._turns.prompts + self._turns.responses, self.length)
        return self._turns.report(self.length) | {"padding_share": float(1 - kept.sum() / (len(kept) * self.length))}

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
        check_position(state, {"step": 0, **self._identity})
        self._step = int(state["step"])


def own_rows(batch_size: int, process_index: int, process_count: int) -> slice:
    """Returns which rows of a global batch are those of one process.

    Args:
      batch_size: rows of the global batch, a multiple of process_count.
      process_index: which process, from 0.
      process_count: number of them.

    Raises:
      ValueError: a batch that does not divide, or no such process.
    """
    if batch_size < 1 or process_count < 1 or batch_size % process_count:
        raise ValueError(f"batch_size = {batch_size} cannot be split over {process_count} processes evenly")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index = {process_index}: expected 0 to {process_count - 1}")
    share = batch_size // process_count
    return slice(process_index * share, (process_index + 1) * share)


def check_position(state: dict[str, Any], here: dict[str, Any], moving: Sequence[str] = ("step",)) -> None:
    """Raises ValueError where a saved position is one in other data, or with other batches.

    Args:
      state: what was saved.
      here: what the pipeline would save now.
      moving: the keys that say where it is, and not in what.
    """
    other = {name: state.get(name) for name in here if name not in moving and state.get(name) != here[name]}
    if other or not set(moving) <= set(state):
        raise ValueError(f"the saved data position belongs to {other}, but this pipeline has "
                         f"{ {name: here[name] for name in other} }; resume with the same rows, tokenizer and batches")
