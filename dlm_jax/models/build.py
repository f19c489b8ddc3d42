"""Joins a module and its parameters into the scorer that objectives and decoders receive."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.shard_alike import shard_alike

from dlm_jax.models.config import TransformerConfig
from dlm_jax.models.transformer import VIEWS, Transformer
from dlm_jax.nn import cache as kv_cache
from dlm_jax.nn import visibility as vis
from dlm_jax.types import Params


@dataclasses.dataclass(frozen=True)
class BoundScorer:
    """A `types.Scorer` made of a module and its parameters; build it inside the jitted function."""

    model: Transformer
    params: Params

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
        """See `types.Scorer.shift`."""
        return self.model.config.shift

    @property
    def bidirectional(self) -> bool:
        """See `types.Scorer.bidirectional`."""
        return self.model.config.bidirectional

    @property
    def block_size(self) -> int | None:
        """See `types.Scorer.block_size`."""
        return self.model.config.block_size

    def view(self, name: str) -> "BoundScorer":
        """See `types.Scorer.view`.

        Raises:
          ValueError: an unknown view, or a second view of a model that has one.
        """
        if name not in VIEWS:
            raise ValueError(f"view {name!r}: expected one of {sorted(VIEWS)}")
        if name != "ar" and not self.model.config.dual:
            raise ValueError(f"a {self.model.config.family} model has no {name} view: make a dual model of it first "
                             "(models.build.init_from_ar, or launch.convert_weights to-orthrus)")
        return dataclasses.replace(self, model=dataclasses.replace(self.model, view=name))

    def hidden(self, tokens, positions, visibility, cache=None, slots=None):
        """See `types.Scorer.hidden`."""
        return self.model.apply(
            {"params": self.params}, tokens, positions, visibility, cache, slots, method="hidden")

    def head(self, hidden: Array) -> Array:
        """See `types.Scorer.head`."""
        return self.model.apply({"params": self.params}, hidden, method="head")

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """See `types.Scorer.init_cache`; heads lie on the devices where the weights that make keys of them lie."""
        c = self.model.config

        def make(weight: Array) -> kv_cache.KVCache:  # ([L,] D, K, H)
            head = jax.lax.stop_gradient(weight.reshape(-1, *weight.shape[-3:])[:, 0])[:, None, :, None]
            # zeros say nothing about devices: left alone, every device would hold every head
            place = lambda zeros: shard_alike(zeros, jnp.broadcast_to(head, zeros.shape).astype(zeros.dtype))[0]
            return jax.tree.map(place, kv_cache.init(
                head.shape[0], batch, capacity, c.num_kv_heads, c.head_dim, self.dtype))

        if self.model.scan:
            return make(self.params["layers"]["attention"]["k_proj"])
        return tuple(make(self.params[f"layers_{i}"]["attention"]["k_proj"]) for i in range(c.num_layers))

    def __call__(self, tokens, positions=None, visibility=None) -> Array:
        """See `types.Scorer.__call__`."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if visibility is None:
            visibility = (vis.bidirectional if self.bidirectional else vis.causal)(jnp.ones(tokens.shape, bool))
        return self.head(self.hidden(tokens, positions, visibility)[0])


def build(config: TransformerConfig, *, dtype: Any = None, remat: bool = False) -> Transformer:
    """Returns the module of a configuration.

    Args:
      config: shape and family.
      dtype: computation dtype; None computes in the parameters' own.
      remat: recompute layers in the backward pass.
    """
    return Transformer(config, dtype, remat)


def scorer(model: Transformer, params: Params) -> BoundScorer:
    """Binds parameters to a module; see `types.Scorer`."""
    return BoundScorer(model, params)


def unroll(model: Transformer, params: Params) -> tuple[Transformer, Params]:
    """Returns the same network with every layer a module of its own.

    Worth its longer compile where decoding is bound by reading weights and the compiler cannot slice a stacked
    parameter in place (XLA on CPU copies each layer's weights in every forward of a scanned stack).

    Args:
      model: a scanned module.
      params: its parameters; they are copied.

    Raises:
      ValueError: the layers are unrolled already.
    """
    if not model.scan:
        raise ValueError("the model's layers are unrolled already")
    rest = {name: value for name, value in params.items() if name != "layers"}
    layers = {f"layers_{i}": jax.tree.map(lambda x: x[i], params["layers"]) for i in range(model.config.num_layers)}
    return dataclasses.replace(model, scan=False), {**rest, **layers}


_DUAL = {"qwen3": "orthrus", "qwen2": "orthrus-qwen2"}


def init_from_ar(model: Transformer, params: Params, mask_id: int | None = None) -> tuple[Transformer, Params]:
    """Makes a dual-view model of an autoregressive one, its diffusion view a copy of the AR view.

    Args:
      model: an autoregressive module, layers scanned or not.
      params: its parameters; those of the AR view are used as they are.
      mask_id: id of the mask token; None keeps the configuration's.

    Returns:
      The dual module and its parameters. The AR view is the model given, bit for bit.

    Raises:
      ValueError: a model that is not autoregressive or has two views already, or no mask id.

    Source: Orthrus, Sec. 3.1 (initialisation of the diffusion heads).
    """
    config = model.config
    if config.family not in _DUAL:
        what = "has two views already" if config.dual else "is not autoregressive"
        raise ValueError(f"a {config.family} model {what}; accepted: {sorted(_DUAL)}")
    mask_id = config.mask_token_id if mask_id is None else mask_id
    if mask_id is None:
        raise ValueError("a dual model drafts from a mask token and the configuration names none: pass mask_id "
                         "(launch.convert_weights to-orthrus adds one to vocabulary and tokenizer)")
    dual = model.clone(config=config.replace(family=_DUAL[config.family], mask_token_id=mask_id))
    copied = lambda layer: {**layer, "attention_diffusion": jax.tree.map(jnp.copy, layer["attention"])}
    return dual, {name: copied(value) if name.startswith("layers") else value for name, value in params.items()}


def parameter_shares(model: Transformer) -> dict[str, int]:
    """Returns how many parameters a model has in all ("total") and in its diffusion view ("diffusion").

    Args:
      model: the module; nothing is made.
    """
    flat = jax.tree_util.tree_flatten_with_path(abstract_params(model))[0]
    inside = lambda path: any(entry.key == VIEWS["diffusion"] for entry in path)
    return {"total": sum(x.size for _, x in flat), "diffusion": sum(x.size for path, x in flat if inside(path))}


def _init(model: Transformer, key: Array):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, tokens, tokens, vis.causal(jnp.ones((1, 1), bool)))["params"]


def init_params(model: Transformer, key: Array) -> Params:
    """Returns fresh float32 parameters as a plain nested dict.

    Args:
      model: the module.
      key: PRNG key.
    """
    return nn.meta.unbox(_init(model, key))


def abstract_params(model: Transformer) -> Params:
    """Returns the parameters' shapes and dtypes (`jax.ShapeDtypeStruct`) without making them."""
    return jax.eval_shape(lambda: nn.meta.unbox(_init(model, jax.random.key(0))))


def logical_axes(model: Transformer) -> Params:
    """Returns each parameter's `PartitionSpec` of logical axis names; `train.sharding` maps them to a mesh."""
    return nn.get_partition_spec(jax.eval_shape(lambda: _init(model, jax.random.key(0))))
