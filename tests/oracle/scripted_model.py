"""A model that is an exact integer function of what each query sees, one function a row; AsyncLane's scripted cases.

The format stands in README_asynclane.md beside the cases: a value for every (position, token), a context that is the
sum of the values a query may see, and logits that are a function of the context and of what the case scripts. Sums
stand for attention, so what is stale, hidden or seen twice shows in the integers.

Letters: B rows, T tokens, S cache entries, V vocabulary, Q row positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from dlm_jax.conventions import Conventions
from dlm_jax.scoring import Pass

_SCRIPTED = ("token", "level")


def mix(a):
    """Returns scrambled uint32 numbers."""
    a = jnp.asarray(a, jnp.uint32)
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        a = (a ^ (a >> jnp.uint32(shift))) * jnp.uint32(factor)
    return a ^ (a >> jnp.uint32(16))


def value(seed, position, token):
    """Returns the uint32 value of a token at a position."""
    plain = jnp.asarray(seed, jnp.uint32) + jnp.uint32(0x9E3779B9) * (jnp.asarray(position).astype(jnp.uint32) + 1)
    return mix(mix(plain) + jnp.asarray(token).astype(jnp.uint32))


@struct.dataclass
class Values:
    """A `scoring.Cache` of (B, S) uint32 values."""

    values: Any

    capacity = property(lambda self: self.values.shape[1])
    batch = property(lambda self: self.values.shape[0])

    def grow(self, capacity):
        """See `scoring.Cache.grow`."""
        return Values(jnp.pad(self.values, ((0, 0), (0, capacity - self.capacity))))

    def take(self, rows):
        """See `scoring.Cache.take`."""
        return Values(self.values[rows])

    def insert(self, rows, other):
        """See `scoring.Cache.insert`."""
        return Values(self.values.at[rows].set(other.values))

    def commit(self, accepted):
        """See `scoring.Cache.commit`."""
        del accepted
        return self


@dataclasses.dataclass(frozen=True)
class Config:
    """What decoders ask of a configuration."""

    vocab_size: int
    ordinary: int
    mask_token_id: int
    special: tuple[int, ...]
    shift: int
    eos_token_id: int = 0
    max_position_embeddings: int = 1 << 20
    family: str = "scripted"
    bidirectional: bool = True
    dual: bool = False
    recurrent: bool = False
    block_size: int | None = None

    @property
    def convention(self) -> Conventions:
        """See `TransformerConfig.convention`."""
        return Conventions(logits="shifted" if self.shift else "same")


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A model whose parameters are the scripts of its rows, see `scripts`."""

    config: Config

    def scorer(self, params):
        """Returns the rows' functions."""
        return Scorer(self.config, params)


def scripts(models: list[dict], profiles: dict[str, list[int]], rows: int, positions: int) -> dict[str, np.ndarray]:
    """Returns the parameters of rows with these scripts; rows beyond repeat the last.

    Args:
      models: fields `model` of cases.
      profiles: name -> 256 ids.
      rows: B.
      positions: Q, row positions that may be scripted.
    """
    models = [*models, *[models[-1]] * (rows - len(models))]
    found = {name: np.full((rows, positions), -1, np.int32) for name in _SCRIPTED}
    for row, model in enumerate(models):
        for name in _SCRIPTED:
            for position, number in model[name]:
                if position < positions:
                    found[name][row, position] = number
    return found | {
        "seed": np.array([m["seed"] for m in models], np.uint32),
        "context": np.array([m["context"] for m in models]),
        "pick": np.array([profiles[m["profile"]] for m in models], np.int32)}


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A `scoring.Scorer`; its hidden states are (row, position, context), uint32."""

    config: Config
    params: Any

    bidirectional = True
    block_size = None
    recurrent = False
    vocab_size = property(lambda self: self.config.vocab_size)
    shift = property(lambda self: self.config.shift)

    def init_cache(self, batch, capacity, window=0):
        """See `scoring.Scorer.init_cache`."""
        return Values(jnp.zeros((batch, capacity), jnp.uint32))

    def hidden(self, tokens, told: Pass, cache=None, wanted=None):
        """See `scoring.Scorer.hidden`."""
        B = tokens.shape[0]
        row = jnp.arange(B)[:, None]
        own = value(self.params["seed"][:, None], told.positions, tokens)
        seen = own
        if cache is not None:
            apart = told.visibility.key_length > cache.capacity
            old, cache = cache.values, Values(cache.values.at[row, told.slots].set(own, mode="drop"))
            seen = jnp.concatenate([old, own], axis=1) if apart else cache.values
        asked = told if wanted is None else told.take(wanted)
        context = jnp.sum(jnp.where(asked.visibility.dense(), seen[:, None], jnp.uint32(0)), axis=2, dtype=jnp.uint32)
        rows = jnp.broadcast_to(row.astype(jnp.uint32), context.shape)
        return jnp.stack([rows, asked.positions.astype(jnp.uint32), context], axis=-1), cache

    def head(self, hidden):
        """See `scoring.Scorer.head`."""
        c, p = self.config, self.params
        row, context = hidden[..., 0].astype(jnp.int32), hidden[..., 2]
        j = hidden[..., 1].astype(jnp.int32) + c.shift
        at = lambda name: p[name][row, jnp.minimum(j, p[name].shape[1] - 1)]
        target = (j.astype(jnp.uint32) + 1) * jnp.uint32(0x85EBCA6B)
        h = mix(mix(p["seed"][row] ^ target) + jnp.where(p["context"][row], context, jnp.uint32(0)))
        whole = lambda x: x.astype(jnp.int32)
        a = jnp.where(at("token") >= 0, at("token"), p["pick"][row, whole(h & 255)])
        coarse = jnp.where(at("level") >= 0, at("level"), 4 + whole((h >> 8) % 60))
        level = lambda steps: (steps * 64 + j % 64 + 0.5) / 4096
        V, ids = c.vocab_size, jnp.arange(c.vocab_size)
        barred = jnp.isin(ids, jnp.array([c.mask_token_id, *c.special]))
        base = jnp.broadcast_to(jnp.where(barred, -100.0, 0.0), (*a.shape, V))
        put = lambda logits, token, number: jnp.where(ids == token[..., None], number[..., None], logits)
        plain = level(coarse)
        ordinary = put(base, a, jnp.log(plain * (V - 4) / (1 - plain)))
        b, second, first = 1 + whole((h >> 20) % (c.ordinary - 1)), level(4 + whole((h >> 14) % 60)), level(
            32 + coarse // 2)
        other = jnp.log(second * (V - 4) / (1 - second))
        ending = put(put(base, b, other), a, jnp.log(first * (V - 4 + jnp.exp(other)) / (1 - first)))
        return jnp.where(jnp.isin(a, jnp.array(c.special))[..., None], ending, ordinary)
