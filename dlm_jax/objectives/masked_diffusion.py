"""Masked diffusion: predict the masked tokens of a row from all that is left of it.

LLaDA's pre-training masks any token, its fine-tuning those of the response; Dream continues an autoregressive
checkpoint whose outputs predict the next token. They differ in the data and the model, not in the loss: the shift of
the outputs is the model's (`score.shift`). Answers that will be decoded block by block are learned as such with
`block_length`.

Letters: B batch, T tokens.

Source: LLaDA (arXiv 2502.09992), Eq. 3 and 5, Algorithms 1 and 2; Blockwise SFT (arXiv 2508.19529).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import losses, noise
from dlm_jax.scoring import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hyperparameters.

    Attributes:
      mask_id: id of the mask token; None stands for one not known yet, and cannot train.
      eos_id: id of the end of sequence, which fills padding; None as for `mask_id`.
      target: "response" (fine-tuning) or "all" (pre-training), see `noise.supervise`.
      padding: "eos" or "ignore", see `noise.supervise`.
      eps: least masking probability; a row's is (1 - eps) t + eps, t uniform in [0, 1).
      antithetic: spread t evenly over the batch, see `noise.draw`.
      normalisation: "sequence" (LLaDA's), "token" or "batch", see `noise.scales`.
      random_length: share of rows that are cut to a random length first, for targets "all"; LLaDA's is 0.01.
      block_length: tokens of the one block a row that is masked and predicted, with all before it clean and all after
        it hidden, see `noise.one_block`; 0 masks the whole target.
      head_chunk: tokens a row whose logits are held at a time.
    """

    name: ClassVar[str] = "masked_diffusion"
    mask_id: int | None = None
    eos_id: int | None = None
    target: str = "response"
    padding: str = "eos"
    eps: float = 1e-3
    antithetic: bool = False
    normalisation: str = "sequence"
    random_length: float = 0.0
    block_length: int = 0
    head_chunk: int = 512

    def __post_init__(self):
        noise.check_fields(self, {"target": noise.TARGETS, "padding": noise.PADDINGS,
                                  "normalisation": noise.NORMALISATIONS})
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps = {self.eps}: expected a probability in (0, 1]; at 0 the weight 1 / t is unbounded")
        if not 0 <= self.random_length <= 1:
            raise ValueError(f"random_length = {self.random_length}: expected a share of rows in [0, 1]")
        if not isinstance(self.block_length, int) or self.block_length < 0:
            raise ValueError(f"block_length = {self.block_length}: expected a number of tokens, or 0 for the whole "
                             "target")
        if self.random_length and (self.target, self.padding) != ("all", "ignore"):
            raise ValueError(f"random_length = {self.random_length} cuts rows: it needs target 'all' and padding "
                             f"'ignore', not {self.target!r} and {self.padding!r}")


def arrange(rows: noise.Supervision, drawn: noise.Noise, config: Config) -> losses.Rows:
    """Masks the rows and weighs every prediction; deterministic.

    Args:
      rows: what may be masked.
      drawn: the draws; a token's time is the probability that it is masked.
      config: hyperparameters.

    Returns:
      Rows whose labels stand where their tokens were, with the weight "mdm".
    """
    masked = rows.taught & (drawn.uniform < drawn.time)
    weight = jnp.where(masked, noise.scales(rows.taught, config.normalisation) / drawn.time, 0.0)
    index = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
    return losses.Rows(jnp.where(masked, config.mask_id, rows.tokens), index, rows.valid,
                       jnp.where(masked, rows.tokens, losses.IGNORE), {"mdm": weight})


def prepare(batch: dict[str, Array], key: Array, config: Config) -> losses.Rows:
    """Corrupts a batch.

    Args:
      batch: `tokens` (B, T) int32, `loss_mask` (B, T) bool, `length` and `example_id` (B,) int32; `prompt_length` too
        for blocks of a response.
      key: the step's key.
      config: hyperparameters.

    Returns:
      Rows with the weight "mdm".

    Raises:
      ValueError: no mask id, or no EOS id to pad with.
    """
    noise.check_ids(config)
    if config.random_length:
        batch = batch | {"length": _cut(key, batch, config.random_length)}
    rows = noise.supervise(batch, config.target, config.padding, config.eos_id)
    if config.block_length:
        first = batch["prompt_length"][:, None] if config.target == "response" else 0
        rows = noise.one_block(rows, key, batch, first, config.block_length, config.mask_id)
    drawn = noise.draw(key, batch["example_id"], batch["tokens"].shape[1], (config.eps, 1.0),
                       antithetic=config.antithetic)
    return arrange(rows, drawn, config)


def _cut(key: Array, batch: dict[str, Array], share: float) -> Array:
    """Returns (B,) lengths, some of them uniform between 1 and the row's own."""
    keys = noise.row_keys(key, batch["example_id"], 2)
    chosen, fraction = jax.vmap(lambda k: jax.random.uniform(k, (2,)))(keys).T
    length = batch["length"]
    return jnp.where(chosen < share, jnp.minimum(1 + jnp.floor(fraction * length).astype(jnp.int32), length), length)


def check(score: Scorer, config: Config) -> None:
    """Raises ValueError for a causal model, or ids that are missing or outside its vocabulary."""
    noise.check_ids(config)
    noise.check_model(score, config)


def rows_loss(score: Scorer, rows: losses.Rows, config: Config) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of prepared rows and its metrics, all sums over rows; see `loss`."""
    check(score, config)
    nll = losses.rows_nll(score, rows, config.head_chunk, visibility.bidirectional, score.shift)
    total = losses.weighted(nll, rows.weights)["mdm"]
    return total, {"loss_mdm": total, "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE)}


def loss(score: Scorer, batch: dict[str, Array], key: Array, config: Config) -> tuple[Array, dict[str, Array]]:
    """The masked-diffusion bound on freshly corrupted rows.

    Args:
      score: the model, bidirectional.
      batch: see `prepare`.
      key: the base key folded with the step.
      config: hyperparameters.

    Returns:
      () float32 loss in nats, and scalar metrics.

    Raises:
      ValueError: a causal model, or ids that are missing or outside its vocabulary.

    Source: LLaDA, Eq. 3 and 5.
    """
    return rows_loss(score, prepare(batch, key, config), config)
