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
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import losses
from dlm_jax.scoring import Pass, Scorer

ANCHORS = ("sequence", "response")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hyperparameters.

    Attributes:
      trainable: regular expression of the parameters that this objective trains.
      mask_id: id of [MASK]; None stands for one not known yet, and cannot train.
      block_size: K, tokens.
      blocks: J, most blocks a row.
      anchors: "sequence" draws them from the whole row, "response" from the response alone.
      distance: what is minimised, one of `losses.DISTANCES`; the paper's is "kl". "cross_entropy" is that on the
        row's own next token.
      temperature: divides the logits of both views, unitless.
      top_k: teacher's tokens that "top_k_kl" keeps.
      last_offset: teach offset K-1 too, which decoding does not use.
      head_chunk: predictions a row whose logits, of both views, are held at a time.
    """

    name: ClassVar[str] = "orthrus"
    trainable: ClassVar[str] = "attention_diffusion"
    mask_id: int | None = None
    block_size: int = 32
    blocks: int = 256
    anchors: str = "sequence"
    distance: str = "kl"
    temperature: float = 1.0
    top_k: int = 64
    last_offset: bool = False
    head_chunk: int = 512

    def __post_init__(self):
        if self.mask_id is not None and self.mask_id < 0:
            raise ValueError(f"mask_id = {self.mask_id}: expected the id of the mask token, 0 or more")
        if self.block_size < 2:
            raise ValueError(f"block_size = {self.block_size}: expected at least 2 tokens, the anchor and a mask")
        if self.anchors not in ANCHORS:
            raise ValueError(f"anchors {self.anchors!r}: expected one of {ANCHORS}")
        if self.distance not in losses.DISTANCES:
            raise ValueError(f"distance {self.distance!r}: expected one of {losses.DISTANCES}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: expected a positive number")
        for name in ("blocks", "top_k", "head_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")

    @property
    def offsets(self) -> int:
        """O, the taught offsets of a block."""
        return self.block_size if self.last_offset else self.block_size - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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


def sample_anchors(key: Array, batch: dict[str, Array], config: Config) -> Array:
    """Draws the anchors of every row without replacement, each row from its own key.

    Args:
      key: the step's key; row i uses `fold_in(key, example_id[i])`, so that neither its neighbours nor the number
        of devices change its anchors.
      batch: `tokens` (B, T), `length` and `example_id` (B,) int32; `prompt_length` for anchors in the response.
      config: hyperparameters.

    Returns:
      (B, J) int32 ascending indices, the unused ones last and -1; J is no more than the anchors a full row has.

    Raises:
      ValueError: rows too short for any block.

    Source: Orthrus, Sec. 3.2.
    """
    T, K = batch["tokens"].shape[1], config.block_size
    if T < K:
        raise ValueError(f"rows of {T} tokens have no room for blocks of block_size = {K}; lengthen the rows, or "
                         "make the blocks smaller")
    J, index = min(config.blocks, T - K + 1), jnp.arange(T, dtype=jnp.int32)
    first = jnp.zeros_like(batch["length"]) if config.anchors == "sequence" else batch["prompt_length"]

    def one(example_id, first, length):
        possible = (first <= index) & (index + K <= length)
        bits = jax.random.bits(jax.random.fold_in(key, example_id), (T,))
        chosen = jnp.lexsort((bits, ~possible))[:J]
        return jnp.sort(jnp.where(possible[chosen], chosen, T))

    drawn = jax.vmap(one)(batch["example_id"], first, batch["length"])
    return jnp.where(drawn < T, drawn, -1).astype(jnp.int32)


def arrange(batch: dict[str, Array], anchors: Array, config: Config) -> Rows:
    """Builds blocks, visibility limits and weights; deterministic.

    Args:
      batch: `tokens` (B, T) and `length` (B,) int32.
      anchors: (B, J) int32, -1 for a block that is not used.
      config: hyperparameters.

    Returns:
      The rows; unused blocks stand at position 0 with weight 0.

    Source: Orthrus, Sec. 3.2.
    """
    tokens, length, K = batch["tokens"], batch["length"][:, None], config.block_size
    B, T = tokens.shape
    offset = jnp.arange(K, dtype=jnp.int32)
    used, start = anchors >= 0, jnp.maximum(anchors, 0)
    positions = (start[:, :, None] + offset).reshape(B, -1)
    at = lambda index: jnp.take_along_axis(tokens, index, axis=1)
    following = positions + 1
    labels = jnp.where(following < length, at(jnp.minimum(following, T - 1)), losses.IGNORE)
    labels = labels.reshape(B, -1, K)[:, :, : config.offsets]
    taught = jnp.broadcast_to(used[:, :, None], labels.shape)
    if config.distance == "cross_entropy":
        taught &= labels != losses.IGNORE
    even = lambda chosen: chosen / jnp.maximum(jnp.sum(chosen, dtype=jnp.float32), 1.0)
    return Rows(
        tokens=tokens,
        valid=jnp.arange(T) < length,
        blocks=jnp.where(jnp.tile(offset == 0, anchors.shape[1]), at(positions), config.mask_id),
        positions=positions,
        limit=jnp.repeat(start - 1, K, axis=1),
        labels=labels,
        weights=even(taught),
        share=even(used),
        skipped=~jnp.any(used, axis=1),
    )


def prepare(batch: dict[str, Array], key: Array, config: Config) -> Rows:
    """Draws anchors and arranges a batch around them.

    Args:
      batch: see `sample_anchors`.
      key: the step's key.
      config: hyperparameters.

    Returns:
      Rows whose weights sum to 1, or are all 0 where every row is skipped.

    Raises:
      ValueError: no mask id, or rows too short for any block.
    """
    if config.mask_id is None:
        raise ValueError("mask_id is None: give the id of the model's mask token")
    return arrange(batch, sample_anchors(key, batch, config), config)


def views(score: Scorer, rows: Rows, config: Config) -> tuple[Array, Array]:
    """Runs the AR view over the clean tokens, then the diffusion view over all blocks at once.

    Args:
      score: a dual model.
      rows: what to run on.
      config: hyperparameters.

    Returns:
      (B, P, D) hidden states of the diffusion view, and (B, T, D) of the AR view, which carry no gradient.

    Source: Orthrus, Sec. 3.2 (dual-pass block masking).
    """
    B, T = rows.tokens.shape
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    clean, cache = jax.lax.stop_gradient(
        score.hidden(rows.tokens, Pass(index, visibility.causal(rows.valid), index), score.init_cache(B, T)))
    rule = visibility.orthrus_dual(rows.valid, rows.limit, config.block_size)
    hidden, _ = score.view("diffusion").hidden(rows.blocks, Pass(rows.positions, rule), cache)
    return hidden, clean


def compare(score: Scorer, rows: Rows, config: Config) -> losses.Distance:
    """Returns the distance of every taught prediction from its teacher's, each field (B, J, O) float32.

    Args:
      score: a dual model.
      rows: what to compare on.
      config: hyperparameters.
    """
    B, J, O = rows.labels.shape
    hidden, clean = views(score, rows, config)
    # the head sees taught offsets only
    taught = lambda x: x.reshape(B, J, config.block_size, *x.shape[2:])[:, :, :O].reshape(B, J * O, *x.shape[2:])
    teacher = jnp.take_along_axis(clean, taught(rows.positions)[:, :, None], axis=1)
    found = losses.head_distance(score, taught(hidden), teacher, rows.labels.reshape(B, J * O), config.head_chunk,
                                 config.distance, config.temperature, config.top_k)
    return jax.tree.map(lambda x: x.reshape(B, J, O), found)


def check(score: Scorer, config: Config) -> None:
    """Raises ValueError for a model without a diffusion view, or whose vocabulary lacks the mask or `top_k` ids."""
    score.view("diffusion")
    if config.mask_id is None:
        raise ValueError("mask_id is None: give the id of the model's mask token")
    if config.mask_id >= score.vocab_size:
        raise ValueError(f"mask_id = {config.mask_id} lies outside the vocabulary of {score.vocab_size} ids")
    if config.distance == "top_k_kl" and config.top_k > score.vocab_size:
        raise ValueError(f"top_k = {config.top_k} exceeds the vocabulary of {score.vocab_size} ids")


def rows_loss(score: Scorer, rows: Rows, config: Config) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of prepared rows and its metrics, all sums over rows; see `loss`."""
    check(score, config)
    found = compare(score, rows, config)
    mean = lambda x: jnp.sum(x * rows.weights)
    over_blocks = lambda x: jnp.sum(x * rows.share)
    drafts = found.agreement[:, :, : config.block_size - 1]
    metrics = {"kl": mean(found.kl), "overlap": mean(found.overlap), "agreement": mean(found.agreement)}
    for draft in (2**i for i in range((config.block_size - 1).bit_length())):
        metrics[f"agreement_{draft}"] = over_blocks(drafts[:, :, draft - 1])
    metrics |= {
        "accepted": over_blocks(jnp.sum(jnp.cumprod(drafts, axis=-1), axis=-1)),
        "blocks": jnp.sum(rows.share > 0),
        "skipped_rows": jnp.sum(rows.skipped),
    }
    return mean(found.loss), metrics


def loss(score: Scorer, batch: dict[str, Array], key: Array, config: Config) -> tuple[Array, dict[str, Array]]:
    """Distance of the diffusion view's drafts from the AR view, over freshly drawn anchors.

    Args:
      score: a dual model.
      batch: see `sample_anchors`.
      key: the base key folded with the step.
      config: hyperparameters.

    Returns:
      () float32 loss in nats, and scalar metrics: `kl` in nats; `overlap`, the mean probability that a sampled draft
      is accepted; `agreement` of both views' most likely tokens, and that of draft 1, 2, 4, ... (`agreement_1`);
      `accepted`, the mean run of agreeing drafts a block (of K - 1; a stand-in for acceptance in decoding, where the
      teacher reads the drafts instead of the row); `blocks` and `skipped_rows`, counts.

    Raises:
      ValueError: a model without a diffusion view, no mask id or one outside the vocabulary, or rows too short for
        any block.

    Source: Orthrus, Sec. 3.2 (training objective).
    """
    return rows_loss(score, prepare(batch, key, config), config)
