"""Block diffusion: denoise every block of a row at once, each from its own noise and the clean blocks before it.

The model sees two streams in one pass, [x_t ; x_0]: a noisy token sees its own noisy block and earlier clean blocks,
a clean token the clean blocks up to its own. Only the noisy stream predicts; positions are those of the row in both
streams. By default a block begins where the response does, as when an answer is decoded: the prompt's blocks end there,
and its first may be short.

Letters: B batch, T tokens.

Source: BD3-LM (arXiv 2503.09573), Algorithm 1 and its clipped noise schedules.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import losses, noise
from dlm_jax.scoring import Pass, Scorer

WEIGHTINGS = ("schedule", "uniform")
TIMES = ("block", "sequence")
ALIGNMENTS = ("response", "row")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hyperparameters.

    Attributes:
      mask_id: id of the mask token; None stands for one not known yet, and cannot train.
      eos_id: id of the end of sequence, which fills padding; None as for `mask_id`.
      block_size: tokens.
      align: where a block begins, at the "response", or with the "row" as in the released code.
      target: "response" (fine-tuning) or "all" (pre-training), see `noise.supervise`.
      padding: "eos", to the end of the longest row's last block, or "ignore"; see `noise.supervise`.
      schedule: "linear" or "cosine", see `noise.rate`.
      interval: (beta, omega), least and largest time; narrower than the whole, the loss varies less and is no bound.
      weighting: "schedule", see `noise.weight`; or "uniform", 1.
      time: a time for every "block", as in the paper, or one for the whole "sequence".
      antithetic: spread times evenly over the batch, see `noise.draw`.
      normalisation: "token", "sequence" or "batch", see `noise.scales`.
      head_chunk: tokens a row whose logits are held at a time.
    """

    name: ClassVar[str] = "block_diffusion"
    mask_id: int | None = None
    eos_id: int | None = None
    block_size: int = 32
    align: str = "response"
    target: str = "response"
    padding: str = "eos"
    schedule: str = "linear"
    interval: tuple[float, float] = (1e-3, 1.0)
    weighting: str = "schedule"
    time: str = "block"
    antithetic: bool = False
    normalisation: str = "token"
    head_chunk: int = 512

    def __post_init__(self):
        noise.check_fields(self, {
            "target": noise.TARGETS, "padding": noise.PADDINGS, "schedule": noise.SCHEDULES, "weighting": WEIGHTINGS,
            "time": TIMES, "align": ALIGNMENTS, "normalisation": noise.NORMALISATIONS})
        if self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: expected at least 1 token")
        if len(self.interval) != 2 or not 0 <= self.interval[0] < self.interval[1] <= 1:
            raise ValueError(f"interval = {self.interval}: expected two times, 0 <= beta < omega <= 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the objective asks of the model.

    Attributes:
      tokens: (B, T) int32 clean ids.
      block: (B, T) int32 block number of each token, negative on padding.
      labels: (B, T) int32 the id of each token that the noisy stream masks, `losses.IGNORE` elsewhere.
      weights: "mdm", (B, T) float32 weight of each prediction.
    """

    tokens: Array
    block: Array
    labels: Array
    weights: dict[str, Array]


def arrange(rows: noise.Supervision, block: Array, drawn: noise.Noise, config: Config) -> Rows:
    """Decides what is masked and weighs every prediction; deterministic.

    Args:
      rows: what may be masked.
      block: (B, T) int32 block numbers.
      drawn: the draws.
      config: hyperparameters.

    Returns:
      The rows with the weight "mdm".
    """
    masked = rows.taught & (drawn.uniform < noise.rate(config.schedule, drawn.time))
    weight = noise.scales(rows.taught, config.normalisation)
    if config.weighting == "schedule":
        weight = weight * noise.weight(config.schedule, drawn.time)
    return Rows(rows.tokens, jnp.where(rows.valid, block, visibility.NONE),
                jnp.where(masked, rows.tokens, losses.IGNORE), {"mdm": jnp.where(masked, weight, 0.0)})


def prepare(batch: dict[str, Array], key: Array, config: Config) -> Rows:
    """Corrupts a batch.

    Args:
      batch: `tokens` (B, T) int32, `loss_mask` (B, T) bool, `prompt_length`, `length` and `example_id` (B,) int32.
      key: the step's key.
      config: hyperparameters.

    Returns:
      See `arrange`.

    Raises:
      ValueError: no mask id, or no EOS id to pad with.
    """
    noise.check_ids(config)
    (B, T), K = batch["tokens"].shape, config.block_size
    first = (batch["prompt_length"] if config.align == "response" else jnp.zeros(B, jnp.int32))[:, None]
    # ceil(first / K) blocks lie before it
    block = (jnp.arange(T, dtype=jnp.int32) - first) // K - (-first // K)
    rows = noise.supervise(batch, config.target, config.padding, config.eos_id, K, first)
    drawn = noise.draw(key, batch["example_id"], T, config.interval, block=block if config.time == "block" else None,
                       antithetic=config.antithetic)
    return arrange(rows, block, drawn, config)


def streams(rows: Rows, config: Config) -> tuple[Array, Array, visibility.Visibility]:
    """Lays the two streams out as one row, [x_t ; x_0].

    Args:
      rows: from `arrange`.
      config: hyperparameters.

    Returns:
      (B, 2 T) int32 tokens, (B, 2 T) int32 positions, and who sees whom.
    """
    noisy = jnp.where(rows.labels != losses.IGNORE, config.mask_id, rows.tokens)
    tokens = jnp.concatenate([noisy, rows.tokens], axis=1)
    index = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    return tokens, jnp.broadcast_to(jnp.tile(index, 2), tokens.shape), visibility.block_diffusion(rows.block)


def check(score: Scorer, config: Config) -> None:
    """Raises ValueError for a model that is causal or shifted, or ids that are missing or outside its vocabulary."""
    noise.check_ids(config)
    noise.check_model(score, config)
    if score.shift:
        raise ValueError(
            f"objective {config.name!r} needs a model whose outputs predict their own token, but this one is shifted "
            f"by {score.shift}: the first token of a block would be predicted outside it. Make the model with "
            "`python -m launch.convert_weights to-diffusion --shift 0`")


def rows_loss(score: Scorer, rows: Rows, config: Config) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of prepared rows and its metrics, all sums over rows; see `loss`."""
    check(score, config)
    tokens, positions, rule = streams(rows, config)
    hidden, _ = score.hidden(tokens, Pass(positions, rule))
    nll = losses.head_nll(score, hidden[:, : rows.labels.shape[1]], rows.labels, config.head_chunk)
    total = losses.weighted(nll, rows.weights)["mdm"]
    return total, {"loss_mdm": total, "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE)}


def loss(score: Scorer, batch: dict[str, Array], key: Array, config: Config) -> tuple[Array, dict[str, Array]]:
    """The block-diffusion bound on freshly corrupted rows.

    Args:
      score: the model, bidirectional and without shift.
      batch: see `prepare`.
      key: the base key folded with the step.
      config: hyperparameters.

    Returns:
      () float32 loss in nats, and scalar metrics.

    Raises:
      ValueError: a causal or shifted model, or ids that are missing or outside its vocabulary.

    Source: BD3-LM, Algorithm 1.
    """
    return rows_loss(score, prepare(batch, key, config), config)
