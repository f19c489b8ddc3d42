"""Which drafts stay.

Letters: B batch, C candidates.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.masked.confidence import Confidence
from dlm_jax.decode.masked.drafts import Clock, Drafts
from dlm_jax.decode.parts import Part, number, shaped, whole


@runtime_checkable
class CommitRule(Protocol):
    """Chooses drafts; subclass it, make it a `flax.struct.dataclass`, and write `choose`.

    A rule may commit nothing for a while, but not for ever: from the step `patience` of a block on, a forward for which
    it chooses nothing commits the surest draft.
    """

    timed: ClassVar[bool] = False  # whether it plans the steps of one block

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """Returns (B, C) bool: the candidates to commit."""
        raise NotImplementedError(f"{type(self).__name__} has no choose(drafts, clock)")

    def after(self, drafts: Drafts, clock: Clock) -> Array:
        """Returns the (B,) int32 steps taken in the block once this one is."""
        return clock.step + 1

    def patience(self, clock: Clock) -> Array | int:
        """Returns the (B,) steps of a block that may pass without a commit."""
        return clock.block_tokens

    def check(self, confidence: Confidence) -> None:
        """Raises ValueError for a confidence that the rule cannot work with."""

    def check_limit(self, tokens: int, block_length: int) -> None:
        """Raises ValueError for an answer of so many tokens that the rule cannot plan."""


class _Planned(Part, CommitRule):
    """A plan says how many tokens a step commits, the surest first; a block's last step takes the rest.

    Attributes of all: `steps`, forwards for the whole answer, a multiple of its blocks; 0 takes one a token.
    """

    timed = True

    def planned(self, drafts: Drafts, clock: Clock, steps: Array, whole_steps: Array) -> Array:
        """Returns (B,) tokens of this step, given the steps of the block and of the answer."""
        raise NotImplementedError

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        steps, whole_steps = clock.plan(self.steps)
        count = self.planned(drafts, clock, steps, whole_steps)
        return drafts.surest(jnp.where(self.after(drafts, clock) >= steps, drafts.count, count))

    def patience(self, clock: Clock) -> Array | int:
        """See `CommitRule.patience`."""
        return jnp.maximum(clock.plan(self.steps)[0], clock.block_tokens)

    def check_limit(self, tokens: int, block_length: int) -> None:
        """See `CommitRule.check_limit`."""
        blocks = max(-(-tokens // block_length), 1)
        if self.steps % blocks:
            raise ValueError(f"steps = {self.steps} do not divide among the {blocks} blocks of {block_length} that "
                             f"hold {tokens} tokens: take a multiple of {blocks}, or 0 for one step a token")


@struct.dataclass
class Quota(_Planned):
    """Equal shares, the remainder given to a block's first steps (LLaDA).

    Attributes:
      steps: forwards for the whole answer, a multiple of its blocks; 0 takes one a token.
    """

    steps: int = whole(0)

    def planned(self, drafts, clock, steps, whole_steps):
        """See `_Planned.planned`."""
        return clock.block_tokens // steps + (clock.step < clock.block_tokens % steps)


@struct.dataclass
class Timesteps(_Planned):
    """floor(masks (1 - s/t)) of the answer's masks, time falling evenly from 1 to eps over the answer (Dream).

    Attributes:
      steps: as of `Quota`.
      eps: last time.
    """

    steps: int = whole(0)
    eps: float = number(1e-3, least=1e-9, most=1.0)

    def planned(self, drafts, clock, steps, whole_steps):
        """See `_Planned.planned`."""
        share = elapsed(whole_steps, clock.block * steps + clock.step, self.eps)
        return jnp.floor(clock.left * share).astype(jnp.int32)


@struct.dataclass
class BlockTimesteps(Timesteps):
    """`Timesteps` over the masks and the time of each block (Fast-dLLM for Dream)."""

    def planned(self, drafts, clock, steps, whole_steps):
        """See `_Planned.planned`."""
        return jnp.floor(drafts.count * elapsed(steps, clock.step, self.eps)).astype(jnp.int32)


@struct.dataclass
class Ancestral(Timesteps):
    """Each mask of the block with probability 1 - s/t, whatever the confidence (MDLM; Dream's "origin")."""

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        steps, _ = clock.plan(self.steps)
        coin = jax.vmap(jax.vmap(jax.random.uniform))(drafts.keys) - 1.0
        heads = coin >= -elapsed(steps, clock.step, self.eps)[:, None]
        return drafts.eligible & (heads | (clock.step + 1 >= steps)[:, None])


@struct.dataclass
class Shares(_Planned):
    """What is left over the steps left, rounded half to even; steps that would commit nothing are passed over.

    Attributes:
      steps: as of `Quota`.

    Source: the linear schedule of block diffusion (BD3-LM) in dllm's samplers.
    """

    steps: int = whole(0)

    def _left(self, drafts, clock):
        steps, count = clock.plan(self.steps)[0], drafts.count
        # masks / left > 1/2, which rounds to 1 or more
        return jnp.clip(steps - clock.step, 1, jnp.maximum(2 * count - 1, 1))

    def planned(self, drafts, clock, steps, whole_steps):
        """See `_Planned.planned`."""
        left = self._left(drafts, clock)
        share, rest = drafts.count // left, drafts.count % left
        return share + ((2 * rest > left) | ((2 * rest == left) & (share % 2 == 1)))

    def after(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.after`."""
        return clock.plan(self.steps)[0] - self._left(drafts, clock) + 1


@struct.dataclass
class Threshold(Part, CommitRule):
    """Every draft that is sure enough, and always the surest.

    Attributes:
      threshold: in the confidence's unit: a probability or a margin in (0, 1], or nats of entropy.

    Source: Fast-dLLM (arXiv 2505.22618), Sec. 3.3.
    """

    threshold: float = number(0.9)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        return drafts.reach(self.threshold) | drafts.surest(1)

    def check(self, confidence: Confidence) -> None:
        """See `CommitRule.check`."""
        confidence.check(self.threshold)


@struct.dataclass
class Budget(_Planned):
    """As `Threshold`, and no more than equal shares of the steps so far (Fast-dLLM for Dream without a cache).

    Attributes:
      threshold: as of `Threshold`.
      steps: as of `Quota`.
    """

    threshold: float = number(0.9)
    steps: int = whole(0)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        steps, whole_steps = clock.plan(self.steps)
        due = jnp.minimum(clock.block * steps + clock.step + 1, whole_steps) * clock.tokens // whole_steps
        allowed = due - (clock.tokens - clock.left)
        sure = jnp.sum(drafts.reach(self.threshold), axis=1)
        return drafts.surest(jnp.maximum(jnp.minimum(sure, allowed), 1))

    def check(self, confidence: Confidence) -> None:
        """See `CommitRule.check`."""
        confidence.check(self.threshold)


@struct.dataclass
class Factor(Part, CommitRule):
    """Fast-dLLM's factor rule.

    With confidences in falling order c_1, c_2, …, those before the first c_r < 1 - factor / (r + 1), r >= 2. Where
    that is the last candidate, it comes along: alone it would be committed next in any case.

    Attributes:
      factor: positive; larger commits fewer.

    Source: Fast-dLLM (arXiv 2505.22618), Sec. 3.3 and the released code.
    """

    factor: float = number(1.0, least=1e-9)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        place = drafts.place
        fails = drafts.eligible & (place >= 1) & (drafts.confidence < -self.factor / (place + 2.0))
        before = jnp.min(jnp.where(fails, place, place.shape[1]), axis=1)
        count = jnp.where(before >= drafts.count - 1, drafts.count, before)
        return drafts.surest(jnp.maximum(count, 1))

    def check(self, confidence: Confidence) -> None:
        """See `CommitRule.check`."""
        if confidence.kind != "probability":
            raise ValueError(f"Factor bounds probabilities, {confidence!r} is none: take confidence=Probability()")


@struct.dataclass
class TopN(Part, CommitRule):
    """The n surest.

    Attributes:
      n: tokens a forward.
    """

    n: int = whole(1, least=1)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        return drafts.surest(self.n)


class Around(Part, CommitRule):
    """Another rule, changed; what it does not change is the inner rule's."""

    @property
    def timed(self) -> bool:
        """Of the inner rule."""
        return self.rule.timed

    def after(self, drafts, clock):
        """See `CommitRule.after`."""
        return self.rule.after(drafts, clock)

    def patience(self, clock):
        """See `CommitRule.patience`."""
        return self.rule.patience(clock)

    def check(self, confidence):
        """See `CommitRule.check`."""
        self.rule.check(confidence)

    def check_limit(self, tokens, block_length):
        """See `CommitRule.check_limit`."""
        self.rule.check_limit(tokens, block_length)


@struct.dataclass
class FirstToken(Around):
    """Another rule, but the forward that opens a block commits its first token and nothing else (Fast-dLLM for Dream).

    Attributes:
      rule: of the other forwards.
    """

    rule: CommitRule = Threshold()
    timed = True

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        first = drafts.eligible & (jnp.cumsum(drafts.eligible, axis=1) == 1)
        return jnp.where((clock.step == 0)[:, None], first, self.rule.choose(drafts, clock))


@struct.dataclass
class Noisy(Around):
    """Another rule whose order of drafts is disturbed by Gumbel noise (Dream's alg_temp).

    Attributes:
      rule: that is given the order.
      temperature: factor on the noise, unitless; 0 is the rule itself.
    """

    rule: CommitRule = Timesteps()
    temperature: float = number(0.0)

    def choose(self, drafts: Drafts, clock: Clock) -> Array:
        """See `CommitRule.choose`."""
        noise = jax.vmap(jax.vmap(jax.random.gumbel))(drafts.keys) * self.temperature
        return self.rule.choose(drafts.replace(order=drafts.order + noise), clock)


def chosen(rule: CommitRule, drafts: Drafts, clock: Clock) -> Array:
    """Returns the (B, C) candidates to commit: those of a rule, and one where it has waited for too long.

    Args:
      rule: that chooses.
      drafts, clock: as of `CommitRule.choose`.
    """
    found = shaped(rule, "choose", rule.choose(drafts, clock), drafts.eligible.shape) & drafts.eligible
    idle = (clock.step >= rule.patience(clock)) & ~jnp.any(found, axis=1)
    return found | (idle[:, None] & drafts.surest(1))


def elapsed(steps: Array, step: Array, eps: Array) -> Array:
    """Returns (B,) float32 share 1 - s/t of what is masked that a step from time t to s unmasks.

    Args:
      steps: (B,) int32 steps in which time falls evenly from 1 to eps.
      step: (B,) int32 steps taken.
      eps: () float32 last time.
    """
    stride = (eps - 1.0) / steps.astype(jnp.float32)
    # from the nearer end, as torch.linspace does, so that float32 rounds alike
    time = lambda i: jnp.where(i < (steps + 1) // 2, 1.0 + stride * i, eps - stride * (steps - i))
    return 1.0 - time(step + 1) / time(step)
