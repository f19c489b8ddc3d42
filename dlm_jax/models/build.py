"""From a configuration to a module and its parameters, made or only described."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.models.config import TransformerConfig, parts
from dlm_jax.models.layers import MIXERS, MLPS, VIEWS
from dlm_jax.models.owner import ADAPTER
from dlm_jax.models.transformer import Transformer
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from dlm_jax.types import Params


def build(config: TransformerConfig, *, dtype: Any = None, remat: bool = False) -> Transformer:
    """Returns the module of a configuration.

    Args:
      config: shape and family.
      dtype: computation dtype; None computes in the parameters' own.
      remat: recompute layers in the backward pass.

    Raises:
      ValueError: a kind of layer in the pattern that is not known.
    """
    for kind in config.pattern:
        mixer, mlp = parts(kind)
        if mixer not in MIXERS or mlp not in MLPS:
            raise ValueError(f"pattern {config.pattern}: {kind!r} is no kind of layer; accepted: {sorted(MIXERS)}, "
                             f"or one of them with + and one of {sorted(MLPS)}")
    return Transformer(config, dtype, remat)


def unroll(model: Transformer, params: Params) -> tuple[Transformer, Params]:
    """Returns the same network with every layer a module of its own.

    Worth its longer compile where decoding is bound by reading weights and the compiler cannot slice a stacked
    parameter in place (XLA on CPU copies each layer's weights in every forward of a scanned stack, and on TPU each
    layer's keys and values).

    Args:
      model: a scanned module.
      params: its parameters; they are copied.

    Raises:
      ValueError: the layers are unrolled already.
    """
    if not model.scan:
        raise ValueError("the model's layers are unrolled already")
    size = len(model.config.pattern)

    def layers(stack):
        """Returns every layer's part of a stack, whose places may be few: an adapter's are those that it changes."""
        of = lambda place: stack if size == 1 else stack.get(f"layer_{place}", {})
        return {f"layers_{i}": jax.tree.map(lambda x: x[i // size], of(i % size))
                for i in range(model.config.num_layers)}

    def unrolled(tree):
        rest = {name: value for name, value in tree.items() if name not in ("layers", ADAPTER)}
        adapter = {ADAPTER: unrolled(tree[ADAPTER])} if ADAPTER in tree else {}
        return rest | (layers(tree["layers"]) if "layers" in tree else {}) | adapter

    return dataclasses.replace(model, scan=False), unrolled(params)


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
    return model.init(key, tokens, Pass(tokens, vis.causal(jnp.ones((1, 1), bool))))["params"]


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
