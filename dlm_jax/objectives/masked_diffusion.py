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
from dlm_jax.objectives import documents, losses, noise
from dlm_jax.scoring import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDiffusion(noise.Denoising):
    """The masked-diffusion bound on freshly corrupted rows.

    Attributes:
      eps: least masking probability; a row's is (1 - eps) t + eps, t uniform in [0, 1).
      random_length: share of rows that are cut to a random length first, for targets "all"; LLaDA's is 0.01.
      random_canvas: share of rows whose answer is followed by EOS tokens up to a random place of the batch's width, for
        padding "eos"; the others' end with the batch's longest row. Canvases of any length are then known to a model.
      block_length: tokens of the one block a row that is masked and predicted, with all before it clean and all after
        it hidden, see `noise.one_block`; 0 masks the whole target.
    """

    name: ClassVar[str] = "masked_diffusion"
    eps: float = 1e-3
    random_length: float = 0.0
    random_canvas: float = 0.0
    block_length: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps = {self.eps}: expected a probability in (0, 1]; at 0 the weight 1 / t is unbounded")
        if not 0 <= self.random_length <= 1:
            raise ValueError(f"random_length = {self.random_length}: expected a share of rows in [0, 1]")
        if not 0 <= self.random_canvas <= 1:
            raise ValueError(f"random_canvas = {self.random_canvas}: expected a share of rows in [0, 1]")
        if self.random_canvas and (self.padding != "eos" or self.block_length):
            raise ValueError(f"random_canvas = {self.random_canvas} lengthens whole answers by EOS tokens: it needs "
                             f"padding 'eos' and block_length 0, not {self.padding!r} and {self.block_length}")
        if not isinstance(self.block_length, int) or self.block_length < 0:
            raise ValueError(f"block_length = {self.block_length}: expected a number of tokens, or 0 for the whole "
                             "target")
        if self.random_length and (self.target, self.padding) != ("all", "ignore"):
            raise ValueError(f"random_length = {self.random_length} cuts rows: it needs target 'all' and padding "
                             f"'ignore', not {self.target!r} and {self.padding!r}")

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return (*super().reads, *(("prompt_length",) if self.block_length and self.target == "response" else ()))

    def prepare(self, batch: dict[str, Array], key: Array) -> losses.Rows:
        """Returns corrupted rows with the weight "mdm"."""
        self.check_batch(batch)
        return documents.each(batch, lambda batch: self._rows(batch, key))

    def _rows(self, batch: dict[str, Array], key: Array) -> losses.Rows:
        if self.random_length:
            batch = batch | {"length": _cut(key, batch, self.random_length)}
        end = _canvas(key, batch, self.random_canvas) if self.random_canvas else None
        rows = noise.supervise(batch, self.target, self.padding, self.eos_id, end=end)
        if self.block_length:
            first = batch["prompt_length"][:, None] if self.target == "response" else 0
            rows = noise.one_block(rows, key, batch, first, self.block_length, self.mask_id)
        drawn = noise.draw(key, batch["example_id"], batch["tokens"].shape[1], (self.eps, 1.0),
                           antithetic=self.antithetic, exists=batch["length"] > 0)
        return arrange(rows, drawn, self)

    def rows_loss(self, score: Scorer, rows: losses.Rows) -> tuple[Array, dict[str, Array]]:
        """See `Objective.rows_loss`."""
        self.check(score)
        nll = losses.rows_nll(score, rows, self.head_chunk, visibility.bidirectional, score.shift)
        total = losses.weighted(nll, rows.weights)["mdm"]
        return total, {"loss_mdm": total, "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE)}


def arrange(rows: noise.Supervision, drawn: noise.Noise, objective: MaskedDiffusion) -> losses.Rows:
    """Masks the rows and weighs every prediction; deterministic.

    Args:
      rows: what may be masked.
      drawn: the draws; a token's time is the probability that it is masked.
      objective: whose mask and normalisation.

    Returns:
      Rows whose labels stand where their tokens were, with the weight "mdm".
    """
    masked = rows.taught & (drawn.uniform < drawn.time)
    scale = noise.scales(rows.taught, objective.normalisation, jnp.any(rows.valid, axis=1))
    weight = jnp.where(masked, scale / drawn.time, 0.0)
    index = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
    return losses.Rows(jnp.where(masked, objective.mask_id, rows.tokens), index, rows.valid,
                       jnp.where(masked, rows.tokens, losses.IGNORE), {"mdm": weight})


def _cut(key: Array, batch: dict[str, Array], share: float) -> Array:
    """Returns (B,) lengths, some of them uniform between 1 and the row's own."""
    keys = noise.row_keys(key, batch["example_id"], 2)
    chosen, fraction = jax.vmap(lambda k: jax.random.uniform(k, (2,)))(keys).T
    length = batch["length"]
    return jnp.where(chosen < share, jnp.minimum(1 + jnp.floor(fraction * length).astype(jnp.int32), length), length)


def _canvas(key: Array, batch: dict[str, Array], share: float) -> Array:
    """Returns (B, 1) tokens of each row and what follows it, some of them uniform between the row's and the batch's."""
    keys = noise.row_keys(key, batch["example_id"], 4)
    chosen, fraction = jax.vmap(lambda k: jax.random.uniform(k, (2,)))(keys).T
    length, longest = batch["length"], jnp.max(batch["length"])
    room = batch["tokens"].shape[1] - length
    drawn = length + jnp.minimum(jnp.floor(fraction * (room + 1)).astype(jnp.int32), room)
    return jnp.where((chosen < share) & (length > 0), drawn, longest)[:, None]
