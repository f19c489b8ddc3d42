"""Orthrus' objective: the diffusion view of a dual model learns to predict what its frozen AR view predicts.

One pass of the AR view over the clean tokens fills a cache and is the teacher; one pass of the diffusion view reads
that cache and runs J blocks [token, MASK x (K-1)] a row, each at a random anchor. A block at index a stands at
positions a..a+K-1, sees the clean tokens before a and itself whole, and nothing of the other blocks. Both views
predict the next token, so the teacher of a block's offset i is the AR view's output at position a+i. Offsets
0..K-2 are taught: the K-1 drafts that decoding uses.

Every taught prediction of the batch has the same weight. A block fits its row: a + K is at most the row's length. A row
with fewer possible anchors than J uses each once; one without any is skipped and counted in `skipped_rows`.

Gradients reach the diffusion view alone: the teacher, the clean keys and the head are constants.

Letters: B batch, T tokens, J blocks a row, K tokens a block, P = J K, O taught offsets, D width.

Source: Orthrus, Sec. 3.2; the authors' model code for the alignment of the two views.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import losses
from dlm_jax.objectives.base import Objective
from dlm_jax.scoring import Pass, Scorer

ANCHORS = ("sequence", "response")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orthrus(Objective):
    """Distance of the diffusion view's drafts from the AR view, over freshly drawn anchors.

    Its metrics are `kl` in nats; `overlap`, the mean probability that a sampled draft is accepted; `agreement` of both
    views' most likely tokens, and that of draft 1, 2, 4, ... (`agreement_1`); `accepted`, the mean run of agreeing
    drafts a block (of K - 1; a stand-in for acceptance in decoding, where the teacher reads the drafts instead of the
    row); `blocks` and `skipped_rows`, counts.

    Attributes:
      mask_id: id of [MASK]; None stands for one not known yet, and cannot train.
      block_size: K, tokens.
      blocks: J, most blocks a row.
      anchors: "sequence" draws them from the whole row, "response" from the response alone.
      distance: what is minimised, one of `losses.DISTANCES`; the paper's is "kl". "cross_entropy" is that on the
        row's own next token.
      temperature: divides the logits of both views, unitless.
      top_k: teacher's tokens that "top_k_kl" keeps.
      last_offset: teach offset K-1 too, which decoding does not use.

    Source: Orthrus, Sec. 3.2 (training objective).
    """

    name: ClassVar[str] = "orthrus"
    trains: ClassVar[str | None] = "diffusion"
    ids: ClassVar[tuple[str, ...]] = ("mask_id",)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"anchors": ANCHORS, "distance": losses.DISTANCES}
    mask_id: int | None = None
    block_size: int = 32
    blocks: int = 256
    anchors: str = "sequence"
    distance: str = "kl"
    temperature: float = 1.0
    top_k: int = 64
    last_offset: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"block_size = {self.block_size}: expected at least 2 tokens, the anchor and a mask")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: expected a positive number")
        for name in ("blocks", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")

    @property
    def offsets(self) -> int:
        """O, the taught offsets of a block."""
        return self.block_size if self.last_offset else self.block_size - 1

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *(("prompt_length",) if self.anchors == "response" else ()))

    def check(self, score: Scorer) -> None:
        score.view("diffusion")
        super().check(score)
        if self.distance == "top_k_kl" and self.top_k > score.vocab_size:
            raise ValueError(f"top_k = {self.top_k} exceeds the vocabulary of {score.vocab_size} ids")

    def prepare(self, batch: dict[str, Array], key: Array) -> Rows:
        """Returns rows whose weights sum to 1, or are all 0 where every row is skipped."""
        self.check_batch(batch)
        return arrange(batch, sample_anchors(key, batch, self), self)

    def rows_loss(self, score: Scorer, rows: Rows) -> tuple[Array, dict[str, Array]]:
        self.check(score)
        found = compare(score, rows, self)
        mean = lambda x: jnp.sum(x * rows.weights)
        over_blocks = lambda x: jnp.sum(x * rows.share)
        drafts = found.agreement[:, :, : self.block_size - 1]
        metrics = {"kl": mean(found.kl), "overlap": mean(found.overlap), "agreement": mean(found.agreement)}
        for draft in (2**i for i in range((self.block_size - 1).bit_length())):
            metrics[f"agreement_{draft}"] = over_blocks(drafts[:, :, draft - 1])
        metrics |= {
            "accepted": over_blocks(jnp.sum(jnp.cumprod(drafts, axis=-1), axis=-1)),
            "blocks": jnp.sum(rows.share > 0),
            "skipped_rows": jnp.sum(rows.skipped),
        }
        return mean(found.loss), metrics


@struct.dataclass
class Rows:
    """What the objective asks of both views; every array leads with B.

    Attributes:
      tokens: (B, T) int32 clean tokens.
      valid: (B, T) bool, False on padding.
      blocks: (B, P) int32 inputs of the diffusion view.
      positions: (B, P) int32 their positions, which are also the clean indices of their teachers.
      limit: (B, P) int32 last clean index that each sees, -1 for none.
      labels: (B, J, O) int32 the row's own next tokens, `losses.IGNORE` beyond its end.
      weights: (B, J, O) float32 weight of each prediction in the loss.
      share: (B, J) float32 weight of each block in means over blocks.
      skipped: (B,) bool, True where no block fits.
    """

    tokens: Array
    valid: Array
    blocks: Array
    positions: Array
    limit: Array
    labels: Array
    weights: Array
    share: Array
    skipped: Array


def sample_anchors(key: Array, batch: dict[str, Array], objective: Orthrus) -> Array:
    """Draws the anchors of every row without replacement, each row from its own key.

    Args:
      key: the step's key; row i uses `fold_in(key, example_id[i])`, so that neither its neighbours nor the number
        of devices change its anchors.
      batch: `tokens` (B, T), `length` and `example_id` (B,) int32; `prompt_length` for anchors in the response.
      objective: hyperparameters.

    Returns:
      (B, J) int32 ascending indices, the unused ones last and -1; J is no more than the anchors a full row has.

    Raises:
      ValueError: rows too short for any block.

    Source: Orthrus, Sec. 3.2.
    """
    T, K = batch["tokens"].shape[1], objective.block_size
    if T < K:
        raise ValueError(f"rows of {T} tokens have no room for blocks of block_size = {K}; lengthen the rows, or "
                         "make the blocks smaller")
    J, index = min(objective.blocks, T - K + 1), jnp.arange(T, dtype=jnp.int32)
    first = jnp.zeros_like(batch["length"]) if objective.anchors == "sequence" else batch["prompt_length"]

    def one(example_id, first, length):
        possible = (first <= index) & (index + K <= length)
        bits = jax.random.bits(jax.random.fold_in(key, example_id), (T,))
        chosen = jnp.lexsort((bits, ~possible))[:J]
        return jnp.sort(jnp.where(possible[chosen], chosen, T))

    drawn = jax.vmap(one)(batch["example_id"], first, batch["length"])
    return jnp.where(drawn < T, drawn, -1).astype(jnp.int32)


def arrange(batch: dict[str, Array], anchors: Array, objective: Orthrus) -> Rows:
    """Builds blocks, visibility limits and weights; deterministic.

    Args:
      batch: `tokens` (B, T) and `length` (B,) int32.
      anchors: (B, J) int32, -1 for a block that is not used.
      objective: hyperparameters.

    Returns:
      The rows; unused blocks stand at position 0 with weight 0.

    Source: Orthrus, Sec. 3.2.
    """
    tokens, length, K = batch["tokens"], batch["length"][:, None], objective.block_size
    B, T = tokens.shape
    offset = jnp.arange(K, dtype=jnp.int32)
    used, start = anchors >= 0, jnp.maximum(anchors, 0)
    positions = (start[:, :, None] + offset).reshape(B, -1)
    at = lambda index: jnp.take_along_axis(tokens, index, axis=1)
    following = positions + 1
    labels = jnp.where(following < length, at(jnp.minimum(following, T - 1)), losses.IGNORE)
    labels = labels.reshape(B, -1, K)[:, :, : objective.offsets]
    taught = jnp.broadcast_to(used[:, :, None], labels.shape)
    if objective.distance == "cross_entropy":
        taught &= labels != losses.IGNORE
    even = lambda chosen: chosen / jnp.maximum(jnp.sum(chosen, dtype=jnp.float32), 1.0)
    return Rows(
        tokens=tokens,
        valid=jnp.arange(T) < length,
        blocks=jnp.where(jnp.tile(offset == 0, anchors.shape[1]), at(positions), objective.mask_id),
        positions=positions,
        limit=jnp.repeat(start - 1, K, axis=1),
        labels=labels,
        weights=even(taught),
        share=even(used),
        skipped=~jnp.any(used, axis=1),
    )


def views(score: Scorer, rows: Rows, objective: Orthrus) -> tuple[Array, Array]:
    """Runs the AR view over the clean tokens, then the diffusion view over all blocks at once.

    Args:
      score: a dual model.
      rows: what to run on.
      objective: hyperparameters.

    Returns:
      (B, P, D) hidden states of the diffusion view, and (B, T, D) of the AR view, which carry no gradient.

    Source: Orthrus, Sec. 3.2 (dual-pass block masking).
    """
    B, T = rows.tokens.shape
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    clean, cache = jax.lax.stop_gradient(
        score.hidden(rows.tokens, Pass(index, visibility.causal(rows.valid), index), score.init_cache(B, T)))
    rule = visibility.orthrus_dual(rows.valid, rows.limit, objective.block_size)
    hidden, _ = score.view("diffusion").hidden(rows.blocks, Pass(rows.positions, rule), cache)
    return hidden, clean


def compare(score: Scorer, rows: Rows, objective: Orthrus) -> losses.Distance:
    """Returns the distance of every taught prediction from its teacher's, each field (B, J, O) float32.

    Args:
      score: a dual model.
      rows: what to compare on.
      objective: hyperparameters.
    """
    B, J, O = rows.labels.shape
    hidden, clean = views(score, rows, objective)
    # the head sees taught offsets only
    taught = lambda x: x.reshape(B, J, objective.block_size, *x.shape[2:])[:, :, :O].reshape(B, J * O, *x.shape[2:])
    teacher = jnp.take_along_axis(clean, taught(rows.positions)[:, :, None], axis=1)
    found = losses.head_distance(score, taught(hidden), teacher, rows.labels.reshape(B, J * O), objective.head_chunk,
                                 objective.distance, objective.temperature, objective.top_k)
    return jax.tree.map(lambda x: x.reshape(B, J, O), found)
