"""Distributions over a large vocabulary, read a tile at a time: no logits or probabilities of all of it are held.

A pass multiplies hidden states with one tile of the head after another; readings fold what they want of the tiles, and
several readings share a pass. A draw is the largest of logit + Gumbel noise, which a token's id, the row, the forward
and the place determine. So nothing but the rounding of sums depends on the size of tiles.

Letters: B batch, C outputs, V vocabulary, U tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Scorer

TILE = 32_768  # tokens; the paper's are of "O(3 x 10^4)" (B.2)
KEPT = 64  # likeliest tokens kept by a pass; a truncation that keeps fewer needs no search
_GROUP = 16  # tokens
_DIGIT = 4  # bits of a threshold settled by a pass of the search
_ROUNDING = 1e-5  # relative; logits that another product may swap


class Reading(NamedTuple):
    """What is folded of the tiles: `start` is the carry, `read(carry, logits, ids)` gives the next, `end` the result.

    `logits` are (B, C, U) float32, -inf for tokens that another tile holds; `ids` (U,) int32, ascending.
    """

    start: Any
    read: Callable[[Any, Array, Array], Any]
    end: Callable[[Any], Any]


class Rows:
    """Logits of hidden states, computed by tiles whenever they are read; one tile is computed once.

    Attributes:
      shape: (B, C).
      vocabulary: V.
    """

    def __init__(self, score: Scorer, hidden: Array, tile: int = TILE):
        """Takes (B, C, D) hidden states and the scorer whose head reads them."""
        self.shape, self.vocabulary, self._score, self._hidden = hidden.shape[:-1], score.vocab_size, score, hidden
        self._count = -(-self.vocabulary // tile)
        self._logits = score.head(hidden) if self._count == 1 else None

    def read(self, *readings: Reading) -> tuple:
        """Returns what each reading makes of one pass over the vocabulary."""
        starts = tuple(reading.start for reading in readings)
        fold = lambda carries, logits, ids: tuple(
            reading.read(carry, logits, ids) for reading, carry in zip(readings, carries, strict=True))
        tile = lambda index, carries: fold(carries, *self._score.head_tile(self._hidden, index, self._count))
        if self._count == 1:
            carries = fold(starts, self._logits, jnp.arange(self.vocabulary, dtype=jnp.int32))
        else:
            carries = jax.lax.fori_loop(0, self._count, tile, starts)
        return tuple(reading.end(carry) for reading, carry in zip(readings, carries, strict=True))


def best(shape: tuple[int, int], value: Callable[[Array, Array], Array] = lambda logits, ids: logits) -> Reading:
    """Reads the token of the largest value, of equals the first.

    Args:
      shape: (B, C) of the values.
      value: from the logits and ids of a tile, (B, C, U).

    Returns:
      A reading of (B, C) int32 tokens, and their values, -inf where no token has any.
    """
    def read(carry, logits, ids):
        values = value(logits, ids)
        index, (token, highest) = sampling.likeliest(values), carry
        top, found = jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0], ids[index]
        better = (top > highest) | ((top == highest) & (found < token))
        return jnp.where(better, found, token), jnp.maximum(highest, top)

    return Reading((jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf)), read, lambda carry: carry)


def log_sum(shape: tuple[int, int], heat: Array | float = 1.0, floor: Array | float = -jnp.inf) -> Reading:
    """Reads log sum exp(logits / heat) over the tokens whose logits / heat reach a floor.

    Args:
      shape: (B, C).
      heat: () temperature.
      floor: (B, C) or ().
    """
    lowest = jnp.finfo(jnp.float32).min

    def read(carry, logits, ids):
        del ids
        top, total = carry
        scaled = logits / heat
        scaled = jnp.where(scaled >= jnp.asarray(floor)[..., None], scaled, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scaled, axis=-1))
        return higher, total * jnp.exp(top - higher) + jnp.sum(jnp.exp(scaled - higher[..., None]), axis=-1)

    return Reading((jnp.full(shape, lowest), jnp.zeros(shape)), read, lambda carry: carry[0] + jnp.log(carry[1]))


def of(tokens: Array) -> Reading:
    """Reads the logits of (B, C) int32 tokens."""
    read = lambda carry, logits, ids: jnp.maximum(
        carry, jnp.max(jnp.where(ids == tokens[..., None], logits, -jnp.inf), axis=-1))
    return Reading(jnp.full(tokens.shape, -jnp.inf), read, lambda carry: carry)


def highest(shape: tuple[int, int], count: int) -> Reading:
    """Reads the `count` largest logits, (B, C, count) in order.

    They stand in the `count` groups of tokens whose largest logits are the largest: a TPU sorts a twentieth of a tile.
    """
    def read(carry, logits, ids):
        groups = -(-len(ids) // _GROUP)
        if groups > 2 * count:
            wide = jnp.pad(logits, ((0, 0), (0, 0), (0, groups * _GROUP - len(ids))), constant_values=-jnp.inf)
            wide = wide.reshape(*shape, groups, _GROUP)
            chosen = jax.lax.top_k(jnp.max(wide, axis=-1), count)[1]
            logits = jnp.take_along_axis(wide, chosen[..., None], axis=2).reshape(*shape, count * _GROUP)
        return jax.lax.top_k(jnp.concatenate([carry, logits], axis=-1), count)[0]

    return Reading(jnp.full((*shape, count), -jnp.inf), read, lambda carry: carry)


@struct.dataclass
class Law:
    """Distributions that a sampler draws from: softmax(logits / heat) over the tokens that reach a floor.

    Attributes:
      heat: () float32 temperature.
      floor: (B, C) float32 least logits / heat that has a probability; -inf keeps all.
      normaliser: (B, C) float32 log sum exp of what is kept.
    """

    heat: Array
    floor: Array
    normaliser: Array

    def log(self, logits: Array) -> Array:
        """Returns log probabilities of tokens with (B, C, U) logits, -inf where removed."""
        scaled = logits / self.heat
        return jnp.where(scaled >= self.floor[..., None], scaled - self.normaliser[..., None], -jnp.inf)

    def cut(self, start: int, stop: int) -> "Law":
        """Returns the laws of the outputs start, ..., stop - 1."""
        return Law(self.heat, self.floor[:, start:stop], self.normaliser[:, start:stop])

    def take(self, places: Array) -> "Law":
        """Returns the laws of (B, c) outputs."""
        part = lambda x: jnp.take_along_axis(x, places, axis=1)
        return Law(self.heat, part(self.floor), part(self.normaliser))


def law(rows: Rows, sampler: Sampler, *readings: Reading) -> tuple[Law, tuple]:
    """Returns the laws that a sampler draws rows from, and what readings make of the pass over all tokens.

    As `sampling.truncate`, but that tokens which rounding cannot tell from the last one kept stay, too.

    Args:
      rows: of (B, C) outputs.
      sampler: temperature above 0.
      readings: taken along.
    """
    heat = jnp.maximum(jnp.asarray(sampler.temperature, jnp.float32), 1e-6)
    top_k, top_p = jnp.asarray(sampler.top_k), jnp.asarray(sampler.top_p, jnp.float32)

    def plain():
        whole, *found = rows.read(log_sum(rows.shape, heat), *readings)
        return Law(heat, jnp.full(rows.shape, -jnp.inf), whole), tuple(found)

    def truncated():
        V = rows.vocabulary
        whole, top, *found = rows.read(log_sum(rows.shape, heat), highest(rows.shape, min(KEPT, V)), *readings)
        if V <= KEPT:  # there are no more
            top = jnp.pad(top, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
        floor, settled = _floor(top / heat, whole, top_k, top_p)
        floor = jax.lax.cond(jnp.all(settled), lambda: floor, lambda: _searched(rows, heat, whole, top_k, top_p))
        floor = floor - _ROUNDING * (1 + jnp.abs(floor))
        return Law(heat, floor, rows.read(log_sum(rows.shape, heat, floor))[0]), tuple(found)

    return jax.lax.cond((top_k <= 0) & (top_p >= 1.0), plain, truncated)


def _floor(top: Array, whole: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Returns the floor of a truncation that keeps few tokens.

    Args:
      top: (B, C, K) the largest scaled logits, in order, -inf behind the last of all.
      whole: (B, C) log sum exp of all.
      top_k, top_p: (), see `Sampler`.

    Returns:
      (B, C) floor, and (B, C) bool whether that is enough to tell.
    """
    last = top[..., -1]
    by_count = jnp.where(top_k > 0, top[..., jnp.clip(top_k - 1, 0, top.shape[-1] - 1)], -jnp.inf)
    counted = (top_k <= 0) | (by_count > last) | (last == -jnp.inf)
    kept = top >= by_count[..., None]
    total = jnp.where(top_k > 0, jax.nn.logsumexp(jnp.where(kept, top, -jnp.inf), axis=-1), whole)
    mass = jnp.where(kept, jnp.exp(top - total[..., None]), 0.0)
    within = kept & (jnp.cumsum(mass, axis=-1) - mass < top_p)
    by_mass = jnp.min(jnp.where(within, top, jnp.inf), axis=-1)
    reached = (jnp.sum(mass, axis=-1) >= top_p) & (by_mass > last)
    floor = jnp.where(top_p < 1.0, by_mass, by_count)
    return floor, counted & ((top_p >= 1.0) | (top_k > 0) | reached | (last == -jnp.inf))


def _searched(rows: Rows, heat: Array, whole: Array, top_k: Array, top_p: Array) -> Array:
    """Returns the (B, C) floor of any truncation, by passes over the vocabulary."""
    def by_count():
        enough = jnp.minimum(top_k, rows.vocabulary).astype(jnp.float32)
        floor = _highest_floor(rows, lambda scaled: jnp.ones_like(scaled), heat, enough)
        return floor, rows.read(log_sum(rows.shape, heat, floor))[0]

    floor, total = jax.lax.cond(top_k > 0, by_count, lambda: (jnp.full(rows.shape, -jnp.inf), whole))
    mass = lambda scaled: jnp.where(scaled >= floor[..., None], jnp.exp(scaled - total[..., None]), 0.0)
    by_mass = lambda: jnp.maximum(floor, _highest_floor(rows, mass, heat, top_p))
    return jax.lax.cond(top_p < 1.0, by_mass, lambda: floor)


def _highest_floor(rows: Rows, weigh: Callable[[Array], Array], heat: Array, enough: Array) -> Array:
    """Returns the highest (B, C) floor from which on the weights of scaled logits add up to enough.

    It is settled digit by digit over floats in integer order, see `sampling.truncate`.
    """
    digits = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)

    def settle(i, floor):
        shift = (32 - _DIGIT * (i + 1)).astype(jnp.uint32)

        def read(carry, logits, ids):
            del ids
            scaled = logits / heat
            ordered, weight = sampling.ordered(scaled), weigh(scaled)
            return carry + jax.lax.map(lambda digit: jnp.sum(jnp.where(
                ordered >= (floor | (digit << shift))[..., None], weight, 0.0), axis=-1), digits)

        zero = jnp.zeros((len(digits), *rows.shape))
        sums = rows.read(Reading(zero, read, lambda carry: carry))[0]
        return floor | (jnp.sum(sums >= enough, axis=0, dtype=jnp.uint32) << shift)

    floor = jax.lax.fori_loop(0, 32 // _DIGIT, settle, jnp.zeros(rows.shape, jnp.uint32))
    return jnp.where(floor == 0, -jnp.inf, sampling.unordered(floor))


def noise(keys: Array, ids: Array) -> Array:
    """Returns (B, C, U) standard Gumbel noise of tokens.

    Args:
      keys: (B, C) PRNG keys, one a draw.
      ids: (U,) int32; a token's noise is its own, whatever the others.
    """
    one = lambda key, token: jax.random.gumbel(jax.random.fold_in(key, token), (), jnp.float32)
    return jax.vmap(jax.vmap(jax.vmap(one, (None, 0)), (0, None)), (0, None))(keys, ids)


def drawn(law: Law, keys: Array) -> Reading:
    """Reads a draw from every law, with its own of the (B, C) PRNG keys; see `best`."""
    return best(law.floor.shape, lambda logits, ids: law.log(logits) + noise(keys, ids))


def draw(rows: Rows, sampler: Sampler, keys: Array) -> Array:
    """Returns (B, C) int32 tokens, each drawn by a sampler with its own of the (B, C) PRNG keys."""
    sampled = lambda: rows.read(drawn(law(rows, sampler)[0], keys))[0][0]
    return jax.lax.cond(sampler.warm, sampled, lambda: rows.read(best(rows.shape))[0][0])
