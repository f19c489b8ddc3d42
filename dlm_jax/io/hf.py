"""Weights of Hugging Face model directories to parameter trees and back.

Weights go tensor by tensor between mapped safetensors files and device arrays of the target dtype and sharding,
so that the host holds less than two tensors beside the result. No pickle is opened and no remote code is run.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dlm_jax.io import folders, names, tensor_files
from dlm_jax.models.config import TransformerConfig
from dlm_jax.types import Params


def load_params(
    path: str | Path, config: TransformerConfig, shardings: Any = None, dtype: Any = None
) -> Params:
    """Loads weights straight into their final dtype and sharding, one tensor at a time.

    Args:
      path: local directory with safetensors.
      config: shape and family the weights must have.
      shardings: a `Sharding` for every parameter, a tree of them like the parameters, or None for uncommitted
        arrays on the default device.
      dtype: float dtype of every parameter; None keeps the stored ones.

    Returns:
      The parameter tree (nested dict, layers stacked). What a checkpoint holds beside its text model is left out and
      named in the log.

    Raises:
      ValueError: a dtype that is not a float, no or damaged files, or missing, unknown, misshapen or non-float
        tensors, each named.
    """
    dtype = tensor_files.float_dtype(dtype)
    stored = _text_model(path, tensor_files.read_folder(Path(path)))
    config = _as_stored(path, config, stored)
    wanted = names.parameters(config)
    _check_stored(path, stored, wanted, config)
    params: dict = {}
    for parameter in wanted:
        sharding = shardings
        if isinstance(shardings, Mapping):
            sharding = functools.reduce(lambda tree, key: tree[key], parameter.path, shardings)
        parent = params
        for key in parameter.path[:-1]:
            parent = parent.setdefault(key, {})
        parent[parameter.path[-1]] = _assemble(parameter, [stored[name] for name in parameter.names], sharding, dtype)
    return params


def stored_config(path: str | Path, config: TransformerConfig) -> TransformerConfig:
    """Returns a configuration with what only the tensors tell: the layout of experts, for `save` to write it again.

    Args:
      path: local directory with safetensors.
      config: of its config.json.

    Raises:
      ValueError: no or damaged files, or experts in several layouts.
    """
    return config if config.moe is None else _as_stored(path, config, tensor_files.read_folder(Path(path)))


def _as_stored(path: str | Path, config: TransformerConfig, stored: Mapping[str, np.ndarray]) -> TransformerConfig:
    try:
        return names.as_stored(config, stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text_model(path: str | Path, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of the text model under their plain names; says what else there is."""
    beside = collections.Counter(match[0].rstrip(".") for match in map(names.BESIDE.match, stored) if match)
    if beside:
        said = ", ".join(f"{count} of {part}" for part, count in sorted(beside.items()))
        logging.getLogger(__name__).info("%s: tensors beside the text model are not loaded: %s", path, said)
    return {names.plain(name): tensor for name, tensor in stored.items() if not names.BESIDE.match(name)}


def _check_stored(
    path: str | Path, stored: Mapping[str, np.ndarray], wanted: list[names.Parameter], config: TransformerConfig
) -> None:
    shapes = {name: p.stored_shape for p in wanted for name in p.names}
    head_name = names.head_row(config)[0]
    head, embed = stored.get(head_name), stored.get(wanted[0].names[0])
    spare = {name for name in stored if names.IGNORED.search(name)}
    if config.tie_word_embeddings and head is not None and embed is not None:
        # exporters may store the tied head as well; a head that differs is another model
        if head.shape != embed.shape or any(a.tobytes() != b.tobytes() for a, b in zip(head, embed)):
            raise ValueError(f"{path}: tie_word_embeddings is true but {head_name} differs from the embedding; "
                             "set tie_word_embeddings to false in config.json")
        spare.add(head_name)
    problems = [f"missing {name} of shape {shape}" for name, shape in shapes.items() if name not in stored]
    problems += [f"unknown {name} of shape {stored[name].shape}" for name in stored
                 if name not in shapes and name not in spare]
    for name, shape in shapes.items():
        if name in stored and stored[name].shape != shape:
            problems.append(f"{name} has shape {stored[name].shape}, expected {shape}")
        elif name in stored and not jnp.issubdtype(stored[name].dtype, jnp.floating):
            problems.append(f"{name} is {stored[name].dtype}, expected floats (quantised weights are not supported)")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        if any("_diff." in name for name in stored) != config.dual:
            more += (". The weights are those of an autoregressive model; launch.convert_weights to-orthrus makes a "
                     "dual-view model of one" if config.dual else
                     ". The weights are those of a dual-view model: its model_type is \"orthrus\"")
        others = names.fitting(stored)
        if 0 < len(others) < 5 and config.family not in others:
            more += f". These are the tensors of {' or '.join(others)}: its config.json is another model's"
        raise ValueError(f"{path} does not fit its {config.family} config.json: {'; '.join(problems[:8])}{more}")


def _assemble(
    parameter: names.Parameter, parts: list[np.ndarray], sharding: Sharding | None, dtype: Any
) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(dtype or functools.reduce(np.promote_types, {p.dtype for p in parts}))
    views = [parameter.from_stored(part) for part in parts]
    if not parameter.lead:
        return _place(views[0], sharding, dtype)
    part_sharding = sharding
    if isinstance(sharding, NamedSharding):
        part_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[len(parameter.lead):]))
    whole = _zeros(parameter.shape, dtype, sharding)
    for index, view in zip(np.ndindex(*parameter.lead), views):
        whole = _setter(sharding)(whole, _place(view, part_sharding, dtype), index)
        # without this the host runs ahead of the device and holds many parts at once
        whole.block_until_ready()
    return whole


def _place(view: np.ndarray, sharding: Sharding | None, dtype: Any) -> jax.Array:
    """Copies a mapped view, in its final dtype and layout, to the devices that hold a piece of it."""
    copy = lambda index: tensor_files.contiguous(view[index], dtype)
    if sharding is None:
        return jax.device_put(copy(...))
    pieces: dict = {}  # replicas share one host copy

    def piece(index):
        key = tuple((axis.start, axis.stop) for axis in index)
        if key not in pieces:
            pieces[key] = copy(index)
        return pieces[key]

    return jax.make_array_from_callback(view.shape, sharding, piece)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> jax.Array:
    make = lambda: jnp.zeros(shape, dtype)
    return make() if sharding is None else jax.jit(make, out_shardings=sharding)()


@functools.lru_cache(maxsize=64)
def _setter(sharding: Sharding | None) -> Callable:
    """A function that writes one part into a donated array, in place, and keeps the array's sharding."""

    def put(whole, part, index):
        # not .at[].set: XLA scatters bfloat16 on CPUs through a float32 copy of the whole array
        start = (*index, *(0 for _ in part.shape))
        return jax.lax.dynamic_update_slice(whole, part.reshape((1,) * len(index) + part.shape), start)

    return jax.jit(put, donate_argnums=0, **({} if sharding is None else {"out_shardings": sharding}))


def save(
    path: str | Path,
    config: TransformerConfig,
    params: Params,
    *,
    tokenizer_from: Any = None,
    config_from: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a Hugging Face directory that `transformers` loads; the directory appears whole or not at all.

    Args:
      path: directory to make; parents are made too.
      config: shape and family of the parameters.
      params: the parameter tree, on any devices; with several processes all must call.
      tokenizer_from: a model directory whose tokenizer files are copied, or an object with `save_pretrained`, or None.
      config_from: a model directory whose further config.json fields and generation_config.json are kept; default
        `tokenizer_from` where that is a directory.
      max_shard_bytes: largest weights file, bytes; beyond it, shards and an index are written.
      overwrite: replace a directory that exists.

    Raises:
      ValueError: the directory exists and is not empty, the parameters do not fit the configuration, or
        `tokenizer_from` or `config_from` is not a directory.
    """
    folders.check_free(path, overwrite)
    folders.check_sources(tokenizer_from, config_from)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be at least 1")
    tensors = _pending(config, params)
    if jax.process_index() == 0:
        with folders.replacing(path) as made:
            tensor_files.write_folder(made, tensors, max_shard_bytes)
            folders.describe(made, config, names.dtype(config, params).name, tokenizer_from, config_from)
    else:
        for tensor in tensors:  # takes part in gathering what process 0 writes
            tensor.data()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {path}")


def _pending(config: TransformerConfig, params: Params) -> list[tensor_files.Pending]:
    flat = {tuple(entry.key for entry in path): value
            for path, value in jax.tree_util.tree_flatten_with_path(params)[0]}
    wanted = names.parameters(config)
    problems = [f"unknown {'.'.join(path)}" for path in flat.keys() - {p.path for p in wanted}]
    for parameter in wanted:
        shape = flat[parameter.path].shape if parameter.path in flat else None
        if shape != parameter.shape:
            what = "missing" if shape is None else f"of shape {shape}"
            problems.append(f"{'.'.join(parameter.path)} is {what}, expected {parameter.shape}")
    if problems:
        raise ValueError(f"the parameters do not fit the {config.family} configuration: {'; '.join(problems[:8])}")
    held: dict[str, list] = {}  # what each tensor is made of: one part, or pieces
    for parameter in wanted:
        for name, index in zip(parameter.names, np.ndindex(*parameter.lead)):
            held.setdefault(name, []).append((parameter, flat[parameter.path], index))
    return [
        tensor_files.Pending(name, made_of[0][0].stored_shape, jnp.result_type(*(value for _, value, _ in made_of)),
                             functools.partial(_whole, made_of))
        for name, made_of in held.items()
    ]


def _whole(made_of: list) -> np.ndarray:
    """Brings a tensor to the host, put together where it holds several parameters."""
    parts = [_fetch(*part) for part in made_of]
    first = made_of[0][0]
    if first.piece is None:
        return parts[0]
    whole = np.empty(first.stored_shape, np.result_type(*parts))
    for (parameter, _, _), part in zip(made_of, parts):
        parameter.piece.put(whole, part)
    return whole


def _fetch(parameter: names.Parameter, value: Any, index: tuple[int, ...]) -> np.ndarray:
    """Brings one stacked part, or one piece, to the host in its stored layout."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        replicated = NamedSharding(value.sharding.mesh, PartitionSpec())
        part = jax.jit(lambda x, i: x[i], out_shardings=replicated)(value, index).addressable_data(0)
    else:
        part = value[index] if index else value
    return parameter.to_stored(np.asarray(part))
