"""How AR-Trust drafts, and by which rule a draft is kept or corrected.

A policy says what stands for the proposal q where a draft is judged, and what that leaves of the clean stream's
distribution p: a draft d is kept with probability min(1, p(d) / q(d)), in its place comes a draw from max(p - q, 0),
and after the last draft one from p. At temperature 0 all three keep a draft that is the clean stream's likeliest token.

Letters: B batch, K drafts, U tokens.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import speculative
from dlm_jax.decode.flare import tiles
from dlm_jax.decode.flare.tiles import Law, Rows
from dlm_jax.decode.parts import Part
from dlm_jax.decode.sampling import Sampler


class DraftPolicy(Part):
    """A rule of drafting and of judging drafts; subclass it and make it a `flax.struct.dataclass`.

    Attributes:
      draws: drafts are drawn from the noisy rows' law, else their likeliest token is taken.
      truncates: verification takes the laws after top-k and top-p, else p with the temperature alone.
      holds: the proposal's law counts, so the noisy rows that drafts came from are kept until they are judged.
    """

    draws: ClassVar[bool] = False
    truncates: ClassVar[bool] = True
    holds: ClassVar[bool] = True

    def proposal(self, law: Array, drafted: Array) -> Array:
        """Returns the probabilities q that drafts are judged by.

        Args:
          law: (B, K, U) float32 probabilities of the noisy rows that the drafts came from; zeros unless they are held.
          drafted: (B, K, U) bool, the drafts themselves.
        """
        del drafted
        return law


@struct.dataclass
class ExactTruncated(DraftPolicy):
    """Drafts drawn from the truncated q and judged by that same q: answers are distributed as sampled one by one.

    The noisy rows' hidden states are held, from which the head gives all of q again, instead of a list of its tokens.

    Source: FLARE, B.2, Exact-Truncated; Eq. (8).
    """

    draws = True


@struct.dataclass
class SoftmaxArgmax(DraftPolicy):
    """The likeliest token as draft, a point mass as q, and the full softmax as p; nothing is held.

    Exact for the sampler's temperature alone: drafts keep p's mass and corrections the rest. Its top-k and top-p shape
    nothing, so tokens that they remove are drawn.

    Source: FLARE, B.2, Softmax-Argmax; Eq. (21).
    """

    truncates = False
    holds = False

    def proposal(self, law: Array, drafted: Array) -> Array:
        """See `DraftPolicy.proposal`."""
        return drafted.astype(law.dtype)


@struct.dataclass
class TruncatedArgmax(DraftPolicy):
    """The likeliest token as draft, judged as if it had been drawn from the truncated q: not exact.

    Drafts are kept too often where q is flat and corrections avoid what q holds likely. Over a random model of 6 ids,
    whose streams disagree as much as they can, the law of three tokens is 0.18 off in total variation; the better the
    streams agree, the less.

    Source: FLARE, B.2, Truncated-Argmax; Eq. (22). q is that of the noisy row which the draft came from: rows of the
    present window stand elsewhere.
    """


def chance(policy: DraftPolicy, p: Array, q: Array) -> Array:
    """Returns the (B, K) probabilities with which drafts are kept.

    Args:
      policy: the rule.
      p, q: (B, K) log probabilities of the drafts under the clean and the noisy law.
    """
    proposed = policy.proposal(jnp.exp(q)[..., None], jnp.ones((*q.shape, 1), bool))[..., 0]
    return speculative.chance(jnp.exp(p), proposed)


def left(policy: DraftPolicy, p: Array, q: Array, drafted: Array) -> Array:
    """Returns what a rejected draft leaves of p: (B, K, U) weights max(p - q, 0).

    Args:
      policy: the rule.
      p, q: (B, K, U) log probabilities.
      drafted: (B, K, U) bool, the drafts themselves.
    """
    return speculative.rest(jnp.exp(p), policy.proposal(jnp.exp(q), drafted))


def correct(policy: DraftPolicy, rows: Rows, clean: Law, noisy: Law | None, draft: Array, rejected: Array, keys: Array
            ) -> Array:
    """Draws the token that ends a round.

    Args:
      policy: the rule.
      rows: (B, 2) outputs: the clean row that decides, and the noisy row that the draft came from; (B, 1), the first
        alone, where the policy holds none.
      clean, noisy: (B, 1) laws.
      draft: (B, 1) int32 token that the clean row rejected.
      rejected: (B, 1) bool; where it holds not, every draft was kept and the token comes from p.
      keys: (B, 1) PRNG keys.

    Returns:
      (B,) int32 tokens.
    """
    def weights(logits, ids):
        p = clean.log(logits[:, :1])
        q = jnp.full_like(p, -jnp.inf) if noisy is None else noisy.log(logits[:, 1:])
        rest = left(policy, p, q, ids == draft[..., None])
        return jnp.where(rejected[..., None], jnp.log(rest), p)

    shape = draft.shape
    (token, value), (instead, _) = rows.read(
        tiles.best(shape, lambda logits, ids: weights(logits, ids) + tiles.noise(keys, ids)),
        tiles.best(shape, lambda logits, ids: clean.log(logits[:, :1]) + tiles.noise(keys, ids)))
    # where p = q nothing is rejected, but for rounding: p then stands for the empty rest
    return jnp.where(value > -jnp.inf, token, instead)[:, 0]


def of_sampler(policy: DraftPolicy, sampler: Sampler) -> Sampler:
    """Returns the sampler whose laws the policy compares."""
    return sampler if policy.truncates else sampler.replace(top_k=0, top_p=1.0)


def coins(keys: Array) -> Array:
    """Returns a (B, K) uniform number in [0, 1) for each of (B, K) PRNG keys."""
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def apart(keys: Array, purpose: int) -> Array:
    """Returns (B, K) PRNG keys for one of several draws at the same place."""
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, purpose)))(keys)


def likeliest(rows: Rows) -> Array:
    """Returns the (B, C) int32 likeliest tokens."""
    return rows.read(tiles.best(rows.shape))[0][0]
