"""Parameters alone as orbax arrays: a directory like a Hugging Face one, with `params/` in place of safetensors.

Also reads the parameters out of a training run's checkpoint, without its optimiser state: all at once onto devices, or
by tensorstore one at a time, so that a checkpoint of any size passes through little memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import traverse_util

from dlm_jax.io import checkpoints, folders, names, tensor_files
from dlm_jax.models.config import TransformerConfig
from dlm_jax.types import Params

PARAMS = "params"


def save(
    path: str | Path, config: TransformerConfig, params: Params, *, tokenizer_from: Any = None,
    config_from: str | Path | None = None, overwrite: bool = False,
) -> None:
    """Writes parameters as orbax arrays, with config.json and the tokenizer beside them.

    Args:
      path, config, params, tokenizer_from, config_from, overwrite: as in `hf.save`.

    Raises:
      ValueError: as `hf.save` does.
    """
    folders.check_free(path, overwrite)
    folders.check_sources(tokenizer_from, config_from)
    with folders.replacing(path) as made:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((made / PARAMS).resolve(), params, save_args=checkpoints.layer_chunks(params))
        folders.describe(made, config, names.dtype(config, params).name, tokenizer_from, config_from)


def load(
    path: str | Path, shardings: Any = None, dtype: Any = None, step: int | None = None
) -> tuple[TransformerConfig, Params]:
    """Reads what `save` wrote, or the parameters of a training run.

    Args:
      path: directory with `params/` and config.json, or a run's directory with `checkpoints/` and config.json.
      shardings: a `Sharding`, a tree of them like the parameters, or None for the default device.
      dtype: float dtype of every parameter; None keeps the stored ones.
      step: of a run, which checkpoint; None takes the newest.

    Returns:
      The configuration and the parameters.

    Raises:
      ValueError: neither kind of directory, no such checkpoint, or arrays that do not fit the configuration.
    """
    dtype = tensor_files.float_dtype(dtype)
    config, arrays = _find(path, step)
    with ocp.PyTreeCheckpointer() as checkpointer:
        wanted = _described(checkpointer, arrays, config)
        like = {part: _like(tree, shardings, dtype) for part, tree in wanted.items()}
        like = like[None] if None in like else like
        found = checkpointer.restore(arrays, args=ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True))
    flat: dict = {}
    for part in wanted:
        flat |= traverse_util.flatten_dict(found if part is None else found[part])
    return config, traverse_util.unflatten_dict(flat)


def stream(path: str | Path, dtype: Any = None, step: int | None = None) -> tuple[TransformerConfig, Params]:
    """Opens what `load` reads, for `hf.save`: its arrays are read when they are asked for, and not kept.

    Args:
      path, step: as in `load`.
      dtype: float dtype of every parameter; None takes that of the embedding, in which a model is computed: a run that
        trains some parameters of a bfloat16 model keeps those alone in float32.

    Returns:
      The configuration and a tree of `Stored`.

    Raises:
      ValueError: as `load` does.
    """
    dtype = tensor_files.float_dtype(dtype)
    config, arrays = _find(path, step)
    with ocp.PyTreeCheckpointer() as checkpointer:
        wanted = _described(checkpointer, arrays, config)
    facts = json.loads((arrays / "_METADATA").read_text())
    driver, memory = "zarr3" if facts.get("use_zarr3") else "zarr", _Block()
    flat = {}
    for part, tree in wanted.items():
        for keys in traverse_util.flatten_dict(tree):
            name = ".".join(keys if part is None else (part, *keys))
            place = {"driver": "file", "path": f"{arrays}/"}
            place = ({"driver": "ocdbt", "base": place, "path": f"{name}/"} if facts.get("use_ocdbt")
                     else place | {"path": f"{arrays}/{name}/"})
            flat[keys] = Stored(ts.open({"driver": driver, "kvstore": place}, read=True).result(), dtype, memory)
    dtype = dtype or flat["embed",].dtype
    return config, traverse_util.unflatten_dict({k: dataclasses.replace(x, cast=dtype) for k, x in flat.items()})


@dataclasses.dataclass
class _Block:
    """The one part of one array that is in memory."""

    key: Any = None
    data: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """A stored array, read when it is asked for: whole, or one entry of its leading axis at a time.

    Attributes:
      store: the array on disk.
      cast: dtype of what is read; None for the stored one.
      memory: shared by all arrays of a checkpoint. It holds the entries that lie in the same chunks as the last one
        read: one of them in checkpoints of `io.checkpoints`, all where chunks span the leading axis.
    """

    store: Any
    cast: Any
    memory: _Block

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""
        return tuple(self.store.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of what is read."""
        return np.dtype(self.cast or self.store.dtype.numpy_dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.memory.key = self.memory.data = None
        return self.store.read().result().astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: tuple[int]) -> np.ndarray:
        rows = self.store.chunk_layout.read_chunk.shape[0]
        start, memory = index[0] // rows * rows, self.memory
        if memory.key != (id(self.store), start):
            memory.key = memory.data = None  # before more is read
            memory.data = self.store[start:min(start + rows, self.shape[0])].read().result()
            memory.key = id(self.store), start
        return memory.data[index[0] - start].astype(self.dtype, copy=False)


def _find(path: str | Path, step: int | None) -> tuple[TransformerConfig, Path]:
    """Returns the configuration of a directory, and where its arrays are."""
    folder = Path(path).expanduser().resolve()
    if (folder / PARAMS).is_dir():
        if step is not None:
            raise ValueError(f"{folder} is no training run, so it has no checkpoint of step {step}")
        return folders.load_config(folder), folder / PARAMS
    if (folder / "checkpoints").is_dir():
        return _run_config(folder), _run_arrays(folder, step)
    raise ValueError(f"{folder} holds neither {PARAMS}/ nor checkpoints/; give a directory that "
                     "launch.convert_weights or launch.train made")


def _described(checkpointer: Any, arrays: Path, config: TransformerConfig) -> dict[str | None, Any]:
    """Returns the metadata of the stored parameters that fit a configuration, in the parts that keep them."""
    try:
        stored = checkpointer.metadata(arrays).item_metadata.tree
    except (ValueError, OSError, AttributeError) as error:
        raise ValueError(f"{arrays} is not a readable orbax checkpoint: {error}") from None
    # a train state keeps its parameters in two parts
    parts = [key for key in ("trainable", "frozen") if stored.get(key)] or [None]
    wanted = {part: stored if part is None else stored[part] for part in parts}
    _check(arrays, config, wanted)
    return wanted


def _run_config(folder: Path) -> TransformerConfig:
    try:
        fields = json.loads((folder / folders.CONFIG).read_text())["model"]
        return TransformerConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / folders.CONFIG} does not describe the model of a run: {error!r}") from None


def _run_arrays(folder: Path, step: int | None) -> Path:
    steps = sorted(int(f.name) for f in (folder / "checkpoints").iterdir() if f.name.isdecimal())
    if not steps or (step is not None and step not in steps):
        raise ValueError(f"{folder} has {'no checkpoint' if step is None else f'no checkpoint of step {step}'}; "
                         f"it has those of steps {steps}")
    return folder / "checkpoints" / str(steps[-1] if step is None else step) / "state"


def _check(where: Path, config: TransformerConfig, parts: Mapping[str | None, Any]) -> None:
    stored = {path: tuple(x.shape) for tree in parts.values() for path, x in traverse_util.flatten_dict(tree).items()}
    wanted = {p.path: p.shape for p in names.parameters(config)}
    problems = [f"unknown {'.'.join(path)}" for path in stored.keys() - wanted.keys()]
    problems += [f"{'.'.join(path)} is {stored.get(path, 'missing')}, expected {shape}"
                 for path, shape in wanted.items() if stored.get(path) != shape]
    if problems:
        raise ValueError(f"{where} does not fit its {config.family} config.json: {'; '.join(problems[:8])}")


def _like(tree: Any, shardings: Any, dtype: Any) -> Any:
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    flat = traverse_util.flatten_dict(shardings) if isinstance(shardings, Mapping) else None
    return traverse_util.unflatten_dict({
        path: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=shardings if flat is None else flat[path])
        for path, x in traverse_util.flatten_dict(tree).items()})
