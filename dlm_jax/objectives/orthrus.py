"""Orthrus' objective: the diffusion view of a dual model learns to predict what its frozen AR view predicts.

One pass of the AR view over the clean tokens fills a cache and is the teacher; one pass of the diffusion view reads
that cache and runs J blocks [token, MASK x (K-1)] a row, each at a random anchor. A block at index a stands at
positions a..a+K-1, sees the clean tokens before a and itself whole, and nothing of the other blocks. Both views
predict the next token, so the teacher of a block's offset i is the AR view's output at position a+i. Offsets
0..K-2 are taught: the K-1 drafts that decoding uses.

Every taught prediction of the batch has the same weight. A block fits its row, or its document where rows are packed: a
+ K is at most their length. A row with fewer possible anchors than J uses each once; one without any is skipped and
counted in `skipped_rows`.

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
from dlm_jax.objectives import documents, losses
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
        """See `Objective.reads`."""
        return (*super().reads, *(("prompt_length",) if self.anchors == "response" else ()))

    def check(self, score: Scorer) -> None:
        """See `Objective.check`."""
        score.view("diffusion")
        super().check(score)
        if self.distance == "top_k_kl" and self.top_k > score.vocab_size:
            raise ValueError(f"top_k = {self.top_k} exceeds the vocabulary of {score.vocab_size} ids")

    def prepare(self, batch: dict[str, Array], key: Array) -> Rows:
        """Returns rows whose weights sum to 1, or are all 0 where every row is skipped."""
        self.check_batch(batch)
        return arrange(batch, sample_anchors(key, batch, self), self)

    def rows_loss(self, score: Scorer, rows: Rows) -> tuple[Array, dict[str, Array]]:
        """See `Objective.rows_loss`."""
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
      places: (B, T) int32 their positions.
      documents: (B, T) int32 their documents' numbers, negative on padding.
      blocks: (B, P) int32 inputs of the diffusion view.
      positions: (B, P) int32 their positions.
      teachers: (B, P) int32 clean indices of their teachers.
      floor, limit: (B, P) int32 first and last clean index that each sees, floor - 1 for none.
      labels: (B, J, O) int32 the row's own next tokens, `losses.IGNORE` beyond its end.
      weights: (B, J, O) float32 weight of each prediction in the loss.
      share: (B, J) float32 weight of each block in means over blocks.
      skipped: (B,) bool, True where no block fits.
    """

    tokens: Array
    places: Array
    documents: Array
    blocks: Array
    positions: Array
    teachers: Array
    floor: Array
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
      batch: `tokens` (B, T), `length` and `example_id` (B,) int32; `prompt_length` for anchors in the response; packed
        or not.
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

    def draw(example_id, first, length):
        bits = jax.random.bits(jax.random.fold_in(key, example_id), (T,))
        return (first <= index) & (index + K <= length), bits

    def choose(possible, bits):
        chosen = jnp.lexsort((bits, ~possible))[:J]
        return jnp.sort(jnp.where(possible[chosen], chosen, T))

    rows = documents.apart(batch) if documents.packed(batch) else batch
    first = jnp.zeros_like(rows["length"]) if objective.anchors == "sequence" else rows["prompt_length"]
    found = jax.vmap(draw)(rows["example_id"], first, rows["length"])
    drawn = jax.vmap(choose)(*(documents.together(found, batch) if documents.packed(batch) else found))
    return jnp.where(drawn < T, drawn, -1).astype(jnp.int32)


def bounds(batch: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Returns, of every token, its document's number (negative on padding), first index and the index after its last.

    Args:
      batch: packed, or not: then a row is one document.

    Returns:
      (B, T) int32 each.
    """
    index, length = jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32), batch["length"]
    if not documents.packed(batch):
        first, end = jnp.zeros_like(batch["tokens"]), jnp.broadcast_to(length[:, None], batch["tokens"].shape)
        return jnp.where(index < end, 0, visibility.NONE), first, end
    number = jnp.maximum(batch["documents"], 0)
    of_document = lambda x: jnp.take_along_axis(x, number, axis=1)
    first = of_document(batch["start"])
    end = first + of_document(length)
    return jnp.where((batch["documents"] >= 0) & (index < end), batch["documents"], visibility.NONE), first, end


def arrange(batch: dict[str, Array], anchors: Array, objective: Orthrus) -> Rows:
    """Builds blocks, visibility limits and weights; deterministic.

    Args:
      batch: `tokens` (B, T) and `length` (B,) int32; packed or not.
      anchors: (B, J) int32, -1 for a block that is not used.
      objective: hyperparameters.

    Returns:
      The rows; unused blocks stand at position 0 with weight 0.

    Source: Orthrus, Sec. 3.2.
    """
    tokens, K = batch["tokens"], objective.block_size
    B, T = tokens.shape
    numbers, first, end = bounds(batch)
    offset = jnp.arange(K, dtype=jnp.int32)
    used, start = anchors >= 0, jnp.maximum(anchors, 0)
    index = (start[:, :, None] + offset).reshape(B, -1)
    at = lambda x, index: jnp.take_along_axis(x, index, axis=1)
    anchor = jnp.repeat(start, K, axis=1)
    floor, following = at(first, anchor), index + 1
    labels = jnp.where(following < at(end, anchor), at(tokens, jnp.minimum(following, T - 1)), losses.IGNORE)
    labels = labels.reshape(B, -1, K)[:, :, : objective.offsets]
    taught = jnp.broadcast_to(used[:, :, None], labels.shape)
    if objective.distance == "cross_entropy":
        taught &= labels != losses.IGNORE
    even = lambda chosen: chosen / jnp.maximum(jnp.sum(chosen, dtype=jnp.float32), 1.0)
    return Rows(
        tokens=tokens,
        places=jnp.arange(T, dtype=jnp.int32) - first,
        documents=numbers,
        blocks=jnp.where(jnp.tile(offset == 0, anchors.shape[1]), at(tokens, index), objective.mask_id),
        positions=index - floor,
        teachers=index,
        floor=floor,
        limit=anchor - 1,
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
    valid = rows.documents >= 0
    clean, cache = jax.lax.stop_gradient(score.hidden(
        rows.tokens, Pass(rows.places, visibility.causal(valid, rows.documents), index), score.init_cache(B, T)))
    rule = visibility.orthrus_dual(valid, rows.limit, objective.block_size, rows.floor)
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
    teacher = jnp.take_along_axis(clean, taught(rows.teachers)[:, :, None], axis=1)
    found = losses.head_distance(score, taught(hidden), teacher, rows.labels.reshape(B, J * O), objective.head_chunk,
                                 objective.distance, objective.temperature, objective.top_k)
    return jax.tree.map(lambda x: x.reshape(B, J, O), found)
