"""The model in one's hands: load it, save it, ask it for logits.

Letters: B batch, T tokens, S keys, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlm_jax.io import folders, hf
from dlm_jax.models import build
from dlm_jax.models.transformer import Transformer
from dlm_jax.nn.visibility import Visibility
from dlm_jax.types import Array, Params


def load(
    path: str | Path,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Transformer, Params]:
    """Loads a Hugging Face directory or hub id; safetensors only, no remote code.

    Args:
      path: directory with config.json and safetensors, or a hub id such as "Qwen/Qwen3-0.6B".
      dtype: of the parameters and the computation; None keeps the stored one.
      mesh: from `train.sharding.make_mesh`, to shard the parameters over; None puts all on the default device.
      config: fields of `TransformerConfig` in place of those that config.json says or leaves out, as `mask_token_id`,
        `block_size` or `conventions`.

    Returns:
      The module and its parameters (nested dict, layers stacked).

    Raises:
      ValueError: no such directory or id, an unsupported model, weights that do not fit its config.json, or no such
        field.
    """
    folder = folders.resolve(path)
    stored = hf.stored_config(folder, folders.load_config(folder))
    fields = sorted(field.name for field in dataclasses.fields(stored))
    if unknown := sorted(set(config or {}) - set(fields)):
        raise ValueError(f"config has {unknown}: no such field; accepted: {', '.join(fields)}")
    model = build.build(stored.replace(**config or {}))
    ends = folders.ends(folder, folders.read_config(folder))
    if len(ends) > 1:
        logging.getLogger(__name__).warning(
            "%s: several tokens end an answer, %s; decoding stops at one, %s where generate(eos_id=...) names no other",
            path, ends, model.config.eos_token_id)
    shardings = None
    if mesh is not None:
        from dlm_jax.train import sharding  # only here: inference on one device needs no training code

        shardings = sharding.params(model, mesh)
    return model, hf.load_params(folder, model.config, shardings, dtype)


def save(path: str | Path, model: Transformer, params: Params, tokenizer_from: Any = None, **options: Any) -> None:
    """Writes a Hugging Face directory that `transformers` loads; it appears whole or not at all.

    Args:
      path: directory to make.
      model: the module.
      params: its parameters, stored in the dtype they have.
      tokenizer_from: the directory the model came from, whose tokenizer files and further config.json fields are
        carried over; or a tokenizer object; or None.
      **options: `config_from`, `max_shard_bytes` and `overwrite`, see `io.hf.save`.

    Raises:
      ValueError: the directory is not empty, or the parameters do not fit the model.
    """
    hf.save(path, model.config, params, tokenizer_from=tokenizer_from, **options)


def forward(
    model: Transformer,
    params: Params,
    tokens: Array | np.ndarray,
    positions: Array | np.ndarray | None = None,
    visibility: Visibility | Array | np.ndarray | None = None,
) -> Array:
    """Computes the logits of every token; one compile a shape.

    Args:
      model: the module.
      params: its parameters.
      tokens: (B, T) integer token ids.
      positions: (B, T) integer logical positions, all RoPE sees; default 0, 1, 2, ...
      visibility: who sees whom, a rule of `nn.visibility` or a dense (B or 1, T, T) bool mask; default causal.

    Returns:
      (B, T, V) float32 logits.

    Raises:
      ValueError: ids outside the vocabulary, or shapes or dtypes that do not fit.
    """
    tokens = _integers("tokens", tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens has shape {tokens.shape}; expected (batch, length), neither empty")
    if not isinstance(tokens, jax.core.Tracer):
        host, size = np.asarray(tokens), model.config.vocab_size
        bad = np.argwhere((host < 0) | (host >= size))
        if bad.size:
            row, column = bad[0]
            raise ValueError(f"token id {host[row, column]} (row {row}, column {column}) lies outside the vocabulary "
                             f"of {size} ids, 0 to {size - 1}; was it made with this model's tokenizer?")
    if positions is not None:
        positions = _integers("positions", positions)
        if positions.shape != tokens.shape:
            raise ValueError(f"positions has shape {positions.shape}; expected that of tokens, {tokens.shape}")
    return _forward(model, params, tokens, positions, visibility)


def _integers(name: str, value: Any) -> Any:
    value = value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)
    if not np.issubdtype(value.dtype, np.integer):
        raise ValueError(f"{name} has dtype {value.dtype}; expected integers")
    return value


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, positions, visibility):
    return model.scorer(params)(tokens, positions, visibility)
