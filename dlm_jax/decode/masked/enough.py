"""Commit rules of models that were trained to decode block by block.

Letters: B batch, C candidates.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.masked.commit import CommitRule, TopN, Around
from dlm_jax.decode.masked.drafts import Clock, Drafts
from dlm_jax.decode.parts import Part, number, whole


@struct.dataclass
class Even(Part, CommitRule):
    """Equal shares of a whole block, the remainder given to its first steps, however many of its tokens are known.

    Attributes:
      steps: forwards of a block; 0 takes one a token.

    Source: SDAR (arXiv 2510.06303), the released decoding.
    """

    steps: int = whole(0)
    timed = True

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        steps = self._steps(clock)
        count = clock.block_length // steps + (clock.step < clock.block_length % steps)
        return drafts.surest(jnp.where(clock.step + 1 >= steps, drafts.count, count))

    def patience(self, clock: Clock) -> Array | int:
        """See `CommitRule.patience`."""
        return jnp.maximum(self._steps(clock), clock.block_tokens)

    def _steps(self, clock: Clock) -> Array:
        return jnp.where(jnp.asarray(self.steps) > 0, self.steps, clock.block_length)


@struct.dataclass
class Enough(Around):
    """The drafts that are sure enough, where they are as many as another rule takes; else what that rule takes.

    Attributes:
      threshold: in the confidence's unit.
      rule: the other rule.

    Source: SDAR's "low_confidence_dynamic" with `Even`, LLaDA2.1's with `TopN`, JetEngine's with `InOrder(Even())`.
    """

    threshold: float = number(0.9)
    rule: CommitRule = TopN(1)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        sure, other = drafts.reach(self.threshold), self.rule.choose(drafts, clock)
        return jnp.where((jnp.sum(sure, axis=1) >= jnp.sum(other, axis=1))[:, None], sure, other)

    def check(self, confidence):
        """See `CommitRule.check`."""
        confidence.check(self.threshold)
        self.rule.check(confidence)


@struct.dataclass
class InOrder(Around):
    """Another rule for which the leftmost drafts are the surest.

    Attributes:
      rule: that is given the order.
    """

    rule: CommitRule = TopN(1)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        return self.rule.choose(drafts.replace(order=-drafts.number.astype(jnp.float32)), clock)


@struct.dataclass
class EntropyBound(Part, CommitRule):
    """The drafts of least entropy whose entropies add up to less than a bound, and always the first of them.

    Attributes:
      bound: nats.

    Source: entropy-bounded unmasking (EB-Sampler, arXiv 2505.24857), as SDAR's engines run it.
    """

    bound: float = number(0.1)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        place = drafts.place
        before = place[:, None, :] <= place[:, :, None]  # itself included
        spent = jnp.sum(jnp.where(before & drafts.eligible[:, None, :], -drafts.confidence[:, None, :], 0.0), axis=2)
        return drafts.eligible & (spent < self.bound) | drafts.surest(1)

    def check(self, confidence):
        """See `CommitRule.check`."""
        if confidence.kind != "entropy":
            raise ValueError(f"EntropyBound adds up entropies, {confidence!r} is none: take confidence=Entropy()")
