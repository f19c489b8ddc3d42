"""What a guide agrees with, and what is committed of a draft, as pure functions.

A guide's verdict is read in the drafter's vocabulary: each of its ids is named by a draft id, `UNMAPPED` where the
drafter has no such token, which equals no draft.

Letters: B batch, W drafted positions, V the guide's vocabulary.

Source: "FlashDLM", Sec. 3.2.2, Algorithm 1, C.4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.decode import sampling

RULES = ("paper", "assisted", "speculative")
UNMAPPED = -1  # no token of the drafter's vocabulary
OFF = -1.0  # a threshold that is not applied


def standing(logits: Array, to_draft: Array, draft: Array) -> tuple[Array, Array, Array]:
    """Returns where each draft stands in the guide's judgement.

    Args:
      logits: (B, W, V) float32 of the guide.
      to_draft: (V,) int32 draft id of each guide id, `UNMAPPED` for none; several may stand for one draft.
      draft: (B, W) int32.

    Returns:
      (B, W) int32 place among the guide's tokens, 0 for the likeliest and of equals the lower id, V for a draft that
      the guide has no token for; (B, W) float32 logit, -inf for those; and (B, W, 1) int32 the likeliest guide id.
    """
    V = logits.shape[-1]
    own = jnp.where(to_draft == draft[..., None], logits, -jnp.inf)
    best, logit = sampling.likeliest(own)[..., None], jnp.max(own, axis=-1, keepdims=True)
    before = (logits > logit) | ((logits == logit) & (jnp.arange(V) < best))
    place = jnp.where(logit[..., 0] > -jnp.inf, jnp.sum(before, axis=-1), V)
    return place, logit[..., 0], sampling.likeliest(logits)[..., None]


def accepts(place: Array, logit: Array, largest: Array, draft_logit: Array, top_k: Array | int,
            relative_probability: Array | float, logit_threshold: Array | float) -> Array:
    """Judges every draft by itself.

    Args:
      place, logit: (B, W) where the draft stands with the guide.
      largest: (B, W) float32 the guide's largest logit.
      draft_logit: (B, W) float32 the drafter's largest logit.
      top_k: () int32 K; a draft must be one of the guide's K likeliest tokens. 1 is exact match.
      relative_probability: () float32; its probability must be this share of the likeliest token's or more (the
        released code's relaxed rule). `OFF` asks nothing.
      logit_threshold: () float32 tau; it must be drafted with a logit above tau times the guide's largest (C.4).
        `OFF` asks nothing.

    Returns:
      (B, W) bool.
    """
    likely = jnp.exp(logit - largest) >= relative_probability
    confident = (logit_threshold < 0) | (draft_logit > logit_threshold * largest)
    return (place < top_k) & likely & confident


def confident(logits: Array, draft: Array, threshold: Array | float) -> Array:
    """Tells which drafts the drafter itself is sure of.

    Args:
      logits: (B, W, V) float32 of the drafter.
      draft: (B, W) int32.
      threshold: () float32 least probability; 0 asks nothing, and computes nothing.

    Returns:
      (B, W) bool.
    """
    own = lambda: jnp.take_along_axis(jax.nn.log_softmax(logits), draft[..., None], axis=-1)[..., 0]
    return jax.lax.cond(
        jnp.asarray(threshold) > 0, lambda: own() >= jnp.log(threshold), lambda: jnp.ones(draft.shape, bool))


def prefix_length(accepted: Array) -> Array:
    """Returns (B,) int32 how many of (B, W) drafts come before the first that is not accepted."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def commits(rule: str, agreed: Array, correction: Array) -> tuple[Array, Array]:
    """Decides how much of a draft is committed.

    Args:
      rule: "paper" commits what is agreed upon, or the drafter's own first token where that is nothing
        (Algorithm 1); the released code calls it "assisted". "speculative" commits what is agreed upon and the
        guide's own token behind it; where the drafter's vocabulary has no such token, it does as "paper".
      agreed: (B,) int32 length of the agreed prefix.
      correction: (B,) int32 the guide's token at the first disagreement, as a draft id; `UNMAPPED` for none.

    Returns:
      (B,) int32 tokens committed, at least 1; and (B,) bool, whether the last of them is the guide's.
    """
    guided = (correction != UNMAPPED) & (rule == "speculative")
    return jnp.where(guided, agreed + 1, jnp.maximum(agreed, 1)), guided
