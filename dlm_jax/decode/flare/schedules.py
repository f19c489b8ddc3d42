"""How sure a token must be at each denoise step of a block.

Letters: B batch.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.parts import Part, check_number, number


class Thresholds(Part):
    """A schedule gamma_s; subclass it, make it a `flax.struct.dataclass`, and write `at`."""

    def at(self, step: Array) -> Array:
        """Returns the () or (B,) float32 probability that step (B,) int32, from 0, asks for; see `DiffusionTrust`."""
        raise NotImplementedError(f"{type(self).__name__} has no at(step)")


@struct.dataclass
class Constant(Thresholds):
    """The same probability at every step."""

    probability: float = number(0.9, most=1.0)

    def at(self, step: Array) -> Array:
        """See `Thresholds.at`."""
        del step
        return jnp.asarray(self.probability)


@struct.dataclass
class Each(Thresholds):
    """A probability for each step, the last of them from then on."""

    probabilities: tuple[float, ...] = struct.field(default=(0.9,), metadata={"kind": float})

    def __post_init__(self):
        values = self.probabilities
        if isinstance(values, (int, float, list)) or isinstance(values, tuple) and not values:
            raise ValueError(f"probabilities = {values!r}: expected a tuple of numbers, one a step")
        for value in values if isinstance(values, tuple) else ():
            check_number("probabilities", value, 0.0, 1.0)

    def at(self, step: Array) -> Array:
        """See `Thresholds.at`."""
        values = jnp.asarray(self.probabilities, jnp.float32)
        return values[jnp.minimum(step, len(values) - 1)]
