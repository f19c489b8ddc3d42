"""A drafter and its guide as one model, so that every loop takes the pair as it takes any model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.decode.request import Request
from dlm_jax.scoring import Scorer
from dlm_jax.types import Params


class _Drafter:
    """Whatever is asked of the pair is asked of its `drafter`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "drafter":
            raise AttributeError(name)
        return getattr(self.drafter, name)


@dataclasses.dataclass(frozen=True)
class GuidedScorer(_Drafter):
    """The drafter's scorer, with the guide's beside it.

    Attributes:
      drafter: scorer of the diffusion model.
      guide: scorer of the causal model.
      feed: (draft vocabulary,) int32 guide id fed for each draft id.
      to_draft: (guide vocabulary,) int32 draft id of each guide id, -1 for none.
    """

    drafter: Scorer
    guide: Scorer
    feed: Array
    to_draft: Array

    def __call__(self, *arguments, **options) -> Array:
        """See `scoring.Scorer.__call__`."""
        return self.drafter(*arguments, **options)

    def for_guide(self, request: Request) -> Request:
        """Returns the batch as the guide reads it: its own prompts, or the drafter's in its ids."""
        if request.guide_prompt is None:
            return request.replace(prompt=self.feed[request.prompt])
        return request.replace(prompt=request.guide_prompt, prompt_length=request.guide_length)


@dataclasses.dataclass(frozen=True)
class GuidedConfig(_Drafter):
    """The drafter's configuration, with the guide's beside it."""

    drafter: Any
    guide: Any

    @property
    def max_position_embeddings(self) -> int:
        """As many positions as both models know."""
        return min(self.drafter.max_position_embeddings, self.guide.max_position_embeddings)


@dataclasses.dataclass(frozen=True)
class GuidedModel:
    """Two modules; their parameters are {"draft", "guide", "feed", "to_draft"}. `join` makes it."""

    drafter: Any
    guide: Any

    @property
    def config(self) -> GuidedConfig:
        """Both configurations."""
        return GuidedConfig(self.drafter.config, self.guide.config)

    def scorer(self, params: Params) -> GuidedScorer:
        """Binds the parameters of both."""
        return GuidedScorer(self.drafter.scorer(params["draft"]), self.guide.scorer(params["guide"]), params["feed"],
                            params["to_draft"])


def join(model: Any, params: Params, guide_model: Any, guide_params: Params,
         vocabulary_map: Any | None = None) -> tuple[GuidedModel, Params]:
    """Makes one model of a drafter and its guide, for `generate(..., Guided(...))`.

    The two keep their own dtypes and shardings. If they live on different devices, the one on fewer is copied to
    all devices of the other.

    Args:
      model, params: the bidirectional diffusion model.
      guide_model, guide_params: the causal model.
      vocabulary_map: a `data.vocabulary_map.VocabularyMap`; None says that both have the same vocabulary.

    Returns:
      The pair and its parameters; nothing is copied that is where it should be.

    Raises:
      ValueError: a causal drafter, a bidirectional or recurrent guide, vocabularies that differ without a map, a map
        for other vocabularies.
    """
    drafter, guide = model.config, guide_model.config
    if not drafter.bidirectional:
        raise ValueError(f"the drafter is a causal {drafter.family}: guided decoding drafts with a bidirectional "
                         "diffusion model (LLaDA, Dream, …); is it the guide?")
    if guide.bidirectional:
        raise ValueError(f"the guide is a bidirectional {guide.family}: it must be a causal model (Qwen, …); is it the "
                         "drafter?")
    if getattr(guide, "recurrent", False):
        raise ValueError(f"the guide, a {guide.family}, has recurrent layers, whose state would keep the drafts it "
                         "turns down: take a guide of attention alone (Qwen3, …)")
    sizes = (drafter.vocab_size, guide.vocab_size)
    if vocabulary_map is None:
        if sizes[0] != sizes[1]:
            raise ValueError(f"the drafter has {sizes[0]} ids and the guide {sizes[1]}, and no vocabulary_map says "
                             "which are the same: data.vocabulary_map.build(draft_tokenizer, guide_tokenizer, "
                             f"draft_size={sizes[0]}, guide_size={sizes[1]})")
        feed = to_draft = jnp.arange(sizes[0], dtype=jnp.int32)
    else:
        if (vocabulary_map.draft_size, vocabulary_map.guide_size) != sizes:
            raise ValueError(
                f"vocabulary_map is for {vocabulary_map.draft_size} and {vocabulary_map.guide_size} ids, the drafter "
                f"has {sizes[0]} and the guide {sizes[1]}: build it with draft_size={sizes[0]}, guide_size={sizes[1]}")
        feed, to_draft = jnp.asarray(vocabulary_map.feed), jnp.asarray(vocabulary_map.to_draft)
    together = _together({"draft": params, "guide": guide_params, "feed": feed, "to_draft": to_draft})
    return GuidedModel(model, guide_model), together


def _together(tree: Params) -> Params:
    """Moves all to the devices of what lives on most, in the order of its mesh."""
    shardings = [x.sharding for x in jax.tree.leaves(tree) if getattr(x, "sharding", None) is not None]
    widest = max(shardings, key=lambda s: len(s.device_set), default=None)
    if widest is None or all(_devices(s) == _devices(widest) for s in shardings):
        return tree
    everywhere = NamedSharding(widest.mesh, PartitionSpec()) if isinstance(widest, NamedSharding) else widest

    def put(x):
        own = x.sharding
        if _devices(own) == _devices(widest):
            return x
        # a mesh of the same shape over the devices in another order keeps its partition
        same = (isinstance(own, NamedSharding) and isinstance(widest, NamedSharding)
                and own.mesh.shape == widest.mesh.shape)
        return jax.device_put(x, NamedSharding(widest.mesh, own.spec) if same else everywhere)

    return jax.tree.map(put, tree)


def _devices(sharding: Any) -> tuple:
    """Returns a sharding's devices in its order; a program takes arguments of one order only."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))
