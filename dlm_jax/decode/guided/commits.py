"""How much of a judged draft is committed: parts of `Guided`.

Letters: B batch.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.guided.acceptance import UNMAPPED
from dlm_jax.decode.parts import Part, static


@runtime_checkable
class GuideRule(Protocol):
    """Decides how many drafts of a round are committed, and whether a token of the guide stands behind them."""

    def commits(self, agreed: Array, correction: Array) -> tuple[Array, Array]:
        """Returns what a round commits.

        Args:
          agreed: (B,) int32 drafts accepted in a row.
          correction: (B,) int32 the guide's token in place of the first draft that was not, as a draft id; `UNMAPPED`
            where it is none of the drafter's, or every draft was accepted.

        Returns:
          (B,) int32 tokens, at least 1, and (B,) bool, whether the guide's token stands behind those agreed upon.
        """


@struct.dataclass
class Agreed(Part):
    """Commits what is agreed upon, or one token where that is nothing.

    Attributes:
      one_free: whether that token is the guide's (the "one free token" of Sec. 3.2.2, where the drafter has it) or the
        drafter's own (Algorithm 1, and "assisted" in the released code).
    """

    one_free: bool = static(False)

    def commits(self, agreed: Array, correction: Array) -> tuple[Array, Array]:
        """See `GuideRule.commits`."""
        return jnp.maximum(agreed, 1), (agreed == 0) & (correction != UNMAPPED) & self.one_free


@struct.dataclass
class Speculative(Part):
    """Commits what is agreed upon and the guide's own token behind it; where the drafter has none such, as `Agreed`."""

    def commits(self, agreed: Array, correction: Array) -> tuple[Array, Array]:
        """See `GuideRule.commits`."""
        guided = correction != UNMAPPED
        return jnp.where(guided, agreed + 1, jnp.maximum(agreed, 1)), guided
