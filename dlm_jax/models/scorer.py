"""Joins a module and its parameters into the scorer that objectives and decoders receive."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from dlm_jax.models.config import parts
from dlm_jax.models.layers import MIXERS, VIEWS
from dlm_jax.models.owner import ADAPTER
from dlm_jax.nn import visibility as vis
from dlm_jax.nn.cache import Caches
from dlm_jax.scoring import Pass
from dlm_jax.types import Params


@dataclasses.dataclass(frozen=True)
class BoundScorer:
    """A `scoring.Scorer` made of a module and its parameters; build it inside the jitted function."""

    model: Any
    params: Params
    adapted: bool = False  # whether the adapter of the parameters is on, where they have one, see `models.lora`

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    @property
    def dtype(self) -> Any:
        """Dtype the body computes in."""
        return self.model.dtype or self.params["embed"].dtype

    @property
    def shift(self) -> int:
        """See `scoring.Scorer.shift`."""
        return self.model.config.shift

    @property
    def bidirectional(self) -> bool:
        """See `scoring.Scorer.bidirectional`."""
        return self.model.config.bidirectional

    @property
    def block_size(self) -> int | None:
        """See `scoring.Scorer.block_size`."""
        return self.model.config.block_size

    @property
    def noisy_shift(self) -> int | None:
        """See `scoring.Scorer.noisy_shift`."""
        return self.model.config.noisy_shift

    @property
    def recurrent(self) -> bool:
        """See `scoring.Scorer.recurrent`."""
        return self.model.config.recurrent

    @property
    def views(self) -> tuple[str, ...]:
        """See `scoring.Scorer.views`."""
        return tuple(VIEWS) if self.model.config.dual or self._has_adapter else ("ar",)

    @property
    def _has_adapter(self) -> bool:
        return ADAPTER in (self.params or ())  # a scorer that is asked for its facts alone has no parameters

    def view(self, name: str) -> "BoundScorer":
        """See `scoring.Scorer.view`.

        Raises:
          ValueError: an unknown view, or a second view of a model that has one.
        """
        if name not in VIEWS:
            raise ValueError(f"view {name!r}: expected one of {sorted(VIEWS)}")
        if self._has_adapter:
            return dataclasses.replace(self, adapted=name == "diffusion")
        if name != "ar" and not self.model.config.dual:
            raise ValueError(f"a {self.model.config.family} model has no {name} view: make a dual model of it first "
                             "(dlm_jax.init_from_ar, or launch.convert_weights to-orthrus), or attach an adapter "
                             "(models.lora)")
        return dataclasses.replace(self, model=dataclasses.replace(self.model, view=name))

    def _apply(self, *arguments, method: str):
        params = {name: value for name, value in self.params.items() if name != ADAPTER}
        adapter = {ADAPTER: self.params[ADAPTER]} if self.adapted else {}
        return self.model.apply({"params": params, **adapter}, *arguments, method=method)

    def hidden(self, tokens, told: Pass, cache=None, wanted=None):
        """See `scoring.Scorer.hidden`."""
        return self._apply(tokens, told, cache, wanted, method="hidden")

    def head(self, hidden: Array) -> Array:
        """See `scoring.Scorer.head`."""
        return self._apply(hidden, method="head")

    def head_tile(self, hidden: Array, index: Array, count: int) -> tuple[Array, Array]:
        """See `scoring.Scorer.head_tile`."""
        return self._apply(hidden, index, count, method="head_tile")

    def init_cache(self, batch: int, capacity: int, window: int = 0) -> Caches:
        """See `scoring.Scorer.init_cache`; a member for every layer of a period, or of the whole stack if unrolled."""
        c, of = self.model.config, self.params
        mixers = [parts(kind)[0] for kind in (c.pattern if self.model.scan else c.pattern * c.num_periods)]
        if not self.model.scan:
            layers = [of[f"layers_{i}"] for i in range(len(mixers))]
        else:
            layers = [of["layers"]] if len(mixers) == 1 else [of["layers"][f"layer_{i}"] for i in range(len(mixers))]
        return Caches(tuple(
            MIXERS[mixer].init_cache(c, layer[mixer], batch, capacity, self.dtype, window)
            for mixer, layer in zip(mixers, layers, strict=True)))

    def __call__(self, tokens, positions=None, visibility=None) -> Array:
        """See `scoring.Scorer.__call__`."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if visibility is None:
            visibility = self._usual(jnp.ones(tokens.shape, bool))
        return self.head(self.hidden(tokens, Pass(positions, visibility))[0])

    def _usual(self, valid: Array) -> vis.Visibility:
        """Returns what tokens see of each other by the model's conventions."""
        told = self.model.config.convention
        if told is None or told.prompt == "causal":
            return vis.causal(valid)
        if told.prompt == "full":
            return vis.bidirectional(valid)
        if self.block_size is None:
            raise ValueError(f"tokens of this {self.model.config.family} model see their block, and its config names "
                             "no block_size: set one, or pass a visibility")
        return vis.blocks(valid, self.block_size)
