"""ReFusion's hybrid objective: autoregressive loss on shuffled clean slots, denoising loss on masked ones.

Three steps: `corrupt` draws what happens to each response, `arrange` builds the tensors from those draws and
nothing else, `reduce` turns token losses into the two terms. Physical order is [prompt, clean slots in random
order, masked slots in ascending order, padding] under causal attention; every token keeps its logical position.

The last slot of a response may be shorter than the slot size; it counts as a whole slot. A row without a response
counts as a sample with loss 0.

Two normalisations. "paper" is Eq. 1-2 and averages over samples; an empty set of slots contributes 0.
"released" is what the authors' code computes: the AR term is one mean over all clean labels of the batch, the
MDM term weighs tokens by 1 / (masking probability x response length). With no clean label in a batch the
released AR term is 0/0; `reduce` returns that NaN for parity, while `loss` drops the empty term, so that
training never meets it.

Letters: B batch, T tokens, M the most slots a row can have (the papers' K is a row's own number of slots).

Source: ReFusion, Sec. 4.3 and Eq. 1-3.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.objectives import documents, losses
from dlm_jax.objectives.base import Objective, choice
from dlm_jax.scoring import Scorer

MASKINGS = ("paper", "released")
NORMALISATIONS = ("paper", "released")
_FLOOR = 1e-3  # least masking probability of the released code


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReFusion(Objective):
    """The hybrid objective on freshly corrupted rows; fields have the paper's names where it has them.

    Attributes:
      mask_id: id of [MASK]; None stands for one not known yet, and cannot train.
      slot_sizes: k, tokens; one is drawn per sample.
      masking: "paper" masks floor(tK) slots of K, so never all of them; "released" masks each slot with probability
        (1 - 1e-3) t + 1e-3; t is uniform in [0, 1).
      normalisation: "paper" or "released"; see the module.
      mdm_weight: lambda of Eq. 3, unitless.

    Source: ReFusion, Eq. 3.
    """

    name: ClassVar[str] = "refusion"
    ids: ClassVar[tuple[str, ...]] = ("mask_id",)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"masking": MASKINGS, "normalisation": NORMALISATIONS}
    mask_id: int | None = None
    slot_sizes: tuple[int, ...] = (4, 8, 16, 32)
    masking: str = "paper"
    normalisation: str = "paper"
    mdm_weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not self.slot_sizes or min(self.slot_sizes) < 1:
            raise ValueError(f"slot_sizes = {self.slot_sizes}: expected one or more sizes of at least 1 token")
        if not self.mdm_weight >= 0:
            raise ValueError(f"mdm_weight = {self.mdm_weight}: expected 0 or more")

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return *super().reads, "prompt_length"

    def check(self, score: Scorer) -> None:
        """See `Objective.check`."""
        super().check(score)
        if score.recurrent:
            raise ValueError("ReFusion reads tokens in an order of its own, which the model's recurrent layers cannot "
                             "follow: take a model of attention alone, or the objective Flare")

    def prepare(self, batch: dict[str, Array], key: Array) -> losses.Rows:
        """Returns corrupted rows with the weights "ar" and "mdm"; an empty term of the loss has weight 0."""
        self.check_batch(batch)
        return documents.each(batch, lambda batch: self._rows(batch, key))

    def _rows(self, batch: dict[str, Array], key: Array) -> losses.Rows:
        corruption = corrupt(key, batch, self)
        inputs = arrange(batch, corruption, self.mask_id)
        weight = weights(inputs, corruption, self.normalisation)
        weight["ar"] = jnp.where(inputs.ar_mask, weight["ar"], 0.0)
        return losses.Rows(inputs.tokens, inputs.positions, inputs.valid, inputs.labels, weight)

    def rows_loss(self, score: Scorer, rows: losses.Rows) -> tuple[Array, dict[str, Array]]:
        """See `Objective.rows_loss`."""
        self.check(score)
        term = losses.weighted(losses.rows_nll(score, rows, self.head_chunk), rows.weights)
        return term["ar"] + self.mdm_weight * term["mdm"], {
            "loss_ar": term["ar"],
            "loss_mdm": term["mdm"],
            "supervised_tokens": jnp.sum(rows.labels != losses.IGNORE),
            "masked_tokens": jnp.sum(rows.weights["mdm"] > 0),
        }


@struct.dataclass
class Corruption:
    """What happens to each response.

    Attributes:
      slot_size: (B,) int32 k, tokens.
      p_mask: (B,) float32 probability with which a slot was masked.
      slot_masked: (B, M) bool; entries beyond a row's slots are ignored.
      slot_rank: (B, M) int32 place of each clean slot in the shuffled order; ignored elsewhere.
    """

    slot_size: Array
    p_mask: Array
    slot_masked: Array
    slot_rank: Array


@struct.dataclass
class Inputs:
    """Model inputs and labels after corruption, in physical order.

    Attributes:
      tokens, positions, labels: (B, T) int32; labels hold `losses.IGNORE` where nothing is predicted.
      valid: (B, T) bool, False on padding.
      mdm_mask: (B, T) bool, True where the input is [MASK] and predicts its own token.
      ar_mask: (B, T) bool, True where a clean token predicts the next one of its slot.
      response_length: (B,) int32 tokens.
      clean_slots, masked_slots: (B,) int32 numbers of slots.
    """

    tokens: Array
    positions: Array
    labels: Array
    valid: Array
    mdm_mask: Array
    ar_mask: Array
    response_length: Array
    clean_slots: Array
    masked_slots: Array


def _response_length(batch: dict[str, Array]) -> Array:
    return jnp.maximum(batch["length"] - batch["prompt_length"], 0)


def _random_rank(key: Array, chosen: Array) -> Array:
    """Returns a uniformly random order of the chosen entries: 0, 1, ... for them, more for the others."""
    order = jnp.lexsort((jax.random.bits(key, chosen.shape), ~chosen))
    return jnp.argsort(order).astype(jnp.int32)


def corrupt(key: Array, batch: dict[str, Array], objective: ReFusion) -> Corruption:
    """Draws slot size, masked slots and the order of the clean ones, each row from its own key.

    Args:
      key: the step's key; row i uses `fold_in(key, example_id[i])`, so that neither its neighbours nor the
        number of devices change its corruption.
      batch: `tokens` (B, T), `prompt_length`, `length` and `example_id` (B,) int32.
      objective: whose slot sizes and masking.

    Returns:
      The draws, with M = ceil(T / smallest slot size).

    Source: ReFusion, Sec. 4.3, steps (1) and (2).
    """
    most = -(-batch["tokens"].shape[1] // min(objective.slot_sizes))
    sizes = jnp.asarray(objective.slot_sizes, jnp.int32)

    def one(example_id, length):
        size_key, t_key, mask_key, order_key = jax.random.split(jax.random.fold_in(key, example_id), 4)
        size = jax.random.choice(size_key, sizes)
        slots = -(-length // size)
        exists = jnp.arange(most) < slots
        t = jax.random.uniform(t_key)
        if objective.masking == "paper":
            masked_slots = jnp.floor(t * slots)
            masked = exists & (_random_rank(mask_key, exists) < masked_slots)
            p = masked_slots / jnp.maximum(slots, 1)
        else:
            p = (1 - _FLOOR) * t + _FLOOR
            masked = exists & (jax.random.uniform(mask_key, (most,)) < p)
        return Corruption(size, p, masked, _random_rank(order_key, exists & ~masked))

    return jax.vmap(one)(batch["example_id"], _response_length(batch))


def arrange(batch: dict[str, Array], corruption: Corruption, mask_id: int) -> Inputs:
    """Reorders the rows and builds labels; deterministic.

    Args:
      batch: `tokens` (B, T), `prompt_length` and `length` (B,) int32; the response is what lies between.
      corruption: the draws, or explicit masks and orders.
      mask_id: id of [MASK].

    Returns:
      The tensors of the training instance.

    Source: ReFusion, Sec. 4.3, step (3) and Eq. 1-2.
    """
    tokens, prompt, length = batch["tokens"], batch["prompt_length"][:, None], batch["length"][:, None]
    most = corruption.slot_masked.shape[1]
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    in_response = (prompt <= index) & (index < length)
    slot = jnp.clip((index - prompt) // corruption.slot_size[:, None], 0, most - 1)
    of_slot = lambda x: jnp.take_along_axis(x, slot, axis=1)
    masked = in_response & of_slot(corruption.slot_masked)
    clean = in_response & ~masked

    # prompt, then clean slots by rank, then masked slots by index, then padding; a stable sort keeps the
    # order of tokens inside each of them
    place = jnp.where(clean, 1 + of_slot(corruption.slot_rank), jnp.where(masked, 1 + most + slot, 0))
    place = jnp.where(index < length, place, 1 + 2 * most)
    order = jnp.argsort(place, axis=1, stable=True).astype(jnp.int32)

    ahead = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    last_of_slot = (index - prompt + 1) % corruption.slot_size[:, None] == 0
    predicts_next = clean & ~last_of_slot & (index + 1 < length)
    labels = jnp.where(masked, tokens, jnp.where(predicts_next, ahead, losses.IGNORE))

    sort = lambda x: jnp.take_along_axis(x, order, axis=1)
    slots = -(-_response_length(batch) // corruption.slot_size)
    masked_slots = jnp.sum(corruption.slot_masked & (jnp.arange(most) < slots[:, None]), axis=1)
    return Inputs(
        tokens=sort(jnp.where(masked, mask_id, tokens)),
        positions=order,
        labels=sort(labels),
        valid=index < length,
        mdm_mask=sort(masked),
        ar_mask=sort(predicts_next),
        response_length=_response_length(batch),
        clean_slots=slots - masked_slots,
        masked_slots=masked_slots,
    )


def weights(inputs: Inputs, corruption: Corruption, normalisation: str = "paper") -> dict[str, Array]:
    """Returns the weight of every token in the two terms of the loss.

    Args:
      inputs: from `arrange`.
      corruption: what they were arranged from.
      normalisation: "paper" or "released"; see the module.

    Returns:
      "ar" and "mdm", each (B, T) float32.

    Raises:
      ValueError: an unknown normalisation.

    Source: ReFusion, Eq. 1-2; the released code for "released".
    """
    choice("normalisation", normalisation, NORMALISATIONS)
    # rows that are wholly padding are no samples
    B = jnp.maximum(jnp.sum(jnp.any(inputs.valid, axis=1)), 1).astype(jnp.float32)
    each = lambda mask, count: jnp.where(mask, 1.0 / (B * count[:, None].astype(jnp.float32)), 0.0)
    if normalisation == "paper":
        # an empty set has no token to weigh: 1 only keeps the unused quotient finite
        clean = jnp.maximum((corruption.slot_size - 1) * inputs.clean_slots, 1)
        masked = jnp.maximum(corruption.slot_size * inputs.masked_slots, 1)
        return {"ar": each(inputs.ar_mask, clean), "mdm": each(inputs.mdm_mask, masked)}
    bound = corruption.p_mask * jnp.maximum(inputs.response_length, 1)
    ar = inputs.ar_mask.astype(jnp.float32)
    count = jnp.sum(ar)
    # an explicit NaN: XLA is free to rewrite a sum of 0/0 into 0
    ar = jnp.where(count > 0, ar / jnp.maximum(count, 1.0), jnp.nan)
    return {"ar": ar, "mdm": each(inputs.mdm_mask, jnp.where(bound > 0, bound, 1.0))}


def reduce(
    token_nll: Array, inputs: Inputs, corruption: Corruption, normalisation: str = "paper"
) -> dict[str, Array]:
    """Turns token losses into the two terms of Eq. 3.

    Args:
      token_nll: (B, T) float32, 0 where nothing is predicted.
      inputs: from `arrange`.
      corruption: what they were arranged from.
      normalisation: "paper" or "released"; the latter's "ar" is NaN where the batch has no clean label.

    Returns:
      "ar" and "mdm", each () float32.
    """
    return losses.weighted(token_nll, weights(inputs, corruption, normalisation))
