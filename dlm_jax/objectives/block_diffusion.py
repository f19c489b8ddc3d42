"""Block diffusion: denoise every block of a row at once, each from its own noise and the clean blocks before it.

The model sees two streams in one pass, [x_t ; x_0]: a noisy token sees its own noisy block and earlier clean blocks,
a clean token the clean blocks up to its own. Only the noisy stream predicts. Blocks are counted from the start of the
row, prompt included, and positions are those of the row in both streams.

Letters: B batch, T tokens.

Source: BD3-LM (arXiv 2503.09573), Algorithm 1 and its clipped noise schedules.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import losses, noise
from dlm_jax.types import Scorer

WEIGHTINGS = ("schedule", "uniform")
TIMES = ("block", "sequence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hyperparameters.

    Attributes:
      mask_id: id of the mask token; None stands for one not known yet, and cannot train.
      eos_id: id of the end of sequence, which fills padding; None as for `mask_id`.
      block_size: tokens.
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
            "time": TIMES, "normalisation": noise.NORMALISATIONS})
        if self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: expected at least 1 token")
        if len(self.interval) != 2 or not 0 <= self.interval[0] < self.interval[1] <= 1:
            raise ValueError(f"interval = {self.interval}: expected two times, 0 <= beta < omega <= 1")


def arrange(rows: noise.Supervision, drawn: noise.Noise, config: Config) -> losses.Rows:
    """Decides what is masked and weighs every prediction; deterministic.

    Args:
      rows: what may be masked.
      drawn: the draws.
      config: hyperparameters.

    Returns:
      Clean rows with a label on every token that the noisy stream masks, and the weight "mdm".
    """
    masked = rows.taught & (drawn.uniform < noise.rate(config.schedule, drawn.time))
    weight = noise.scales(rows.taught, config.normalisation)
    if config.weighting == "schedule":
        weight = weight * noise.weight(config.schedule, drawn.time)
    index = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
    return losses.Rows(rows.tokens, index, rows.valid, jnp.where(masked, rows.tokens, losses.IGNORE),
                       {"mdm": jnp.where(masked, weight, 0.0)})


def prepare(batch: dict[str, Array], key: Array, config: Config) -> losses.Rows:
    """Corrupts a batch.

    Args:
      batch: `tokens` (B, T) int32, `loss_mask` (B, T) bool, `length` and `example_id` (B,) int32.
      key: the step's key.
      config: hyperparameters.

    Returns:
      See `arrange`.

    Raises:
      ValueError: no mask id, or no EOS id to pad with.
    """
    noise.check_ids(config)
    rows = noise.supervise(batch, config.target, config.padding, config.eos_id, config.block_size)
    drawn = noise.draw(
        key, batch["example_id"], batch["tokens"].shape[1], config.interval,
        block=config.block_size if config.time == "block" else None, antithetic=config.antithetic)
    return arrange(rows, drawn, config)


def streams(rows: losses.Rows, config: Config) -> tuple[Array, Array, visibility.Visibility]:
    """Lays the two streams out as one row, [x_t ; x_0].

    Args:
      rows: from `arrange`.
      config: hyperparameters.

    Returns:
      (B, 2 T) int32 tokens, (B, 2 T) int32 positions, and who sees whom.
    """
    noisy = jnp.where(rows.labels != losses.IGNORE, config.mask_id, rows.tokens)
    twice = lambda first, second: jnp.concatenate([first, second], axis=1)
    block = jnp.where(rows.valid, rows.positions // config.block_size, visibility.NONE)
    return twice(noisy, rows.tokens), twice(rows.positions, rows.positions), visibility.block_diffusion(block)


def check(score: Scorer, config: Config) -> None:
    """Raises ValueError for a model that is causal or shifted, or ids that are missing or outside its vocabulary."""
    noise.check_ids(config)
    noise.check_model(score, config)
    if score.shift:
        raise ValueError(
            f"objective {config.name!r} needs a model whose outputs predict their own token, but this one is shifted "
            f"by {score.shift}: the first token of a block would be predicted outside it. Make the model with "
            "`python -m launch.convert_weights to-diffusion --shift 0`")


def rows_loss(score: Scorer, rows: losses.Rows, config: Config) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of prepared rows and its metrics, all sums over rows; see `loss`."""
    check(score, config)
    hidden, _ = score.hidden(*streams(rows, config))
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
