"""One kind of model made into another: a second view, bidirectional attention, a mask token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.models.config import TransformerConfig
from dlm_jax.models.transformer import Transformer
from dlm_jax.types import Params

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
        raise ValueError(f"a {config.family} model {_unfit(config)}; accepted: {sorted(_DUAL)}")
    mask_id = config.mask_token_id if mask_id is None else mask_id
    if mask_id is None:
        raise ValueError("a dual model drafts from a mask token and the configuration names none: pass mask_id "
                         "(launch.convert_weights to-orthrus adds one to vocabulary and tokenizer)")
    dual = model.clone(config=config.replace(family=_DUAL[config.family], mask_token_id=mask_id))
    copied = lambda layer: {**layer, "attention_diffusion": jax.tree.map(jnp.copy, layer["attention"])}
    return dual, {name: copied(value) if name.startswith("layers") else value for name, value in params.items()}


def _unfit(config: TransformerConfig) -> str:
    if config.dual:
        return "has two views already"
    if config.gated_attention:
        return "has recurrent layers, which go one way and have one view (train it by the FLARE objective)"
    return "is not autoregressive"


def denoiser(config: TransformerConfig, shift: int) -> TransformerConfig:
    """Returns the configuration of the bidirectional model that has an autoregressive one's parameters.

    Args:
      config: configuration of the autoregressive model.
      shift: of the result's outputs, 0 or 1.

    Raises:
      ValueError: a model that is not autoregressive.
    """
    families = {"qwen3": ("a2d-qwen3", "a2d-qwen3"), "qwen2": ("a2d-qwen2", "Dream")}
    if config.family not in families:
        raise ValueError(f"a {config.family} model {_unfit(config)}; accepted: {sorted(families)}")
    made = config.replace(family=families[config.family][shift])
    return made if made.shift == shift else made.replace(logit_shift=shift)


def with_mask(config: TransformerConfig, params: Params, mask_id: int, fresh: bool) -> tuple[TransformerConfig, Params]:
    """Gives a model a mask token, adding vocabulary rows where it needs them.

    A new token starts as the mean of those before it: its embedding lies among theirs, and its logit, which nothing
    has taught to be low, is their mean logit and so never the largest.

    Args:
      config: of the model.
      params: parameter tree.
      mask_id: id of the mask token.
      fresh: whether its rows are to be initialised.

    Returns:
      The configuration and parameters with the mask token.
    """
    old = config.vocab_size
    size = old if mask_id < old else -(-(mask_id + 1) // 64) * 64  # a multiple that mesh axes divide
    params = dict(params)
    for name in ("embed", "lm_head"):
        if name in params and fresh:
            table = params[name]
            mean = jnp.mean(table[:mask_id].astype(jnp.float32), axis=0).astype(table.dtype)
            table = jnp.concatenate([table, jnp.broadcast_to(mean, (size - old, table.shape[1]))])
            params[name] = table.at[mask_id].set(mean)
    return config.replace(vocab_size=size, mask_token_id=mask_id), params
