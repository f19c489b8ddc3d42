"""Low-rank adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, read and written.

An adapter is a tree of its own beside the parameters, see `models.lora`: for every weight that it changes `a` and `b`,
whose product is the change, in the weight's own axes, and `scale`, their factor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.io import folders, names, tensor_files
from dlm_jax.models.config import TransformerConfig
from dlm_jax.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# what PEFT's adapters may say besides, and what it says where it means nothing
_ABSENT = {"use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
           "fan_in_fan_out": False, "lora_bias": False, "layer_replication": None, "target_parameters": None,
           "trainable_token_indices": None, "alora_invocation_tokens": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """What an adapter says of itself.

    Attributes:
      rank: r, of the changes.
      alpha: the changes are multiplied by alpha / r.
      rank_stabilised: they are by alpha / sqrt(r) instead.
      base: hub id or path of the model that was adapted, None where nothing says.
    """

    rank: int
    alpha: float
    rank_stabilised: bool = False
    base: str | None = None

    def __post_init__(self):
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"r = {self.rank!r} of an adapter: expected a whole number of at least 1")
        if not isinstance(self.alpha, (int, float)) or not math.isfinite(self.alpha):
            raise ValueError(f"lora_alpha = {self.alpha!r} of an adapter: expected a number")

    @property
    def scale(self) -> float:
        """Factor on the product of `a` and `b`, unitless."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


def load(path: str | Path, config: TransformerConfig, dtype: Any = None) -> tuple[LoRA, Params]:
    """Loads an adapter for a model.

    Args:
      path: local directory.
      config: of the model that it is for.
      dtype: float dtype of the factors; None keeps the stored one.

    Returns:
      What it says of itself, and its tree.

    Raises:
      ValueError: no adapter or a damaged one, one of another kind, or for other shapes or targets, each named.
    """
    path, dtype = Path(path).expanduser(), tensor_files.float_dtype(dtype)
    raw = _read_config(path)
    told = LoRA(rank=raw.get("r"), alpha=raw.get("lora_alpha"), rank_stabilised=bool(raw.get("use_rslora")),
                base=raw.get("base_model_name_or_path"))
    stored = _by_module(path, tensor_files.read_file(path / WEIGHTS))
    _check_targets(path, raw.get("target_modules"), stored)
    tree, left = {}, dict(stored)
    for parameter in names.parameters(config):
        modules = [_module(name) for name in parameter.names]
        if stored.keys() & {*modules}:
            node = functools.reduce(lambda tree, key: tree.setdefault(key, {}), parameter.path, tree)
            node |= _factors(path, parameter, [stored.get(module) for module in modules], told, dtype)
            left = {module: pair for module, pair in left.items() if module not in modules}
    if left:
        raise ValueError(f"{path} adapts {', '.join(sorted(left)[:4])}, which a {config.family} model of this "
                         "config.json does not have; was it made for another model?")
    return told, tree


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise ValueError(f"{path} holds no adapter; expected {CONFIG} and {WEIGHTS} (an adapter_model.bin is a pickle "
                         "and never loaded; save it again with safe_serialization=True)")
    try:
        raw = dict(json.loads((path / CONFIG).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / CONFIG} is not a JSON object: {error}") from None
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{path / CONFIG}: peft_type = {raw.get('peft_type')!r}; accepted: 'LORA'")
    for name, nothing in _ABSENT.items():
        if raw.get(name) not in (None, nothing):
            raise ValueError(f"{path / CONFIG}: {name} = {raw[name]!r} is not supported; accepted: {nothing!r} or "
                             "absent")
    return raw


def _by_module(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Returns module -> side -> tensor, both sides of each."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if not match or not name.startswith(_PREFIX):
            raise ValueError(f"{path / WEIGHTS} holds {name!r}; expected {_PREFIX}MODULE.lora_A.weight and lora_B")
        found.setdefault(names.plain(match["module"].removeprefix(_PREFIX)), {})[match["side"]] = tensor
    alone = [module for module, sides in found.items() if len(sides) < 2]
    if alone or not found:
        raise ValueError(f"{path / WEIGHTS} holds " + (
            f"one side only of {', '.join(alone[:4])}; expected lora_A and lora_B" if alone else "no tensors"))
    return found


def _check_targets(path: Path, targets: Any, stored: Mapping[str, Any]) -> None:
    """Raises ValueError where the tensors are not those that a list of targets names."""
    if not isinstance(targets, list):  # a pattern, or what PEFT finds by itself
        return
    fits = lambda module, target: module == target or module.endswith("." + str(target))
    other = [module for module in stored if not any(fits(module, target) for target in targets)]
    unmet = [target for target in targets if not any(fits(module, target) for module in stored)]
    if other or unmet:
        raise ValueError(f"{path}: target_modules = {targets} does not fit its tensors: "
                         + "; ".join([f"{module} is none of them" for module in other[:4]]
                                     + [f"{target} has no tensors" for target in unmet[:4]]))


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _sides(parameter: names.Parameter) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the letters of a weight's axes: its inputs, which come first, and its outputs.

    Raises:
      ValueError: a parameter that is no weight of a linear layer, or an embedding.
    """
    groups = [tuple(letter for letter, _ in group) for group in parameter.stored]
    if len(groups) != 2 or parameter.axes != groups[1] + groups[0]:
        raise ValueError(f"{parameter.names[0]} is adapted and no linear layer of its own; accepted: projections of "
                         "attention and MLPs, and experts that are stored one by one")
    return groups[1], groups[0]


def _factors(path: Path, parameter: names.Parameter, pairs: list, told: LoRA, dtype: Any) -> dict[str, jax.Array]:
    """Returns `a`, `b` and `scale` of a parameter, stacked as it is; layers that are not adapted get zeros."""
    inner, outer = _sides(parameter)
    sizes = dict(group for part in parameter.stored for group in part)
    shape = lambda letters: tuple(sizes[letter] for letter in letters)
    rows, columns = parameter.stored_shape
    held = next(pair for pair in pairs if pair is not None)
    dtype = dtype or np.result_type(held["A"], held["B"])
    a = np.zeros((len(pairs), *shape(inner), told.rank), dtype)
    b = np.zeros((len(pairs), told.rank, *shape(outer)), dtype)
    scale = np.zeros(len(pairs), np.float32)
    for i, pair in enumerate(pairs):
        if pair is None:
            continue
        for side, wanted in (("A", (told.rank, columns)), ("B", (rows, told.rank))):
            if pair[side].shape != wanted:
                raise ValueError(f"{path}: lora_{side} of {_module(parameter.names[i])} has shape {pair[side].shape}, "
                                 f"expected {wanted}; was it made for another size, or is r another?")
        down = pair["B"] if parameter.piece is None else parameter.piece.cut(pair["B"])
        a[i], b[i], scale[i] = pair["A"].T.reshape(a.shape[1:]), down.T.reshape(b.shape[1:]), told.scale
    stacked = lambda x: jnp.asarray(x.reshape(*parameter.lead, *x.shape[1:]))
    return {"a": stacked(a), "b": stacked(b), "scale": stacked(scale)}


def save(path: str | Path, config: TransformerConfig, adapter: Params, told: LoRA, overwrite: bool = False) -> None:
    """Writes an adapter as PEFT does; the directory appears whole or not at all.

    Args:
      path: directory to make.
      config: of the model.
      adapter: the tree.
      told: what it says of itself.
      overwrite: replace a directory that exists.

    Raises:
      ValueError: the directory is not empty, the tree does not fit the model, or parts of one stored tensor have
        different inputs.
    """
    folders.check_free(path, overwrite)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in _tensors(config, adapter, told):
        if name in tensors and tensors[name].tobytes() != tensor.tobytes():
            raise ValueError(f"{name} is one tensor, and the parts of the weight that it belongs to have different `a`")
        tensors[name] = tensor
    modules = sorted({_TENSOR.fullmatch(name)["module"].rpartition(".")[2] for name in tensors})
    alpha = int(told.alpha) if told.alpha == int(told.alpha) else told.alpha
    said = {"peft_type": "LORA", "r": told.rank, "lora_alpha": alpha, "target_modules": modules, "lora_dropout": 0.0,
            "bias": "none", "inference_mode": True, "use_rslora": told.rank_stabilised,
            "base_model_name_or_path": told.base}
    with folders.replacing(path) as made:
        tensor_files.write_file(made / WEIGHTS, [
            tensor_files.Pending(name, tensor.shape, tensor.dtype, functools.partial(np.asarray, tensor))
            for name, tensor in tensors.items()])
        (made / CONFIG).write_text(json.dumps(said, indent=2) + "\n")


def _tensors(config: TransformerConfig, adapter: Params, told: LoRA) -> Iterator[tuple[str, np.ndarray]]:
    """Yields PEFT's tensors; a tensor that several weights share is put together."""
    whole: dict[str, np.ndarray] = {}
    left = {tuple(entry.key for entry in path[:-1]) for path, _ in jax.tree_util.tree_leaves_with_path(adapter)}
    for parameter in names.parameters(config):
        if parameter.path not in left:
            continue
        left.discard(parameter.path)
        _sides(parameter)
        node = functools.reduce(lambda tree, key: tree[key], parameter.path, adapter)
        a, b, scale = (np.asarray(node[side]) for side in ("a", "b", "scale"))
        lead = len(parameter.lead)
        if a.shape[-1] != told.rank or a.shape[:lead] != parameter.lead or b.shape[:lead] != parameter.lead:
            raise ValueError(f"{'.'.join(parameter.path)}: factors of shapes {a.shape} and {b.shape} do not fit rank "
                             f"{told.rank} and the model's {parameter.shape}")
        for name, index in zip(parameter.names, np.ndindex(*parameter.lead)):
            if not scale[index]:  # a layer that is not adapted
                continue
            rows, columns = parameter.stored_shape
            down = b[index].reshape(told.rank, -1).T
            if parameter.piece is not None:
                down = _piece(whole.setdefault(name, np.zeros((rows, told.rank), b.dtype)), parameter, down)
            yield f"{_PREFIX}{_module(name)}.lora_A.weight", tensor_files.contiguous(
                a[index].reshape(columns, told.rank).T)
            if parameter.piece is None:
                yield f"{_PREFIX}{_module(name)}.lora_B.weight", tensor_files.contiguous(down)
    for name, tensor in whole.items():
        yield f"{_PREFIX}{_module(name)}.lora_B.weight", tensor
    if left:
        raise ValueError(f"the adapter has {', '.join('.'.join(path) for path in sorted(left)[:4])}, which a "
                         f"{config.family} model does not")


def _piece(whole: np.ndarray, parameter: names.Parameter, part: np.ndarray) -> np.ndarray:
    parameter.piece.put(whole, part)
    return whole
