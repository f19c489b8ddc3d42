"""What every objective is: a frozen object of hyperparameters that makes rows of a batch, and a loss of rows.

`prepare` sees the whole batch and fixes what is predicted and the weight of every prediction, already normalised;
`rows_loss` returns a loss and metrics that are sums over rows, so rows may be scored in pieces. Both are pure.

Letters: B batch, T tokens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from jax import Array

from dlm_jax.scoring import Scorer

# what a batch may hold; `dlm_jax.data.pipeline.Pipeline` yields them all
KEYS = {
    "tokens": "(B, T) int32 ids, padded on the right",
    "loss_mask": "(B, T) bool, True where a token is supervised",
    "prompt_length": "(B,) int32 tokens before the response",
    "length": "(B,) int32 tokens of prompt and response",
    "example_id": "(B,) int32 number of the row, which its draws follow",
}
# what a packed batch holds beside them; its (B,) arrays are then (B, N), an entry for each of a row's documents
PACKED_KEYS = {
    "documents": "(B, T) int32 number of each token's document in its row, negative on padding",
    "positions": "(B, T) int32 place of each token in its document",
    "start": "(B, N) int32 index of the first token of each document, 0 where there is none",
}


def require(batch: dict[str, Any], keys: Sequence[str], reader: str) -> None:
    """Raises ValueError where a batch lacks a key, with what it is and what there was.

    Args:
      batch: arrays by key.
      keys: of `KEYS` or `PACKED_KEYS`.
      reader: who asks, for the message.
    """
    for key in keys:
        if key not in batch:
            what, source = (KEYS[key], "pipeline.Pipeline") if key in KEYS else (PACKED_KEYS[key], "packing.Packer")
            raise ValueError(f"{reader} reads batch[{key!r}], {what}, but the batch has only {sorted(batch)}: add it, "
                             f"or take batches from dlm_jax.data.{source}")


def choice(name: str, value: str, accepted: Sequence[str]) -> None:
    """Raises ValueError for a value that is none of the accepted ones."""
    if value not in accepted:
        raise ValueError(f"{name} {value!r}: expected one of {tuple(accepted)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(abc.ABC):
    """What is minimised; subclass it to bring your own.

    Attributes:
      name: what runs and messages call it.
      trains: view of a dual model whose own parameters it trains, and no others; None leaves the choice to the run.
      ids: the fields that hold special token ids, "mask_id" or "eos_id"; None in one stands for an id not known yet.
      choices: the accepted values of the fields that name a choice.
      block_size: tokens of the blocks that its models are decoded in, None where they have none.
      head_chunk: predictions a row whose logits are held at a time.
    """

    name: ClassVar[str]
    trains: ClassVar[str | None] = None
    ids: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    block_size: ClassVar[int | None] = None
    head_chunk: int = 512

    def __post_init__(self):
        for field, accepted in self.choices.items():
            choice(field, getattr(self, field), accepted)
        for field in self.ids:
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ValueError(f"{field} = {value}: expected the id of a token, 0 or more")
        if self.head_chunk < 1:
            raise ValueError(f"head_chunk = {self.head_chunk} tokens: expected at least 1")

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of a batch that `prepare` reads."""
        return "tokens", "length", "example_id"

    @property
    def unit(self) -> int:
        """Tokens that every document of a packed row starts at a multiple of."""
        return 1

    def settles(self) -> dict[str, Any]:
        """Returns the fields of the model's config that training with it settles."""
        return {"block_size": self.block_size} if self.masks and self.block_size is not None else {}

    @abc.abstractmethod
    def prepare(self, batch: dict[str, Array], key: Array) -> Any:
        """Makes the rows of a batch.

        Args:
          batch: arrays by key, see `KEYS` and `reads`.
          key: the base key folded with the step.

        Returns:
          A tree of arrays that lead with B.

        Raises:
          ValueError: see `check_batch`.
        """

    @abc.abstractmethod
    def rows_loss(self, score: Scorer, rows: Any) -> tuple[Array, dict[str, Array]]:
        """Returns the loss of prepared rows and its metrics, all sums over rows; see `loss`."""

    def loss(self, score: Scorer, batch: dict[str, Array], key: Array) -> tuple[Array, dict[str, Array]]:
        """Prepares a batch and scores it whole.

        Args:
          score: the model.
          batch, key: see `prepare`.

        Returns:
          () float32 loss in nats, and scalar metrics.

        Raises:
          ValueError: see `check` and `check_batch`.
        """
        self.check(score)  # before anything is computed
        return self.rows_loss(score, self.prepare(batch, key))

    def check(self, score: Scorer) -> None:
        """Raises ValueError for a model that it cannot train, or ids that are missing or outside its vocabulary."""
        self.check_ids()
        for field in self.ids:
            value = getattr(self, field)
            if value is not None and value >= score.vocab_size:
                raise ValueError(f"{field} = {value} lies outside the vocabulary of {score.vocab_size} ids")

    @property
    def masks(self) -> bool:
        """Whether it trains a model to say what masks stand for."""
        return "mask_id" in self.ids

    def check_ids(self) -> None:
        """Raises ValueError where an id that it needs is None."""
        if self.masks and self.mask_id is None:
            raise ValueError("mask_id is None: give the id of the model's mask token, its config's mask_token_id")

    def check_batch(self, batch: dict[str, Array]) -> None:
        """Raises ValueError where an id is None, or the batch lacks a key that `prepare` reads."""
        self.check_ids()
        keys = (*self.reads, *(PACKED_KEYS if "documents" in batch else ()))
        require(batch, keys, f"objective {self.name!r}")
