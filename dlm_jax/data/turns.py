"""The encoded rows of a training set, four bytes a token."""

from __future__ import annotations

import array
import itertools
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from dlm_jax.data.sources import Row
from dlm_jax.data.tokenizer import encode_rows

ENCODED_AT_ONCE = 1 << 14  # rows whose ids are Python lists at one time


class Turns(Sequence[tuple[np.ndarray, np.ndarray]]):
    """The ids of every row's prompt and response, in order."""

    def __init__(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase):
        """Encodes the rows.

        Args:
          rows: the training rows.
          tokenizer: a tokenizer with a chat template.

        Raises:
          ValueError: no rows.
        """
        if not rows:
            raise ValueError("no training rows; give at least one")
        parts = (rows[i : i + ENCODED_AT_ONCE] for i in range(0, len(rows), ENCODED_AT_ONCE))
        self._ids, self._starts = _joined(turns for part in parts for turns in encode_rows(tokenizer, part))

    def __len__(self) -> int:
        return len(self._starts) // 2

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a row's prompt and response."""
        start, middle, end = self._starts[2 * row : 2 * row + 3]
        return self._ids[start:middle], self._ids[middle:end]

    @property
    def prompts(self) -> np.ndarray:
        """Tokens of every prompt, (rows,) int64."""
        return np.diff(self._starts)[::2]

    @property
    def responses(self) -> np.ndarray:
        """Tokens of every response, (rows,) int64."""
        return np.diff(self._starts)[1::2]

    def checksum(self) -> int:
        """Returns a number that follows from each row's prompt length, prompt and response, and their order."""
        return zlib.crc32(np.insert(self._ids, self._starts[:-1:2], self.prompts))

    def report(self, length: int) -> dict[str, int]:
        """Says what is lost where a row has room for `length` tokens.

        Returns:
          rows; truncated, rows whose response loses its end; empty, rows left without a supervised token; longest_row
          and supervised_tokens, tokens.
        """
        prompt, whole = self.prompts, self.prompts + self.responses
        return {
            "rows": len(self),
            "truncated": int(np.sum(whole > length)),
            "empty": int(np.sum(prompt >= length)),
            "longest_row": int(whole.max()),
            "supervised_tokens": int(np.maximum(np.minimum(whole, length) - prompt, 0).sum()),
        }

    def check(self, length: int) -> None:
        """Raises ValueError where rows of `length` tokens have no room for 2, or for the beginning of any response."""
        if length < 2:
            raise ValueError(f"length = {length}: a row needs room for at least 2 tokens")
        if not np.any(self.prompts < length):
            raise ValueError(f"length = {length}: no row has a response that fits behind its prompt; the shortest "
                             f"prompt has {self.prompts.min()} tokens")


def _joined(turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Joins all ids: (tokens,) int32, and (2 rows + 1,) int64 where prompts and responses start, and the end."""
    ids, starts = array.array("i"), array.array("q", [0])
    for turn in itertools.chain.from_iterable(turns):
        ids.extend(turn)
        starts.append(len(ids))
    return np.frombuffer(ids, np.int32), np.frombuffer(starts, np.int64)
