"""FLARE: the next-token loss of a clean stream and the denoising losses of two complementary noisy views of it.

One pass reads [clean | view 1 | view 2]. A clean token sees those of its document up to itself; a noisy one the clean
tokens of its document strictly before its block, and its own block in its own view. Each response token is masked in
exactly one of the views, so it gives one autoregressive and one denoising term, each of weight 1; prompts are context.
Blocks are counted from their document's first token. What fills a document's last block is of the document: it is seen
by the tokens of that block, and never predicted.

Readings, where the paper leaves room:
  The loss is Eq. 4-5's sum over the number of the batch's response tokens (or of its predictions), without 1 / t.
  The shift of noisy outputs (Sec. 3.2, 4.2): a masked token is predicted by the row before its own. For the first token
  of a block that is the last row of the block before, in the same view ("noisy_row", which keeps one term a token and
  trains the row that drafts across blocks), none at all ("in_block", what decoding a seeded block uses), or that row of
  the clean stream ("clean_boundary", Eq. 5's condition). A document's first token is then never predicted.
  Times (A.5 names "antithetic sampling"): a block's is uniform, and the times of a document's blocks are evenly spread.
  Rows (b) and (c) of Table 12 keep both views and weight 1.
  What fills a last block is shown as it is, and tells noisy tokens where the answer ends ("visible"); or it is masked
  in every view, as the decoder's blocks are ("masked").

Letters: B rows, T tokens, W views, D model width.

Source: FLARE, Sec. 3.2, 4.2, A.4, C.4, Eq. 4-5.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives import documents, losses, noise
from dlm_jax.objectives.base import Objective, choice
from dlm_jax.scoring import Pass, Scorer, Streams

SHIFTS = ("noisy_row", "in_block", "clean_boundary", "none")
# the ablation family: Table 12 in its order, then the all-masked methods of Tables 13 and 14
VARIANTS: dict[str, dict[str, Any]] = {
    "ar_sft": {"views": 0},
    "block_diffusion": {"context": "block", "ntp": False, "shift": "none"},
    "causal_context": {"ntp": False, "shift": "none"},
    "ntp_loss": {"shift": "none"},
    "flare": {},
    "am_causal": {"views": 1, "masking": "all", "inside": "causal"},
    "am_bidir": {"views": 1, "masking": "all"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flare(Objective):
    """Clean next-token loss and denoising losses on freshly masked views; `variant` has the paper's ablations.

    Metrics: `loss_ar`, `loss_diff1` and `loss_diff2`, whose sum is the loss; `masked_share`, part of the response that
    view 1 masks; `supervised_tokens`, predictions of all kinds.

    Attributes:
      mask_id: id of the mask token; None stands for one not known yet, and cannot train.
      block_size: tokens; every document of a packed row starts at a multiple of it.
      views: W, noisy streams: 2 complementary ones, 1, or 0 for the next-token loss alone.
      masking: "random", or "all" of the response in the one view.
      context: what a clean token sees, those up to itself ("causal") or to the end of its block ("block").
      inside: what a noisy token sees of its block, all of it ("bidirectional") or up to itself ("causal").
      ntp: whether the clean stream is trained to predict the next token.
      shift: which row predicts a masked token, see the module; "none" its own.
      antithetic: spread the times of a document's blocks evenly.
      filler: what noisy views show behind a document's end, see the module.
      normalisation: the loss is a sum over "response" tokens of the batch, or the mean over its "predictions".

    Source: FLARE, Eq. 4-5, Tables 12 to 14.
    """

    name: ClassVar[str] = "flare"
    ids: ClassVar[tuple[str, ...]] = ("mask_id",)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "masking": ("random", "all"), "context": ("causal", "block"), "inside": ("bidirectional", "causal"),
        "shift": SHIFTS, "filler": ("visible", "masked"),
        "normalisation": ("response", "predictions")}
    mask_id: int | None = None
    block_size: int = 4
    views: int = 2
    masking: str = "random"
    context: str = "causal"
    inside: str = "bidirectional"
    ntp: bool = True
    shift: str = "noisy_row"
    antithetic: bool = True
    filler: str = "visible"
    normalisation: str = "response"

    def __post_init__(self):
        super().__post_init__()
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: expected a whole number of at least 1 token")
        if self.views not in (0, 1, 2):
            raise ValueError(f"views = {self.views}: expected 2 (complementary), 1 or 0")
        if self.masking == "all" and self.views != 1:
            raise ValueError(f"masking = 'all' leaves nothing to the {self.views} views but one: give views=1")
        if not self.views and not (self.ntp and self.context == "causal"):
            raise ValueError("views = 0 trains the next-token loss alone: it needs ntp=True and context='causal'")
        if self.ntp and self.context == "block":
            raise ValueError("context = 'block' shows a clean token the next one, which ntp=True would predict: give "
                             "ntp=False")

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return *super().reads, "loss_mask"

    @property
    def unit(self) -> int:
        """Tokens that every document starts at a multiple of; 1 without noisy views."""
        return self.block_size if self.views else 1

    @property
    def masks(self) -> bool:
        """See `Objective.masks`."""
        return self.views > 0

    def settles(self) -> dict[str, Any]:
        """See `Objective.settles`."""
        return super().settles() | ({"noisy_shift": 0 if self.shift == "none" else 1} if self.masks else {})

    def check(self, score: Scorer) -> None:
        """See `Objective.check`."""
        super().check(score)
        if score.bidirectional or score.shift != 1:
            raise ValueError(f"objective {self.name!r} continues a causal model that predicts the next token, but this "
                             "one is a denoiser: start from the autoregressive checkpoint")
        if self.context == "block" and score.recurrent:
            raise ValueError("context = 'block' lets clean tokens see to the end of their block, for which the model's "
                             "recurrent layers have no schedule: it is for attention alone; give context='causal'")

    def check_batch(self, batch: dict[str, Array]) -> None:
        """Raises ValueError also for documents that do not start a block; under jit the loss of such a batch is NaN."""
        super().check_batch(batch)
        unit = self.unit
        if documents.packed(batch) and not isinstance(batch["start"], jax.core.Tracer):
            start = np.asarray(batch["start"])
            if (start % unit).any():
                row, number = np.argwhere(start % unit)[0]
                raise ValueError(f"document {number} of row {row} starts at token {start[row, number]}, inside a block "
                                 f"of block_size = {unit}, and would share it with the one before: pack with "
                                 f"align={unit}")

    def prepare(self, batch: dict[str, Array], key: Array) -> Rows:
        """Returns masked rows with the weights "ar", "diff1" and "diff2"."""
        self.check_batch(batch)
        rows = documents.each(batch, lambda batch: arrange(batch, draw(key, batch, self), self))
        if not documents.packed(batch):
            return rows
        inside = jnp.any(batch["start"] % self.unit != 0)
        return rows.replace(weights=jax.tree.map(lambda x: jnp.where(inside, jnp.nan, x), rows.weights))

    def rows_loss(self, score: Scorer, rows: Rows) -> tuple[Array, dict[str, Array]]:
        """See `Objective.rows_loss`."""
        self.check(score)
        hidden, _ = score.hidden(*streams(rows, self))
        nll = token_nll(score, hidden, rows, self)
        terms = {name: jnp.sum(nll[name] * weight) for name, weight in rows.weights.items()}
        count = sum(jnp.sum(weight > 0) for weight in rows.weights.values())
        metrics = {f"loss_{name}": term for name, term in terms.items()} | {"supervised_tokens": count}
        if self.views:
            metrics["masked_share"] = jnp.sum(jnp.where(rows.masked[:, :, 0], rows.share, 0.0))
        return sum(terms.values()), metrics


def variant(name: str, **changes: Any) -> Flare:
    """Returns the objective of one of the paper's ablations.

    Args:
      name: a key of `VARIANTS`: (a) "ar_sft", (b) "block_diffusion", (c) "causal_context", (d) "ntp_loss" and (e)
        "flare" of Table 12; "am_causal" and "am_bidir" of Table 14.
      **changes: further fields of `Flare`.
    """
    choice("variant", name, tuple(VARIANTS))
    return Flare(**VARIANTS[name] | changes)


@struct.dataclass
class Rows:
    """What the objective asks of the model; every array leads with (B, T).

    Attributes:
      tokens: int32 clean ids.
      positions: int32, restart with every document.
      valid: bool, False on padding; what fills a last block is valid.
      masked: (B, T, W) bool, tokens that each view masks.
      weights: "ar" and, for each view, "diff1", "diff2": float32 weight of predicting each token.
      share: float32, 1 / (response tokens of the batch) on each of them.
      documents: int32 numbers of a packed row; None where a row is one document.
    """

    tokens: Array
    positions: Array
    valid: Array
    masked: Array
    weights: dict[str, Array]
    share: Array
    documents: Array | None = None


def draw(key: Array, batch: dict[str, Array], objective: Flare) -> Array:
    """Draws which tokens view 1 would mask, each document from its own key.

    Args:
      key: the step's key.
      batch: unpacked; `tokens` (B, T) and `example_id` (B,) int32.
      objective: whose masking and blocks.

    Returns:
      (B, T) bool.

    Source: FLARE, Sec. 3.2; A.5 for antithetic sampling.
    """
    (B, T), K = batch["tokens"].shape, objective.block_size
    if objective.masking == "all" or not objective.views:
        return jnp.ones((B, T), bool)
    each = lambda use, size: jax.vmap(lambda k: jax.random.uniform(k, (size,)))(
        noise.row_keys(key, batch["example_id"], use))
    blocks = -(-T // K)  # the last may be short
    if objective.antithetic:
        # multiples of the golden ratio, modulo 1: any run of them is evenly spread
        spread = jnp.arange(blocks, dtype=jnp.uint32) * jnp.uint32(2654435769)
        time = (each(0, 1) + spread.astype(jnp.float32) / 2.0**32) % 1.0
    else:
        time = each(0, blocks)
    return each(1, T) < jnp.repeat(time, K, axis=1)[:, :T]


def arrange(batch: dict[str, Array], drawn: Array, objective: Flare) -> Rows:
    """Masks the views and weighs every prediction; deterministic.

    Args:
      batch: unpacked; `tokens` (B, T) int32, `loss_mask` (B, T) bool, `length` (B,) int32.
      drawn: (B, T) bool, tokens that view 1 masks where they are of the response.
      objective: whose views, shift and normalisation.

    Returns:
      The rows.

    Source: FLARE, Eq. 4-5; C.4 for first tokens.
    """
    tokens, length, unit = batch["tokens"], batch["length"][:, None], objective.unit
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    response = batch["loss_mask"] & (index < length)
    masked = [response & drawn, response & ~drawn][: objective.views]
    predicted = {"ar": response & (index > 0)} if objective.ntp else {}
    for number, mask in enumerate(masked, 1):
        if objective.shift != "none":
            mask = mask & (index > 0)
        if objective.shift == "in_block":
            mask = mask & (index % unit > 0)
        predicted[f"diff{number}"] = mask
    even = lambda count: 1.0 / jnp.maximum(count.astype(jnp.float32), 1.0)
    share, valid = even(jnp.sum(response)), index < -(-length // unit) * unit
    if objective.filler == "masked":
        masked = [mask | (valid & (index >= length)) for mask in masked]
    scale = share if objective.normalisation == "response" else even(sum(map(jnp.sum, predicted.values())))
    return Rows(
        tokens=tokens,
        positions=index,
        valid=valid,
        masked=jnp.stack(masked, axis=-1) if masked else jnp.zeros((*tokens.shape, 0), bool),
        weights={name: jnp.where(mask, scale, 0.0) for name, mask in predicted.items()},
        share=jnp.where(response, share, 0.0))


def streams(rows: Rows, objective: Flare) -> tuple[Array, Pass]:
    """Lays clean stream and views out as one row.

    Args:
      rows: from `arrange`.
      objective: whose mask token, blocks and visibility.

    Returns:
      (B, (1 + W) T) int32 tokens, and what every layer is told.

    Source: FLARE, Figure 3 and A.4.
    """
    W, unit = objective.views, objective.unit
    noisy = [jnp.where(rows.masked[:, :, view], objective.mask_id, rows.tokens) for view in range(W)]
    index = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
    document = jnp.where(rows.valid, 0 if rows.documents is None else rows.documents, visibility.NONE)
    causal = objective.inside == "causal"
    rule = visibility.two_stream(
        jnp.where(rows.valid, index // unit, visibility.NONE), document, W, objective.context == "causal", causal)
    return jnp.concatenate([rows.tokens, *noisy], axis=1), Pass(
        jnp.tile(rows.positions, (1, 1 + W)), rule, recurrence=Streams(document, W, unit, causal))


def token_nll(score: Scorer, hidden: Array, rows: Rows, objective: Flare) -> dict[str, Array]:
    """Returns -log p of every predicted token, at the token.

    A token is masked in one view at most, so that the head reads one row of all views for it.

    Args:
      score: the model; only its head is used.
      hidden: (B, T + W T, D) hidden states of `streams`.
      rows: what they were made of.
      objective: whose shift.

    Returns:
      For each term of `rows.weights` (B, T) float32, 0 where the term predicts nothing.
    """
    clean, *noisy = jnp.split(hidden, 1 + objective.views, axis=1)
    before = losses.aligned(clean, 1)  # place l holds row l - 1
    states, chosen = ([before] if objective.ntp else []), None
    for view, state in enumerate(noisy):
        state = state if objective.shift == "none" else losses.aligned(state, 1)
        chosen = state if chosen is None else jnp.where(rows.masked[:, :, view, None], state, chosen)
    if chosen is not None and objective.shift == "clean_boundary":
        chosen = jnp.where((rows.positions % objective.unit == 0)[:, :, None], before, chosen)
    states += [] if chosen is None else [chosen]
    predicted = {name: weight != 0 for name, weight in rows.weights.items()}  # NaN counts
    kinds = [predicted["ar"]] if objective.ntp else []
    kinds += [sum(mask for name, mask in predicted.items() if name != "ar") > 0] if objective.views else []
    labels = [jnp.where(kind, rows.tokens, losses.IGNORE) for kind in kinds]
    nll = jnp.split(losses.head_nll(score, jnp.concatenate(states, axis=1), jnp.concatenate(labels, axis=1),
                                    objective.head_chunk), len(states), axis=1)
    return {name: jnp.where(mask, nll[0 if name == "ar" else -1], 0.0) for name, mask in predicted.items()}
