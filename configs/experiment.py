"""An experiment, and how to find one by name."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Sequence
from typing import Any

from dlm_jax import text
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
      length: T, tokens a row is padded or cut to, or packed into.
      pack: whether several rows of the data stand one after another in a row of a batch, see `data.packing`.
      weights: of several files of data in the mixture of packed rows; None takes their sizes.
      epochs: passes over the data, which then decide `train.steps`; None leaves `train.steps` as it is.
      model: shape of a model made from scratch where no checkpoint to start from is given.
      vocab_size: most ids of a tokenizer trained on the data, where none is given.
    """

    train: TrainConfig
    length: int
    pack: bool = False
    weights: tuple[float, ...] | None = None
    epochs: float | None = None
    model: TransformerConfig | None = None
    vocab_size: int = 2048

    def __post_init__(self):
        if self.length < 2:
            raise ValueError(f"length = {self.length}: expected at least 2 tokens")
        if self.weights is not None and not (self.weights and all(0 < w < math.inf for w in self.weights)):
            raise ValueError(f"weights = {self.weights}: expected a positive number for each file of data, or none")
        if self.weights is not None and not self.pack:
            raise ValueError(f"weights = {self.weights} mix packed rows: give pack=true")
        if self.pack and self.length % self.train.objective.unit:
            raise ValueError(f"length = {self.length} is no multiple of block_size = {self.train.objective.unit}: "
                             "packed rows are whole blocks; change length or train.objective.block_size")
        if self.pack and getattr(self.train.objective, "padding", None) == "eos":
            raise ValueError("train.objective.padding = 'eos' fills rows up to the longest, which packed rows have no "
                             "room for: give train.objective.padding=ignore, or pack=false")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs = {self.epochs}: expected a positive number, or none")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size = {self.vocab_size}: expected at least 1")

    def with_steps(self, rows: int) -> "Experiment":
        """Returns the experiment with the steps that its epochs take over so many rows.

        Args:
          rows: of the training data, packed where they are.
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
      overrides: "dotted.field=value" texts, see `text.override`.

    Returns:
      The experiment.

    Raises:
      ValueError: an unknown name or field, or a value that does not fit, with what is accepted.
    """
    accepted = names()
    if name not in accepted:
        raise ValueError(
            f"config {name!r} is not known{text.close_to(name, accepted)}; accepted: {', '.join(accepted)}")
    module, experiment = name.split(":")
    return text.override(importlib.import_module(f"configs.{module}").EXPERIMENTS[experiment], overrides)
