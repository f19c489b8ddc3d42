"""Which drafts a guide agrees with: parts of `Guided`, open to whoever writes one.

A guide's verdict is read in the drafter's vocabulary: each of its ids is named by a draft id, `UNMAPPED` where the
drafter has no such token, which equals no draft.

Letters: B batch, W drafts, V the drafter's vocabulary, V' the guide's.

Source: "FlashDLM", Sec. 3.2.2, Algorithm 1, C.4; its released code (flash-dlm-experimental, guided_diffusion).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.parts import Part, number, whole

UNMAPPED = -1  # no token of the drafter's vocabulary


@struct.dataclass
class Proposal:
    """Drafts, and what both models say at their places.

    Attributes:
      draft: (B, W) int32 draft ids.
      draft_logits: (B, W, V) float32 of the drafter, -inf for the mask, temperature not applied.
      guide_logits: (B, W, V') float32 of the guide, which has read the drafts before each place.
      to_draft: (V',) int32 draft id of each guide id, `UNMAPPED` for none; several may stand for one draft.
    """

    draft: Array
    draft_logits: Array
    guide_logits: Array
    to_draft: Array

    def choice(self) -> Array:
        """Returns (B, W) int32 the guide's likeliest token, as a draft id."""
        return self.to_draft[sampling.likeliest(self.guide_logits)]

    def share(self) -> Array:
        """Returns (B, W) float32 the guide's probability of the draft over that of its likeliest token."""
        return jnp.exp(jnp.max(self._own(), axis=-1) - jnp.max(self.guide_logits, axis=-1))

    def place(self) -> Array:
        """Returns (B, W) int32 the draft's place among the guide's tokens.

        0 for the likeliest, of equals the lower id, V' for a draft that the guide has no token for.
        """
        own, logits = self._own(), self.guide_logits
        best, logit = sampling.likeliest(own)[..., None], jnp.max(own, axis=-1, keepdims=True)
        before = (logits > logit) | ((logits == logit) & (jnp.arange(logits.shape[-1]) < best))
        return jnp.where(logit[..., 0] > -jnp.inf, jnp.sum(before, axis=-1), logits.shape[-1])

    def _own(self) -> Array:
        """Returns (B, W, V') the guide's logits of the tokens that stand for the draft, -inf for the others."""
        return jnp.where(self.to_draft == self.draft[..., None], self.guide_logits, -jnp.inf)


@runtime_checkable
class Acceptance(Protocol):
    """Judges every draft by itself; what is committed of them, a `GuideRule` decides.

    A frozen dataclass (`flax.struct.dataclass`) with this method; its numbers are traced.
    """

    def accepts(self, proposal: Proposal) -> Array:
        """Returns (B, W) bool, which drafts may stay."""


@struct.dataclass
class Exact(Part):
    """A draft stays where it is the guide's likeliest token (Algorithm 1)."""

    def accepts(self, proposal: Proposal) -> Array:
        """See `Acceptance.accepts`."""
        return proposal.draft == proposal.choice()


@struct.dataclass
class TopK(Part):
    """A draft stays where it is one of the guide's K likeliest tokens (Table 7).

    Attributes:
      top_k: K; 1 is `Exact`.
    """

    top_k: int = whole(2, least=1)

    def accepts(self, proposal: Proposal) -> Array:
        """See `Acceptance.accepts`."""
        return proposal.place() < self.top_k


@struct.dataclass
class Relative(Part):
    """The released relaxed rule: a draft stays where it is one of the guide's K likeliest tokens and likely enough.

    Attributes:
      top_k: K.
      share: least probability that the guide gives it, of that of its likeliest token.
    """

    top_k: int = whole(2, least=1)
    share: float = number(0.5, most=1.0)

    def accepts(self, proposal: Proposal) -> Array:
        """See `Acceptance.accepts`."""
        return (proposal.place() < self.top_k) & (proposal.share() >= self.share)


@struct.dataclass
class Relaxed(Part):
    """The paper's relaxed rule: a draft stays where it agrees exactly, or where the drafter is sure enough of its own.

    Its K = 2 likeliest tokens of the guide hold the likeliest, the only one that is compared.

    Attributes:
      tau: the drafter's largest probability must exceed tau times the guide's largest.

    Source: C.4, Table 11. What it calls logits are outputs of softmax (Sec. 3.2.2, Algorithm 1).
    """

    tau: float = number(0.5, most=1.0)

    def accepts(self, proposal: Proposal) -> Array:
        """See `Acceptance.accepts`."""
        largest = lambda logits: jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
        sure = largest(proposal.draft_logits) > self.tau * largest(proposal.guide_logits)
        return Exact().accepts(proposal) | sure


@struct.dataclass
class Sure(Part):
    """What another rule accepts, and the drafter itself is sure of; a weak guide then confirms no mere guesses.

    Attributes:
      accept: the other rule.
      threshold: least probability that the drafter gives the draft.
    """

    accept: Acceptance = Exact()
    threshold: float = number(0.5, most=1.0)

    def accepts(self, proposal: Proposal) -> Array:
        """See `Acceptance.accepts`."""
        mass = jax.nn.log_softmax(proposal.draft_logits, axis=-1)
        own = jnp.take_along_axis(mass, proposal.draft[..., None], axis=-1)[..., 0]
        return self.accept.accepts(proposal) & (own >= jnp.log(self.threshold))
