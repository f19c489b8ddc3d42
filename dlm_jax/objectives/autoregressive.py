"""Supervised fine-tuning of the autoregressive view: mean next-token loss over the batch's supervised tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from dlm_jax.objectives import documents, losses
from dlm_jax.objectives.base import Objective
from dlm_jax.scoring import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoregressive(Objective):
    """Next-token prediction; it draws nothing, and every supervised token of a batch weighs alike."""

    name: ClassVar[str] = "autoregressive"

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return "tokens", "loss_mask", "length"

    def prepare(self, batch: dict[str, Array], key: Array) -> losses.Rows:
        """Returns rows whose "ar" weights sum to 1, or are all 0 where the batch supervises nothing."""
        del key
        self.check_batch(batch)
        return documents.each(batch, self._rows)

    def _rows(self, batch: dict[str, Array]) -> losses.Rows:
        tokens, length = batch["tokens"], batch["length"]
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        valid = index < length[:, None]
        taught = batch["loss_mask"] & valid
        # a token is predicted by the one before it; the first has none
        ahead = lambda x, fill: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
        labels = jnp.where(ahead(taught, False), ahead(tokens, losses.IGNORE), losses.IGNORE)
        known = (labels != losses.IGNORE).astype(jnp.float32)
        return losses.Rows(tokens, index, valid, labels, {"ar": known / jnp.maximum(jnp.sum(known), 1.0)})

    def rows_loss(self, score: Scorer, rows: losses.Rows) -> tuple[Array, dict[str, Array]]:
        """See `Objective.rows_loss`."""
        total = losses.weighted(losses.rows_nll(score, rows, self.head_chunk), rows.weights)["ar"]
        return total, {"loss_ar": total, "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE)}
