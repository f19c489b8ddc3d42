"""What has been generated and committed.

Letters: B batch, W tokens, G generation capacity.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.request import Request

NOTHING, DRAFTED, AUTOREGRESSIVE = -1, 0, 1  # where a token came from
ORIGINS = {DRAFTED: "drafted", AUTOREGRESSIVE: "autoregressive"}


@struct.dataclass
class Canvas:
    """Generated tokens as committed.

    Attributes:
      tokens: (B, G) int32; the mask id (or 0) where nothing is committed.
      committed_at: (B, G) int32 forward after prefill at which a token was committed; -1 where nothing is.
      origin: (B, G) int32 `DRAFTED`, `AUTOREGRESSIVE` or `NOTHING`.
    """

    tokens: Array
    committed_at: Array
    origin: Array

    @classmethod
    def empty(cls, request: Request) -> "Canvas":
        """Returns a canvas with nothing on it."""
        shape = (request.batch, request.capacity)
        nothing = jnp.full(shape, -1, jnp.int32)
        return cls(jnp.full(shape, jnp.maximum(request.mask_id, 0), jnp.int32), nothing, nothing)

    def commit(self, number: Array, mask: Array, tokens: Array, origin: Array | int, forward: Array) -> "Canvas":
        """Writes tokens.

        Args:
          number: (B, W) int32, distinct within a row.
          mask: (B, W) bool which of them to write.
          tokens: (B, W) int32.
          origin: (B, W) or () int32.
          forward: (B,) int32 forwards after prefill so far.
        """
        put = lambda old, new: scatter(old, number, mask, new)
        return Canvas(put(self.tokens, tokens), put(self.committed_at, forward[:, None]), put(self.origin, origin))

    def retract(self, number: Array, mask: Array) -> "Canvas":
        """Takes tokens back, whose place holds the mask already; arguments as of `commit`."""
        put = lambda old: scatter(old, number, mask, -1)
        return self.replace(committed_at=put(self.committed_at), origin=put(self.origin))


def scatter(into: Array, number: Array, mask: Array, values: Array | int) -> Array:
    """Returns (B, G) values with some replaced.

    Args:
      into: (B, G).
      number: (B, W) int32, distinct within a row where the mask holds.
      mask: (B, W) bool which of them to write.
      values: what to write, broadcast to (B, W).
    """
    row = jnp.arange(number.shape[0])[:, None]
    number = jnp.where(mask, number, into.shape[1])
    return into.at[row, number].set(jnp.broadcast_to(values, number.shape), mode="drop")
