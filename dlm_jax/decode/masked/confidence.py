"""How sure a draft is.

Letters: B batch, C candidates, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.masked.drafts import Drafts
from dlm_jax.decode.parts import Part, check_number, number


@runtime_checkable
class Confidence(Protocol):
    """Judges drafts; subclass it, make it a `flax.struct.dataclass`, and write `of`."""

    kind: ClassVar[str] = "its own"  # what commit rules with demands look at

    def of(self, drafts: Drafts) -> Array:
        """Returns (B, C) float32, the larger the surer."""
        raise NotImplementedError(f"{type(self).__name__} has no of(drafts)")

    def level(self, threshold: Array | float) -> Array | float:
        """Returns what `of` gives for a draft that just reaches a () threshold in this confidence's unit."""
        return threshold

    def check(self, threshold: float) -> None:
        """Raises ValueError for a threshold that means nothing in this unit."""


@struct.dataclass
class Probability(Confidence):
    """The probability of the draft; `of` gives it less 1: near 1, where most lie, float32 would lose their order.

    Source: LLaDA (arXiv 2502.09992), low-confidence remasking; Fast-dLLM (arXiv 2505.22618), Sec. 3.3.
    """

    kind = "probability"

    def of(self, drafts: Drafts) -> Array:
        """See `Confidence.of`."""
        weight, total = _weights(drafts.logits)
        return -jnp.sum(_without(weight, drafts.tokens), axis=-1) / total

    def level(self, threshold):
        """See `Confidence.level`."""
        return threshold - 1.0

    def check(self, threshold):
        """See `Confidence.check`."""
        check_number("threshold", threshold, 1e-9, 1)


@struct.dataclass
class Margin(Probability):
    """The draft's probability less that of the likeliest other token (Dream); `of` gives it less 1."""

    kind = "margin"

    def of(self, drafts: Drafts) -> Array:
        """See `Confidence.of`."""
        weight, total = _weights(drafts.logits)
        others = _without(weight, drafts.tokens)
        return -(jnp.sum(others, axis=-1) + jnp.max(others, axis=-1)) / total


@struct.dataclass
class TopMargin(Margin):
    """The margin between the two likeliest tokens, whichever was drawn (Dream); the draft's own where it is greedy."""

    def of(self, drafts: Drafts) -> Array:
        """See `Confidence.of`."""
        judged = jnp.where(drafts.sampler.warm, sampling.likeliest(drafts.logits), drafts.tokens)
        return super().of(drafts.replace(tokens=judged))


@struct.dataclass
class Entropy(Confidence):
    """How little the distribution is spread: its entropy in nats, negative; thresholds are nats, reached from above.

    Source: Dream's released sampler, "entropy".
    """

    kind = "entropy"

    def of(self, drafts: Drafts) -> Array:
        """See `Confidence.of`."""
        weight, total = _weights(drafts.logits)
        terms = jnp.where(weight > 0, weight * jnp.log(jnp.maximum(weight, 1e-37)), 0.0)
        others = jnp.sum(_without(weight, sampling.likeliest(weight)), axis=-1)
        # of weights w that sum to W: sum w log w / W - log W, and the likeliest token weighs 1
        return jnp.sum(terms, axis=-1) / total - jnp.log1p(others)

    def level(self, threshold):
        """See `Confidence.level`."""
        return -threshold

    def check(self, threshold):
        """See `Confidence.check`."""
        check_number("threshold", threshold, 0)


@struct.dataclass
class Random(Confidence):
    """No confidence: uniform in [-1, 0) (LLaDA's random remasking)."""

    kind = "random"

    def of(self, drafts: Drafts) -> Array:
        """See `Confidence.of`."""
        return jax.vmap(jax.vmap(jax.random.uniform))(drafts.keys) - 1.0

    def check(self, threshold):
        """See `Confidence.check`."""
        raise ValueError(f"threshold = {threshold} with random confidences commits at random: take Quota, or another "
                         "confidence")


@struct.dataclass
class Tempered(Part, Confidence):
    """Another confidence, of the distribution after temperature and truncation (Dream) instead of the model's own.

    Attributes:
      inner: the confidence.
      temperature: of the distribution; None takes the sampler's, or the model's own where drafts are greedy.
    """

    inner: Confidence = Probability()
    temperature: float | None = number(None, least=1e-6)

    @property
    def kind(self) -> str:
        """Of the inner one."""
        return self.inner.kind

    def of(self, drafts: Drafts) -> Array:
        """See `Confidence.of`; the mask is part of what Dream judges."""
        temperature = jnp.where(drafts.sampler.warm, drafts.sampler.temperature, 1.0) \
            if self.temperature is None else self.temperature
        return self.inner.of(drafts.replace(logits=drafts.sampler.shaped(drafts.logits, temperature)))

    def level(self, threshold):
        """See `Confidence.level`."""
        return self.inner.level(threshold)

    def check(self, threshold):
        """See `Confidence.check`."""
        self.inner.check(threshold)


def _weights(logits: Array) -> tuple[Array, Array]:
    """Returns (B, C, V) weights, the likeliest token's 1, and their (B, C) sum."""
    weight = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return weight, jnp.sum(weight, axis=-1)


def _without(weight: Array, tokens: Array) -> Array:
    return jnp.where(jnp.arange(weight.shape[-1]) == tokens[..., None], 0.0, weight)
