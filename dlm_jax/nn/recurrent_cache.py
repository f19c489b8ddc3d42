"""What a stack of gated delta rule layers keeps of earlier tokens: a state, and the last pass beside it.

A pass of at most W tokens is not written into the state at once: the cache keeps what its tokens write
(`gated_delta.Writes`) and their raw convolution inputs, and how many of them count, which `commit` may lessen. The next
pass, which reads the state anyway, applies them first: one read and one write of the state a pass, no state of a token
in between is ever stored, and no layer runs again.

Letters: L layers, B batch, T tokens, W tokens kept, J key heads, H value heads, E key width, F value width, X taps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.nn import gated_delta
from dlm_jax.nn.gated_delta import Channels, Writes


@struct.dataclass
class RecurrentCache:
    """State and last pass of every layer, a `scoring.Cache`; every array leads with (L, B), of one layer with (B,).

    Attributes:
      state: (L, B, H, E, F) before the tokens kept.
      inputs: (L, B, X - 1 + W, ...) raw inputs of the convolution, X - 1 before the tokens kept, then theirs.
      writes: (L, B, W, ...) what the tokens kept write.
      advanced: (L, B) int32 tokens kept.
      accepted: (L, B) int32 of them that count.
      capacity: S; a state has room for any number of tokens.
    """

    state: Array
    inputs: Channels
    writes: Writes
    advanced: Array
    accepted: Array
    capacity: int = struct.field(pytree_node=False)

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.state.shape[1]

    @property
    def window(self) -> int:
        """W, tokens of a pass that may be undone."""
        return self.writes.g.shape[-2]

    def grow(self, capacity: int) -> "RecurrentCache":
        """See `scoring.Cache.grow`."""
        return self.replace(capacity=capacity)

    def take(self, rows: Array) -> "RecurrentCache":
        """See `scoring.Cache.take`."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self)

    def insert(self, rows: Array, other: "RecurrentCache") -> "RecurrentCache":
        """See `scoring.Cache.insert`."""
        return jax.tree.map(lambda mine, theirs: mine.at[:, rows].set(theirs), self, other)

    def commit(self, accepted: Array) -> "RecurrentCache":
        """See `scoring.Cache.commit`; of a pass of more than W tokens all count, whatever is asked."""
        return self.replace(accepted=jnp.minimum(accepted.astype(jnp.int32), self.advanced))

    def layer(self, index: Array) -> "RecurrentCache":
        """Returns the cache of one layer; `index` is () int32."""
        return jax.tree.map(lambda x: x[index], self)

    def at(self, index: Array, layer: "RecurrentCache") -> "RecurrentCache":
        """Returns the cache with another one of a layer; `index` is () int32."""
        return jax.tree.map(lambda old, new: old.at[index].set(new.astype(old.dtype)), self, layer)

    def settled(self) -> tuple[Array, Channels]:
        """Returns a layer's (B, H, E, F) state and (B, X - 1, ...) inputs after the tokens that count."""
        past = self.inputs.q.shape[1] - self.window
        return gated_delta.write(self.state, self.writes, self.accepted), _rows(self.inputs, self.accepted, past)


def _rows(x, start: Array, length: int):
    """Cuts `length` tokens from (B,) `start` on out of every (B, T, ...) array."""
    index = start[:, None] + jnp.arange(length)
    of = lambda a: jnp.take_along_axis(a, index.reshape(*index.shape, *(1,) * (a.ndim - 2)), axis=1)
    return jax.tree.map(of, x)


def _fit(x: Array, length: int) -> Array:
    """Cuts (B, T, ...) to `length` tokens, or fills it up with zeros."""
    return jnp.pad(x[:, :length], [(0, 0), (0, max(0, length - x.shape[1])), *((0, 0),) * (x.ndim - 2)])


def init(layers: int, batch: int, capacity: int, window: int, filters: Channels, dtype=jnp.float32) -> RecurrentCache:
    """Returns a cache that has read nothing.

    Args:
      layers, batch, capacity: L, B, S.
      window: W, tokens, at least 1.
      filters: of one layer, (J, E, X), (J, E, X) and (H, F, X); only their shapes count.
      dtype: of raw inputs; states are float32.
    """
    (J, E, X), (H, F, _) = filters.k.shape, filters.v.shape
    zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((layers, batch, *shape), dtype)
    inputs = Channels(*(zeros(X - 1 + window, *f.shape[:2], dtype=dtype) for f in filters))
    writes = Writes(zeros(window, J, E), zeros(window, H, F), zeros(window, H))
    none = zeros(dtype=jnp.int32)
    return RecurrentCache(zeros(H, E, F), inputs, writes, none, none, capacity)


def keep(layer: RecurrentCache, state: Array, tail: Channels, x: Channels, writes: Writes, advance: Array
         ) -> RecurrentCache:
    """Returns a layer's cache that keeps the first W tokens of a pass beside the state before it.

    Args:
      layer: what it was.
      state, tail: before the pass, see `settled`.
      x: (B, T, ...) raw inputs of the pass.
      writes: of its tokens.
      advance: (B,) int32 tokens of it that go on, at most W.
    """
    fit = lambda a: _fit(a, layer.window)
    inputs = jax.tree.map(lambda old, new: jnp.concatenate([old, fit(new.astype(old.dtype))], axis=1), tail, x)
    advance = jnp.minimum(advance, layer.window)
    return layer.replace(state=state, inputs=inputs, writes=jax.tree.map(fit, writes), advanced=advance,
                         accepted=advance)


def settle(layer: RecurrentCache, state: Array, tail: Channels, x: Channels, advance: Array) -> RecurrentCache:
    """Returns a layer's cache that keeps a state and nothing beside it.

    Args:
      layer: what it was.
      state: (B, H, E, F) after the pass.
      tail: (B, X - 1, ...) raw inputs before the pass.
      x: (B, T, ...) raw inputs of the pass.
      advance: (B,) int32 tokens of it that went on.
    """
    whole = jax.tree.map(lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], axis=1), tail, x)
    past = _rows(whole, advance, tail.q.shape[1])
    inputs = jax.tree.map(lambda a: _fit(a, a.shape[1] + layer.window), past)
    none = jnp.zeros_like(advance)
    return layer.replace(state=state, inputs=inputs, writes=jax.tree.map(jnp.zeros_like, layer.writes), advanced=none,
                         accepted=none)
