"""Judging drafts in order: which survive, how many in a row, and where an end of sequence cuts them.

Letters: B batch, W places, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.sampling import Sampler


def prefix_length(accepted: Array) -> Array:
    """Returns (B,) int32 how many of (B, W) drafts come before the first that is not accepted."""
    return jnp.sum(jnp.cumprod(accepted, axis=1, dtype=jnp.int32), axis=1)


def through_eos(tokens: Array, keep: Array, eos_id: Array) -> Array:
    """Returns (B, W) bool: the tokens to keep, none behind an end of sequence that is kept.

    Args:
      tokens: (B, W) int32.
      keep: (B, W) bool.
      eos_id: () int32.
    """
    ends = keep & (tokens == eos_id)
    return keep & (jnp.cumsum(ends, axis=1) - ends == 0)


def judge(sampler: Sampler, drafts: Array, draft_logits: Array, logits: Array, keys: Array) -> tuple[Array, Array]:
    """Judges drafts so that what is kept is what the verifying logits would have given.

    Args:
      sampler: of both: greedy drafts must be the likeliest token, sampled ones keep the distribution (see `accept`).
      drafts: (B, W-1) int32.
      draft_logits: (B, W-1, V) that they were drawn from, shaped by the sampler.
      logits: (B, W, V) of the verification, at the same places and one more.
      keys: (B, W) PRNG keys, fresh.

    Returns:
      (B, W-1) bool which drafts survive, and (B, W) int32 the token to take at each place if the one drafted there
      does not.
    """
    def greedy():
        choice = sampling.likeliest(logits)
        return drafts == choice[:, :-1], choice

    sampled = lambda: accept(drafts, draft_logits, sampler.shaped(logits), keys)
    return jax.lax.cond(sampler.warm, sampled, greedy)


def chance(p: Array, q: Array) -> Array:
    """Returns the probability min(1, p / q) with which a draft is kept, of its probability p and its proposal's q."""
    return jnp.minimum(1.0, p / jnp.maximum(q, jnp.finfo(jnp.float32).tiny))


def rest(p: Array, q: Array) -> Array:
    """Returns what a rejected draft leaves of p, the weights max(p - q, 0)."""
    return jnp.maximum(p - q, 0.0)


def accept(drafts: Array, draft_logits: Array, logits: Array, keys: Array) -> tuple[Array, Array]:
    """Judges drafts so that what is kept is distributed as the verifying view's own samples.

    A draft x survives with probability min(1, p(x) / q(x)); in its place comes a draw from max(p - q, 0), and after
    the last draft one from p.

    Args:
      drafts: (B, K-1) int32 drawn from q.
      draft_logits: (B, K-1, V) logits of q, as they were drawn from.
      logits: (B, K, V) logits of p at the same places and one more.
      keys: (B, K) PRNG keys, fresh.

    Returns:
      (B, K-1) bool which drafts survive, and (B, K) int32 the token to take at each place if the one drafted there
      does not.

    Source: Orthrus, Sec. 3.3 (exact rejection sampling); Leviathan et al., 2023, Algorithm 1. A correction drawn from p
    itself, as Orthrus' text can be read, would not be exact: p's mass under q would count twice.
    """
    p, q = jax.nn.softmax(logits, axis=-1), jax.nn.softmax(draft_logits, axis=-1)
    of = lambda mass: jnp.take_along_axis(mass, drafts[..., None], axis=-1)[..., 0]
    coin, other = (jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, i)))(keys) for i in range(2))
    survives = jax.vmap(jax.vmap(jax.random.uniform))(coin[:, :-1]) < chance(of(p[:, :-1]), of(q))
    left = rest(p[:, :-1], q)
    # where p = q nothing is rejected, but for rounding: p then stands for the empty rest
    left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p[:, :-1])
    mass = jnp.concatenate([left, p[:, -1:]], axis=1)
    return survives, sampling.draw(jnp.log(mass), other)
