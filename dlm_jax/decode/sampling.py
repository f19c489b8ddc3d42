"""Turning logits into tokens: one sampler for every decoder, and a key for every draw, so rows never interact.

Letters: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.parts import Part, number, whole


@struct.dataclass
class Sampler(Part):
    """How logits become tokens; the work of sampling is skipped at run time where the temperature is 0.

    Attributes:
      temperature: unitless; 0 takes the likeliest token.
      top_k: tokens kept before sampling; 0 keeps all.
      top_p: probability mass kept before sampling, in (0, 1], after `top_k`; 1 keeps all.
    """

    temperature: float = number(0.0)
    top_k: int = whole(0)
    top_p: float = number(1.0, least=1e-6, most=1.0)

    @property
    def warm(self) -> Array:
        """() bool, whether tokens are drawn at random."""
        return jnp.asarray(self.temperature) > 0

    def shaped(self, logits: Array, temperature: Array | float | None = None) -> Array:
        """Returns the (..., V) logits of the distribution that is drawn from, -inf where removed.

        Args:
          logits: (..., V) float32.
          temperature: () float32 in place of the sampler's own.
        """
        logits = logits / jnp.maximum(self.temperature if temperature is None else temperature, 1e-6)
        off = (jnp.asarray(self.top_k) <= 0) & (jnp.asarray(self.top_p) >= 1.0)
        return jax.lax.cond(off, lambda x: x, lambda x: truncate(x, self.top_k, self.top_p), logits)

    def draw(self, logits: Array, keys: Array) -> Array:
        """Returns (B, T) int32 tokens of (B, T, V) float32 logits, each from its own of the (B, T) PRNG keys."""
        greedy = likeliest(logits)
        return jax.lax.cond(self.warm, lambda: draw(self.shaped(logits), keys), lambda: greedy)


def truncate(logits: Array, top_k: Array | int = 0, top_p: Array | float = 1.0) -> Array:
    """Removes all but the likeliest tokens; ties at the border stay.

    Args:
      logits: (..., V) float32, temperature already applied.
      top_k: () int32 number of tokens kept; 0 keeps all.
      top_p: () float32 probability mass kept, in (0, 1]; the token that crosses it stays.

    Returns:
      (..., V) logits, -inf where removed.
    """
    V = logits.shape[-1]
    enough = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    logits = _from(logits, lambda kept: jnp.sum(kept, axis=-1) >= enough)
    mass = jax.nn.softmax(logits, axis=-1)
    within = _from(logits, lambda kept: jnp.sum(jnp.where(kept, mass, 0.0), axis=-1) >= top_p)
    return jnp.where(top_p < 1.0, within, logits)


def _from(logits: Array, enough) -> Array:
    """Keeps the logits from the highest threshold on that keeps enough; -inf below it.

    The threshold is built bit by bit over floats in integer order: 32 reductions, where sorting a vocabulary
    takes the TPU compiler minutes.
    """
    bits = ordered(logits)

    def settle(i, threshold):
        higher = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(bits >= higher[..., None]), higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, settle, jnp.zeros(logits.shape[:-1], jnp.uint32))
    return jnp.where(bits >= threshold[..., None], logits, -jnp.inf)


def ordered(values: Array) -> Array:
    """Returns (...) uint32 numbers in the order of (...) float32 values."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def unordered(numbers: Array) -> Array:
    """Returns the (...) float32 values that `ordered` made (...) uint32 numbers of."""
    return jax.lax.bitcast_convert_type(
        jnp.where(numbers >> 31, numbers ^ jnp.uint32(1 << 31), ~numbers), jnp.float32)


def likeliest(logits: Array) -> Array:
    """Returns the (...) int32 index of the largest of (..., V) float32 logits, of equals the first.

    XLA's argmax keeps value and index in one loop, which CPUs cannot vectorise; two plain reductions take a fifth of
    the time there. Indices pass through float32, which is exact below 2**24. A row that holds a NaN gets any index.
    """
    V = logits.shape[-1]

    def two_reductions(x):
        first = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), -jnp.arange(V, dtype=jnp.float32), -jnp.inf)
        return jnp.clip(-jnp.max(first, axis=-1), 0, V - 1).astype(jnp.int32)  # nothing equals a NaN

    one_loop = lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    return one_loop(logits) if V >= 1 << 24 else jax.lax.platform_dependent(
        logits, cpu=two_reductions, default=one_loop)


def draw(logits: Array, keys: Array) -> Array:
    """Draws a token per position from softmax(logits).

    Args:
      logits: (B, T, V) float32, -inf where never drawn.
      keys: (B, T) PRNG keys, one a draw.

    Returns:
      (B, T) int32 token ids.
    """
    gumbel = lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32)
    return likeliest(logits + jax.vmap(jax.vmap(gumbel))(keys))


def draw_keys(keys: Array, forward: Array, number: Array) -> Array:
    """Returns the key of every draw of a forward; it knows the token's place, not its neighbours or the batch.

    Args:
      keys: (B,) PRNG keys, one a row.
      forward: (B,) int32 forwards of the row so far.
      number: (B, T) int32 number of each drawn token, see `request`.

    Returns:
      (B, T) PRNG keys.
    """
    of_forward = jax.vmap(jax.random.fold_in)(keys, forward)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(of_forward, number)
