"""Which of the drafted tokens are committed: a confidence orders them, a rule says how many.

Letters: B batch, C candidates, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

CONFIDENCES = ("probability", "margin", "entropy", "random")


def confidence(logits: Array, tokens: Array, kind: str, keys: Array) -> Array:
    """Returns the (B, C) float32 confidence in each draft, the larger the surer.

    Args:
      logits: (B, C, V) float32.
      tokens: (B, C) int32 drafts.
      kind: "probability" of the draft; "margin" between the two likeliest tokens; "entropy", negative, in nats;
        "random", uniform in [0, 1).
      keys: (B, C) PRNG keys, for "random".
    """
    if kind == "random":
        return jax.vmap(jax.vmap(jax.random.uniform))(keys)
    if kind == "entropy":
        log_p = jax.nn.log_softmax(logits, axis=-1)
        p = jnp.exp(log_p)
        return jnp.sum(jnp.where(p > 0, p * log_p, 0.0), axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    pick = lambda ids: jnp.exp(jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - total)
    if kind == "probability":
        return pick(tokens)
    best = jnp.argmax(logits, axis=-1)
    others = jnp.where(jnp.arange(logits.shape[-1]) == best[..., None], -jnp.inf, logits)
    return pick(best) - jnp.exp(jnp.max(others, axis=-1) - total)


def places(score: Array, eligible: Array) -> Array:
    """Returns the (B, C) int32 place of each candidate, 0 for the best; ties go to the earlier one.

    Args:
      score: (B, C) float32.
      eligible: (B, C) bool; the others get a place beyond all.
    """
    score = jnp.where(eligible, score, -jnp.inf)
    mine, theirs = score[:, :, None], score[:, None, :]
    index = jnp.arange(score.shape[1])
    before = (theirs > mine) | ((theirs == mine) & (index[None, :] < index[:, None]))
    return jnp.where(eligible, jnp.sum(before & eligible[:, None, :], axis=2), score.shape[1])


def above(score: Array, eligible: Array, threshold: Array) -> Array:
    """Returns (B,) how many candidates reach a threshold.

    Args:
      score: (B, C) float32. eligible: (B, C) bool. threshold: () float32.
    """
    return jnp.sum(eligible & (score >= threshold), axis=1)


def by_factor(score: Array, place: Array, eligible: Array, factor: Array) -> Array:
    """Returns (B,) how many candidates to commit by Fast-dLLM's factor rule.

    With confidences in falling order c_1, c_2, …, those before the first c_r < 1 - factor / (r + 1), r >= 2. Where
    that is the last candidate, it comes along: alone it would be committed next in any case.

    Args:
      score: (B, C) float32. place: (B, C) int32, see `places`. eligible: (B, C) bool. factor: () float32.

    Source: Fast-dLLM (arXiv 2505.22618), Sec. 3.3 and the released code.
    """
    number = jnp.sum(eligible, axis=1)
    fails = eligible & (place >= 1) & (score < 1.0 - factor / (place + 2.0))
    before = jnp.min(jnp.where(fails, place, score.shape[1]), axis=1)
    return jnp.where(before >= number - 1, number, before)
