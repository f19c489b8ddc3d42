"""An experiment, how to find one by name, and how to override its fields from text."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import pkgutil
import types
import typing
from collections.abc import Sequence
from typing import Any

from dlm_jax.models.config import TransformerConfig
from dlm_jax.train.config import MeshConfig, TrainConfig

# how runs of published sizes use a slice: fields of `TrainConfig`
POD: dict[str, Any] = dict(
    compute_dtype="bfloat16", remat=True, mesh=MeshConfig(data=1, fsdp=-1, tensor=1), checkpoint_every=500)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A training run and what it starts from.

    Attributes:
      train: the run.
      length: T, tokens a row is padded or cut to.
      epochs: passes over the data, which then decide `train.steps`; None leaves `train.steps` as it is.
      model: shape of a model made from scratch where no checkpoint to start from is given.
      vocab_size: most ids of a tokenizer trained on the data, where none is given.
    """

    train: TrainConfig
    length: int
    epochs: float | None = None
    model: TransformerConfig | None = None
    vocab_size: int = 2048

    def __post_init__(self):
        if self.length < 2:
            raise ValueError(f"length = {self.length}: expected at least 2 tokens")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs = {self.epochs}: expected a positive number, or none")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size = {self.vocab_size}: expected at least 1")

    def with_steps(self, rows: int) -> "Experiment":
        """Returns the experiment with the steps that its epochs take over so many rows.

        Args:
          rows: of the training data.
        """
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * rows / self.train.batch_size))
        if self.train.warmup_steps > steps:
            raise ValueError(
                f"warmup_steps = {self.train.warmup_steps} but {self.epochs:g} epochs of {rows} rows are only {steps} "
                "steps; lower train.warmup_steps, or raise epochs")
        return dataclasses.replace(self, train=dataclasses.replace(self.train, steps=steps))


def names() -> list[str]:
    """Returns the names that `load` accepts."""
    package = importlib.import_module("configs")
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        experiments = getattr(importlib.import_module(f"configs.{module.name}"), "EXPERIMENTS", {})
        found += [f"{module.name}:{name}" for name in experiments]
    return sorted(found)


def load(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Finds an experiment and overrides some of its fields.

    Args:
      name: "file:experiment", one of `names()`.
      overrides: "dotted.field=value" texts, see `override`.

    Returns:
      The experiment.

    Raises:
      ValueError: an unknown name or field, or a value that does not fit, with what is accepted.
    """
    accepted = names()
    if name not in accepted:
        raise ValueError(f"config {name!r} is not known{_hint(name, accepted)}; accepted: {', '.join(accepted)}")
    module, experiment = name.split(":")
    return override(importlib.import_module(f"configs.{module}").EXPERIMENTS[experiment], overrides)


def override(config: Any, settings: Sequence[str]) -> Any:
    """Returns a frozen dataclass with fields replaced from text.

    Args:
      config: nested frozen dataclasses.
      settings: "dotted.field=value"; lists are written 4,8,16 and an absent value none.

    Raises:
      ValueError: a setting of another form, an unknown field, or a value of another type.
    """
    changes: dict = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ValueError(f"--set {setting}: expected FIELD=VALUE, such as train.learning_rate=1e-4")
        _enter(config, path, text, changes)
    return _apply(config, changes)  # all at once: fields are checked against each other


def fields(config: Any, prefix: str = "") -> list[str]:
    """Returns the dotted names of every field that `override` accepts.

    Args:
      config: nested frozen dataclasses.
      prefix: of the names.
    """
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found += fields(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else [prefix + field.name]
    return found


def _enter(config: Any, path: str, text: str, changes: dict) -> None:
    accepted = fields(config)
    if path not in accepted:
        raise ValueError(f"--set {path}: no such field{_hint(path, accepted)}; accepted: {', '.join(accepted)}")
    *parents, last = path.split(".")
    for name in parents:
        config, changes = getattr(config, name), changes.setdefault(name, {})
    hint = typing.get_type_hints(type(config))[last]
    try:
        changes[last] = _parse(text, hint)
    except ValueError:
        raise ValueError(f"--set {path}={text}: expected {_describe(hint)}, as in {path}="
                         f"{_show(getattr(config, last))}") from None


def _apply(config: Any, changes: dict) -> Any:
    made = {name: _apply(getattr(config, name), value) if isinstance(value, dict) else value
            for name, value in changes.items()}
    return dataclasses.replace(config, **made)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _parse(text: str, hint: Any) -> Any:
    options = _options(hint)
    if type(None) in options and text.lower() == "none":
        return None
    kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(_parse(item.strip(), typing.get_args(kind)[0]) for item in text.split(",") if item.strip())
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)


def _describe(hint: Any) -> str:
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "none"}
    many = lambda option: "integers such as 4,8,16" if int in typing.get_args(option) else "numbers such as 0.1,0.9"
    return " or ".join(words.get(option) or many(option) for option in _options(hint))


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if value in (
        None, True, False) else str(value)


def _hint(name: str, accepted: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, accepted, n=1) or [a for a in accepted if a.endswith("." + name)]
    return f" (did you mean {close[0]!r}?)" if close else ""
