"""Which of the drafted tokens are committed: a confidence orders them, a rule says how many.

Letters: B batch, C candidates, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.decode import sampling

CONFIDENCES = ("probability", "margin", "entropy", "random")


def confidence(logits: Array, tokens: Array, kind: Array, keys: Array) -> Array:
    """Returns the (B, C) float32 confidence in each draft, at most 0, the larger the surer.

    Probability and margin are given less 1: near 1, where most confidences lie, float32 would lose their order.

    Args:
      logits: (B, C, V) float32.
      tokens: (B, C) int32 drafts.
      kind: () int32 index into `CONFIDENCES`: probability of the draft, less 1; its margin over the likeliest
        other token, less 1; entropy, negative, in nats; random, uniform in [-1, 0).
      keys: (B, C) PRNG keys, for "random".
    """
    weight = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.sum(weight, axis=-1)
    without = lambda ids: jnp.where(jnp.arange(logits.shape[-1]) == ids[..., None], 0.0, weight)

    def margin():
        others = without(tokens)
        return -(jnp.sum(others, axis=-1) + jnp.max(others, axis=-1)) / total

    def entropy():  # of weights w that sum to W: sum w log w / W - log W
        terms = jnp.where(weight > 0, weight * jnp.log(jnp.maximum(weight, 1e-37)), 0.0)
        others = jnp.sum(without(sampling.likeliest(weight)), axis=-1)
        return jnp.sum(terms, axis=-1) / total - jnp.log1p(others)  # the likeliest token weighs 1

    return jax.lax.switch(kind, [
        lambda: -jnp.sum(without(tokens), axis=-1) / total,
        margin,
        entropy,
        lambda: jax.vmap(jax.vmap(jax.random.uniform))(keys) - 1.0,
    ])


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
      score: (B, C) float32. eligible: (B, C) bool. threshold: () or (B, 1) float32.
    """
    return jnp.sum(eligible & (score >= threshold), axis=1)


def by_factor(score: Array, place: Array, eligible: Array, factor: Array) -> Array:
    """Returns (B,) how many candidates to commit by Fast-dLLM's factor rule.

    With confidences in falling order c_1, c_2, …, those before the first c_r < 1 - factor / (r + 1), r >= 2. Where
    that is the last candidate, it comes along: alone it would be committed next in any case.

    Args:
      score: (B, C) float32 probabilities less 1. place: (B, C) int32, see `places`. eligible: (B, C) bool.
      factor: () float32.

    Source: Fast-dLLM (arXiv 2505.22618), Sec. 3.3 and the released code.
    """
    number = jnp.sum(eligible, axis=1)
    fails = eligible & (place >= 1) & (score < -factor / (place + 2.0))
    before = jnp.min(jnp.where(fails, place, score.shape[1]), axis=1)
    return jnp.where(before >= number - 1, number, before)


def forced(chosen: Array, eligible: Array, score: Array, masked: Array, ready: Array, opened: Array) -> Array:
    """Returns (B, G) the token that the first unfinished block must commit, if it got none and its turn has come.

    Args:
      chosen, eligible: (B, G) bool. score: (B, G) float32. masked: (B, G) bool.
      ready: (B, n) bool blocks that are far enough for their successor to be sure of a token.
      opened: (B,) int32 blocks open.

    Source: d3LLM (arXiv 2601.07568), multi-block decoding.
    """
    B, n = ready.shape
    split = lambda x: jnp.any(x.reshape(B, n, -1), axis=2)
    turn = jnp.concatenate([jnp.ones((B, 1), bool), ready[:, :-1]], axis=1)  # the prompt is ready
    turn &= (jnp.arange(n) < opened[:, None]) & split(masked)
    turn &= (jnp.cumsum(turn, axis=1) == 1) & ~split(chosen)
    inside = jnp.repeat(turn, masked.shape[1] // n, axis=1) & eligible
    return inside & (places(score, inside) == 0)
