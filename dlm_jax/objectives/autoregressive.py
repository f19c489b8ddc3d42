"""Supervised fine-tuning of the autoregressive view: next-token loss on response tokens.

Letters: B batch, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from dlm_jax.objectives import losses
from dlm_jax.scoring import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hyperparameters.

    Attributes:
      head_chunk: tokens a row whose logits are held at a time.
    """

    name: ClassVar[str] = "autoregressive"
    head_chunk: int = 512

    def __post_init__(self):
        if self.head_chunk < 1:
            raise ValueError(f"head_chunk = {self.head_chunk} tokens: expected at least 1")


def prepare(batch: dict[str, Array], key: Array, config: Config) -> losses.Rows:
    """Shifts the labels and weighs every supervised token of the batch alike.

    Args:
      batch: `tokens` (B, T) int32, `loss_mask` (B, T) bool, `length` (B,) int32.
      key: unused; the objective has no randomness.
      config: hyperparameters.

    Returns:
      Rows whose "ar" weights sum to 1, or are all 0 where the batch supervises nothing.
    """
    del key, config
    tokens, length = batch["tokens"], batch["length"]
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    valid = index < length[:, None]
    taught = batch["loss_mask"] & valid
    # a token is predicted by the one before it; the first has none
    ahead = lambda x, fill: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
    labels = jnp.where(ahead(taught, False), ahead(tokens, losses.IGNORE), losses.IGNORE)
    known = (labels != losses.IGNORE).astype(jnp.float32)
    return losses.Rows(tokens, index, valid, labels, {"ar": known / jnp.maximum(jnp.sum(known), 1.0)})


def rows_loss(score: Scorer, rows: losses.Rows, config: Config) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of prepared rows and its metrics, all sums over rows; see `loss`."""
    total = losses.weighted(losses.rows_nll(score, rows, config.head_chunk), rows.weights)["ar"]
    return total, {"loss_ar": total, "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE)}


def loss(score: Scorer, batch: dict[str, Array], key: Array, config: Config) -> tuple[Array, dict[str, Array]]:
    """Mean next-token loss over the supervised tokens of the batch.

    Args:
      score: the model.
      batch: see `prepare`.
      key: unused.
      config: hyperparameters.

    Returns:
      () float32 loss in nats, and scalar metrics.
    """
    return rows_loss(score, prepare(batch, key, config), config)
