"""What masked objectives share: when each token is noised, how likely it is then masked, and who counts.

Time t runs from 0, clean, to 1, all masked. Three steps: `draw` fixes a row's times and one uniform number a token,
`supervise` says which tokens may be masked, `scales` turns counts into the normalisation of the loss. What a row
draws follows its example id, so that neither its neighbours nor the number of devices change it.

Letters: B batch, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.objectives import documents
from dlm_jax.objectives.base import Objective
from dlm_jax.scoring import Scorer

TARGETS = ("response", "all")
PADDINGS = ("eos", "ignore")
NORMALISATIONS = ("sequence", "token", "batch")
SCHEDULES = ("linear", "cosine")
_TINY = 1e-6  # keeps -alpha' / (1 - alpha) finite at t = 0, as the released code does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Denoising(Objective):
    """What objectives of bidirectional denoisers have in common.

    Attributes:
      mask_id: id of the mask token; None stands for one not known yet, and cannot train.
      eos_id: id of the end of sequence, which fills padding; None as for `mask_id`.
      target: "response" (fine-tuning) or "all" (pre-training), see `supervise`.
      padding: "eos" or "ignore", see `supervise`.
      antithetic: spread times evenly over the batch, see `draw`.
      normalisation: "sequence", "token" or "batch", see `scales`.
    """

    ids: ClassVar[tuple[str, ...]] = ("mask_id", "eos_id")
    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "target": TARGETS, "padding": PADDINGS, "normalisation": NORMALISATIONS}
    mask_id: int | None = None
    eos_id: int | None = None
    target: str = "response"
    padding: str = "eos"
    antithetic: bool = False
    normalisation: str = "sequence"

    def __post_init__(self):
        super().__post_init__()
        if self.mask_id is not None and self.mask_id == self.eos_id:
            raise ValueError(f"mask_id = eos_id = {self.mask_id}: the mask must be another token than the end of "
                             "sequence")

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return (*super().reads, *(("loss_mask",) if self.target == "response" else ()))

    def check_ids(self) -> None:
        """See `Objective.check_ids`."""
        super().check_ids()
        if self.eos_id is None and self.padding == "eos":
            raise ValueError("eos_id is None: give the id of the model's end of sequence, or padding='ignore'")

    def check_batch(self, batch: dict[str, Array]) -> None:
        """Raises ValueError also for packed rows that are to be filled."""
        super().check_batch(batch)
        if self.padding == "eos" and documents.packed(batch):
            raise ValueError("padding = 'eos' fills rows up to the longest, and the documents of packed rows stand one "
                             "after another: give padding='ignore'")

    def check(self, score: Scorer) -> None:
        """See `Objective.check`."""
        super().check(score)
        if not score.bidirectional:
            raise ValueError(f"objective {self.name!r} needs a bidirectional model, but this one is causal: make one "
                             "of its weights with `python -m launch.convert_weights to-diffusion`")


@struct.dataclass
class Noise:
    """The draws of a batch.

    Attributes:
      time: (B, T) float32 t of each token.
      uniform: (B, T) float32 in [0, 1); a token is masked where it lies below the masking rate at its time.
    """

    time: Array
    uniform: Array


@struct.dataclass
class Supervision:
    """Rows before noise; every field is (B, T).

    Attributes:
      tokens: int32 ids, padding replaced by EOS where it is supervised.
      valid: bool, False on padding.
      taught: bool, tokens that may be masked and predicted.
    """

    tokens: Array
    valid: Array
    taught: Array


def row_keys(key: Array, example_id: Array, use: int) -> Array:
    """Returns a key for every row.

    Args:
      key: the step's key.
      example_id: (B,) int32.
      use: number of what the keys are for; other numbers give independent keys.
    """
    return jax.vmap(lambda example: jax.random.fold_in(jax.random.fold_in(key, example), use))(example_id)


def draw(
    key: Array, example_id: Array, length: int, interval: tuple[float, float], *, block: Array | None = None,
    antithetic: bool = False, exists: Array | None = None,
) -> Noise:
    """Draws the times and thresholds of a batch, each row from its own keys.

    Args:
      key: the step's key.
      example_id: (B,) int32.
      length: T.
      interval: least and largest time; t is uniform between them.
      block: (B, T) int32 in 0..T - 1, tokens of a row with equal numbers share a time; None for one time a row.
      antithetic: spread the times of the batch evenly over the interval, from one random offset a step: the time of
        a row then follows its place in the batch, and the loss varies less from batch to batch.
      exists: (B,) bool, False for rows that are wholly padding and take no place; None where there are none.

    Returns:
      The draws.
    """
    B, times = example_id.shape[0], 1 if block is None else length
    each = lambda use, size: jax.vmap(lambda k: jax.random.uniform(k, (size,)))(row_keys(key, example_id, use))
    if antithetic:
        number = jnp.arange(B, dtype=jnp.int32) if exists is None else jnp.cumsum(exists) - exists
        rows = B if exists is None else jnp.maximum(jnp.sum(exists), 1)
        place = number[:, None] + rows * jnp.arange(times, dtype=jnp.int32)
        time = (jax.random.uniform(key) + place / (rows if block is None else rows * (jnp.max(block) + 1))) % 1.0
    else:
        time = each(0, times)
    low, high = interval
    time = low + (high - low) * (time if block is None else jnp.take_along_axis(time, block, axis=1))
    return Noise(jnp.broadcast_to(time, (B, length)), each(1, length))


def rate(schedule: str, time: Array) -> Array:
    """Returns 1 - alpha(t), the probability that a token of time t is masked.

    Args:
      schedule: "linear", t; or "cosine", cos((1 - t) pi / 2).
      time: (...) float32.
    """
    return time if schedule == "linear" else jnp.cos(jnp.pi / 2 * (1 - time))


def weight(schedule: str, time: Array) -> Array:
    """Returns -alpha'(t) / (1 - alpha(t)), the weight of a masked token in the bound; 1 / t for "linear".

    Args:
      schedule: see `rate`.
      time: (...) float32.

    Source: MDLM (arXiv 2406.07524).
    """
    slope = jnp.ones_like(time) if schedule == "linear" else jnp.pi / 2 * jnp.sin(jnp.pi / 2 * (1 - time))
    return slope / (rate(schedule, time) + _TINY)


def supervise(
    batch: dict[str, Array], target: str, padding: str, eos_id: int | None, block_size: int = 1, first: Array | int = 0,
    end: Array | None = None
) -> Supervision:
    """Says which tokens may be masked.

    Args:
      batch: `tokens` (B, T) int32, `loss_mask` (B, T) bool, `length` (B,) int32.
      target: "response" for the tokens of `loss_mask`, the prompt is never masked; "all" for every token.
      padding: "eos" makes what is missing to the batch's longest row EOS tokens that are taught like any other, so
        that a model learns where answers end; "ignore" leaves padding out.
      eos_id: of "eos".
      block_size: of blocks that are filled to their end, tokens.
      first: (B, 1) int32 or int, a token at which a block begins.
      end: (B, 1) int32 tokens of a row with the EOS tokens of "eos"; None for those of the longest row.

    Returns:
      The rows.

    Source: LLaDA (arXiv 2502.09992), Sec. 2.3 for "eos".
    """
    tokens, T = batch["tokens"], batch["tokens"].shape[1]
    index = jnp.arange(T, dtype=jnp.int32)[None]
    own = index < batch["length"][:, None]
    taught = own & (batch["loss_mask"] if target == "response" else True)
    if padding == "ignore":
        return Supervision(tokens, own, taught)
    if end is None:
        end = first - (first - jnp.max(batch["length"])) // block_size * block_size
    filled = jnp.broadcast_to(index < end, own.shape)
    return Supervision(jnp.where(filled & ~own, eos_id, tokens), filled, taught | (filled & ~own))


def one_block(rows: Supervision, key: Array, batch: dict[str, Array], first: Array | int, block_length: int,
              mask_id: int) -> Supervision:
    """Leaves one block of every row to teach: what lies before it is clean, as when it is decoded, and the rest hidden.

    Args:
      rows: before noise; what a row teaches is contiguous.
      key: the step's key; a row's block is uniform among those that hold taught tokens of its own, and not padding
        alone, of which there is more beside longer rows.
      batch: `length` and `example_id` (B,) int32.
      first: (B, 1) int32 or int, a token at which a block begins.
      block_length: tokens.
      mask_id: what later tokens are replaced by.

    Returns:
      The rows, of which only the block's tokens are taught.

    Source: Blockwise SFT (arXiv 2508.19529).
    """
    T = rows.tokens.shape[1]
    number = (jnp.arange(T, dtype=jnp.int32) - first) // block_length
    low = jnp.min(jnp.where(rows.taught, number, T), axis=1, keepdims=True)  # above `high` where nothing is taught
    own = rows.taught & (jnp.arange(T) < batch["length"][:, None])
    high = jnp.max(jnp.where(own, number, -1), axis=1, keepdims=True)
    place = jax.vmap(jax.random.uniform)(row_keys(key, batch["example_id"], 3))[:, None]
    active = low + jnp.floor(place * (high - low + 1)).astype(jnp.int32)
    return Supervision(jnp.where(rows.taught & (number > active), mask_id, rows.tokens), rows.valid,
                       rows.taught & (number == active))


def scales(taught: Array, normalisation: str, exists: Array | None = None) -> Array:
    """Returns the factor on every token's weighted loss.

    Args:
      taught: (B, T) bool.
      normalisation: "sequence", each row by its own taught tokens and then the mean over rows, LLaDA's; "token", the
        mean over all taught tokens; "batch", the sum over tokens, the mean over rows.
      exists: (B,) bool, False for rows that are wholly padding and no rows of that mean; None where there are none.

    Returns:
      (B, 1) float32; a row that teaches nothing counts as a row of loss 0.
    """
    count = jnp.sum(taught, axis=1, keepdims=True).astype(jnp.float32)
    if normalisation == "token":
        return jnp.broadcast_to(1.0 / jnp.maximum(jnp.sum(count), 1.0), count.shape)
    number = count.shape[0] if exists is None else jnp.maximum(jnp.sum(exists), 1)
    rows = jnp.full_like(count, 1.0 / number)
    return rows / jnp.maximum(count, 1.0) if normalisation == "sequence" else rows
