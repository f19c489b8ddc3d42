"""Block diffusion: denoise every block of a row at once, each from its own noise and the clean blocks before it.

The model sees two streams in one pass, [x_0 ; x_t]: a noisy token sees its own noisy block and earlier clean blocks,
a clean token the clean blocks up to its own. Only the noisy stream predicts; positions are those of the row in both
streams. By default a block begins where the response does, as when an answer is decoded: the prompt's blocks end there,
and its first may be short.

Letters: B batch, T tokens.

Source: BD3-LM (arXiv 2503.09573), Algorithm 1 and its clipped noise schedules.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import documents, losses, noise
from dlm_jax.scoring import Pass, Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDiffusion(noise.Denoising):
    """The block-diffusion bound on freshly corrupted rows, for a bidirectional model without shift.

    Padding by "eos" goes to the end of the longest row's last block.

    Attributes:
      block_size: tokens.
      align: where a block begins, at the "response", or with the "row" as in the released code.
      schedule: "linear" or "cosine", see `noise.rate`.
      interval: (beta, omega), least and largest time; narrower than the whole, the loss varies less and is no bound.
      weighting: "schedule", see `noise.weight`; or "uniform", 1.
      time: a time for every "block", as in the paper, or one for the whole "sequence".

    Source: BD3-LM, Algorithm 1.
    """

    name: ClassVar[str] = "block_diffusion"
    choices: ClassVar[dict[str, tuple[str, ...]]] = noise.Denoising.choices | {
        "schedule": noise.SCHEDULES, "weighting": ("schedule", "uniform"), "time": ("block", "sequence"),
        "align": ("response", "row")}
    block_size: int = 32
    align: str = "response"
    schedule: str = "linear"
    interval: tuple[float, float] = (1e-3, 1.0)
    weighting: str = "schedule"
    time: str = "block"
    normalisation: str = "token"

    def __post_init__(self):
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: expected at least 1 token")
        if len(self.interval) != 2 or not 0 <= self.interval[0] < self.interval[1] <= 1:
            raise ValueError(f"interval = {self.interval}: expected two times, 0 <= beta < omega <= 1")

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return (*super().reads, *(("prompt_length",) if self.align == "response" else ()))

    def check(self, score: Scorer) -> None:
        """See `Objective.check`."""
        super().check(score)
        if score.shift:
            raise ValueError(
                f"objective {self.name!r} needs a model whose outputs predict their own token, but this one is shifted "
                f"by {score.shift}: the first token of a block would be predicted outside it. Make the model with "
                "`python -m launch.convert_weights to-diffusion --shift 0`")

    def prepare(self, batch: dict[str, Array], key: Array) -> Rows:
        """Returns corrupted rows with the weight "mdm"."""
        self.check_batch(batch)
        return documents.each(batch, lambda batch: self._rows(batch, key))

    def _rows(self, batch: dict[str, Array], key: Array) -> Rows:
        (B, T), K = batch["tokens"].shape, self.block_size
        first = (batch["prompt_length"] if self.align == "response" else jnp.zeros(B, jnp.int32))[:, None]
        # ceil(first / K) blocks lie before it
        block = (jnp.arange(T, dtype=jnp.int32) - first) // K - (-first // K)
        rows = noise.supervise(batch, self.target, self.padding, self.eos_id, K, first)
        drawn = noise.draw(key, batch["example_id"], T, self.interval, block=block if self.time == "block" else None,
                           antithetic=self.antithetic, exists=batch["length"] > 0)
        return arrange(rows, block, drawn, self)

    def rows_loss(self, score: Scorer, rows: Rows) -> tuple[Array, dict[str, Array]]:
        """See `Objective.rows_loss`."""
        self.check(score)
        tokens, positions, rule = streams(rows, self)
        hidden, _ = score.hidden(tokens, Pass(positions, rule))
        nll = losses.head_nll(score, hidden[:, rows.labels.shape[1] :], rows.labels, self.head_chunk)
        total = losses.weighted(nll, rows.weights)["mdm"]
        return total, {"loss_mdm": total, "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE)}


@struct.dataclass
class Rows:
    """What the objective asks of the model.

    Attributes:
      tokens: (B, T) int32 clean ids.
      positions: (B, T) int32.
      block: (B, T) int32 block number of each token, negative on padding.
      labels: (B, T) int32 the id of each token that the noisy stream masks, `losses.IGNORE` elsewhere.
      weights: "mdm", (B, T) float32 weight of each prediction.
      documents: (B, T) int32 document number of each token of a packed row; None where a row is one document.
    """

    tokens: Array
    positions: Array
    block: Array
    labels: Array
    weights: dict[str, Array]
    documents: Array | None = None


def arrange(rows: noise.Supervision, block: Array, drawn: noise.Noise, objective: BlockDiffusion) -> Rows:
    """Decides what is masked and weighs every prediction; deterministic.

    Args:
      rows: what may be masked.
      block: (B, T) int32 block numbers.
      drawn: the draws.
      objective: whose schedule and normalisation.

    Returns:
      The rows with the weight "mdm".
    """
    masked = rows.taught & (drawn.uniform < noise.rate(objective.schedule, drawn.time))
    weight = noise.scales(rows.taught, objective.normalisation, jnp.any(rows.valid, axis=1))
    if objective.weighting == "schedule":
        weight = weight * noise.weight(objective.schedule, drawn.time)
    index = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
    return Rows(rows.tokens, index, jnp.where(rows.valid, block, visibility.NONE),
                jnp.where(masked, rows.tokens, losses.IGNORE), {"mdm": jnp.where(masked, weight, 0.0)})


def streams(rows: Rows, objective: BlockDiffusion) -> tuple[Array, Array, visibility.Visibility]:
    """Lays the two streams out as one row, [x_0 ; x_t].

    Args:
      rows: from `arrange`.
      objective: whose mask.

    Returns:
      (B, 2 T) int32 tokens, (B, 2 T) int32 positions, and who sees whom.
    """
    noisy = jnp.where(rows.labels != losses.IGNORE, objective.mask_id, rows.tokens)
    tokens = jnp.concatenate([rows.tokens, noisy], axis=1)
    return tokens, jnp.tile(rows.positions, (1, 2)), visibility.two_stream(rows.block, rows.documents)
