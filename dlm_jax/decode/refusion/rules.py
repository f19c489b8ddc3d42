"""ReFusion's decisions as pure functions on a block of slots.

Letters: B batch, n slots of a block, k tokens of a slot. A window is a (B, n, k) array in position order.

Source: "ReFusion", Sec. 4.2 and A.2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def certainty(confidence: Array, rule: str) -> Array:
    """Scores slots by the model's probability of their drafts.

    Args:
      confidence: (B, n, k) probability of each drafted token.
      rule: "first" takes the slot's first token (Eq. 5), "mean" the slot's mean (C.2).

    Returns:
      (B, n) float32.
    """
    return confidence[..., 0] if rule == "first" else jnp.mean(confidence, axis=-1)


def choose_confident(score: Array, open_slots: Array, threshold: Array | float) -> Array:
    """Chooses every open slot above the threshold, else the single best one.

    Args:
      score: (B, n) certainty.
      open_slots: (B, n) bool slots still masked.
      threshold: () tau, strictly exceeded.

    Returns:
      (B, n) bool.
    """
    above = open_slots & (score > threshold)
    return jnp.where(jnp.any(above, axis=1, keepdims=True), above, choose_top(score, open_slots, 1))


def choose_top(score: Array, open_slots: Array, count: Array | int) -> Array:
    """Chooses the `count` best open slots; ties go to the earlier slot.

    Args:
      score: (B, n) certainty.
      open_slots: (B, n) bool.
      count: () int32, at least 1.

    Returns:
      (B, n) bool.
    """
    masked = jnp.where(open_slots, score, -jnp.inf)
    order = jnp.argsort(-masked, axis=1, stable=True)
    place = jnp.argsort(order, axis=1)
    return open_slots & (place < count)


def accepted_run(accepted: Array, chosen: Array) -> Array:
    """Returns the longest accepted prefix of the chosen slots laid end to end, across slot borders.

    Args:
      accepted: (B, n, k) bool verdict on every drafted token.
      chosen: (B, n) bool.

    Returns:
      (B, n, k) bool, True on the prefix.
    """
    inside = jnp.broadcast_to(chosen[..., None], accepted.shape)
    transparent = (accepted | ~inside).reshape(accepted.shape[0], -1)
    return jnp.cumprod(transparent, axis=1).astype(bool).reshape(accepted.shape) & inside


def slot_runs(accepted: Array, chosen: Array) -> Array:
    """Returns each chosen slot's own accepted prefix; its first token always counts.

    Args:
      accepted: (B, n, k) bool.
      chosen: (B, n) bool.

    Returns:
      (B, n, k) bool.
    """
    accepted = accepted.at[..., 0].set(True)
    return jnp.cumprod(accepted, axis=-1).astype(bool) & chosen[..., None]


def common_length(runs: Array, chosen: Array) -> Array:
    """Returns (B,) the longest prefix length verified in all chosen slots (l' of A.2).

    Args:
      runs: (B, n, k) bool accepted prefixes.
      chosen: (B, n) bool.
    """
    length = jnp.sum(runs, axis=-1)
    return jnp.min(jnp.where(chosen, length, runs.shape[-1]), axis=1)


def through_first(flag: Array) -> Array:
    """Returns (B, n, k) True up to and including the first True of `flag` in position order; all if none."""
    flat = flag.reshape(flag.shape[0], -1)
    before = jnp.cumsum(flat, axis=1) - flat
    return (before == 0).reshape(flag.shape)


def drop_after_eos(chosen: Array, has_eos: Array) -> Array:
    """Drops chosen slots that follow the first one holding an EOS.

    Args:
      chosen: (B, n) bool.
      has_eos: (B, n) bool, a subset of `chosen`.

    Returns:
      (B, n) bool.
    """
    before = jnp.cumsum(has_eos, axis=1) - has_eos
    return chosen & (before == 0)


def closed_by_eos(eos_slot: Array, open_slots: Array, chosen: Array, by_row: Array) -> Array:
    """Returns the slots that an EOS closes.

    Args:
      eos_slot: (B, n) bool, True on at most the one slot that holds the committed EOS.
      open_slots: (B, n) bool slots masked before this commit.
      chosen: (B, n) bool slots decoded together.
      by_row: (B,) bool; False closes from the EOS slot on (B.1). True closes open slots from the index that the
        EOS slot has among the *chosen* ones, as the released code does in refinement: earlier open slots are lost.

    Returns:
      (B, n) bool.
    """
    found = jnp.any(eos_slot, axis=1, keepdims=True)
    from_slot = jnp.cumsum(eos_slot, axis=1) > 0
    row = jnp.sum(jnp.where(jnp.cumsum(eos_slot, axis=1) == 0, chosen, False), axis=1, keepdims=True)
    ordinal = jnp.cumsum(open_slots, axis=1) - 1
    from_row = open_slots & (ordinal >= row)
    return found & jnp.where(by_row[:, None], from_row, from_slot)
