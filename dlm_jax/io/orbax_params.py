"""Parameters alone as orbax arrays: a directory like a Hugging Face one, with `params/` in place of safetensors.

Also reads the parameters out of a training run's checkpoint, without its optimiser state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from dlm_jax.io import folders, names, tensor_files
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
            checkpointer.save((made / PARAMS).resolve(), params)
        folders.describe(made, config, np.dtype(params["embed"].dtype).name, tokenizer_from, config_from)


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
    folder = Path(path).expanduser().resolve()
    if (folder / PARAMS).is_dir():
        if step is not None:
            raise ValueError(f"{folder} is no training run, so it has no checkpoint of step {step}")
        config, arrays = folders.load_config(folder), folder / PARAMS
    elif (folder / "checkpoints").is_dir():
        config, arrays = _run_config(folder), _run_arrays(folder, step)
    else:
        raise ValueError(f"{folder} holds neither {PARAMS}/ nor checkpoints/; give a directory that "
                         "launch.convert_weights or launch.train made")
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(arrays).item_metadata.tree
        except (ValueError, OSError, AttributeError) as error:
            raise ValueError(f"{arrays} is not a readable orbax checkpoint: {error}") from None
        # a train state keeps its parameters in two parts
        parts = [key for key in ("trainable", "frozen") if stored.get(key)] or [None]
        wanted = {part: stored if part is None else stored[part] for part in parts}
        _check(arrays, config, wanted)
        like = {part: _like(tree, shardings, dtype) for part, tree in wanted.items()}
        like = like[None] if parts == [None] else like
        found = checkpointer.restore(arrays, args=ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True))
    flat: dict = {}
    for part in parts:
        flat |= traverse_util.flatten_dict(found if part is None else found[part])
    return config, traverse_util.unflatten_dict(flat)


def _run_config(folder: Path) -> TransformerConfig:
    try:
        return TransformerConfig(**json.loads((folder / folders.CONFIG).read_text())["model"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
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
