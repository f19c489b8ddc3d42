"""Every choice of a training run, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from dlm_jax.objectives import OBJECTIVES, Objective

SCHEDULES = ("cosine", "constant")
DTYPES = ("float32", "bfloat16")


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: expected {expected}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, in devices; one of them may be -1, meaning the devices left over.

    Attributes:
      data: replicas that see different rows.
      fsdp: devices that see different rows and share the parameters.
      tensor: devices that share rows and split heads, MLP and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        for name in ("data", "fsdp", "tensor"):
            size = getattr(self, name)
            _require(size == -1 or size >= 1, f"mesh.{name}", size, "a number of devices, or -1 for those left over")
        _require([self.data, self.fsdp, self.tensor].count(-1) <= 1, "mesh", self, "at most one size of -1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
      objective: what is minimised, see `dlm_jax.objectives`.
      steps: optimiser steps.
      batch_size: rows a step, over all devices and processes.
      grad_accumulation: equal pieces a batch is scored in, to save memory; the result is that of the whole batch.
      learning_rate: peak, unitless.
      warmup_steps: steps of linear rise from 0.
      schedule: "cosine" falls to 0 at the last step, "constant" stays at the peak.
      weight_decay: AdamW's, on everything but norms, biases and recurrent layers' decay rates.
      beta1, beta2, epsilon: Adam's.
      clip_norm: largest global gradient norm, or None.
      compute_dtype: "float32" or "bfloat16"; trained parameters are float32 either way.
      remat: recompute each layer in the backward pass.
      mesh: axis sizes.
      seed: of everything random in the objective.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep: newest checkpoints kept.
      log_every: steps between lines of metrics.
      trainable: regular expression found in the paths ("layers/attention/q_proj") of parameters to train;
        None trains all, or those that the objective names.
    """

    objective: Objective
    steps: int
    batch_size: int
    grad_accumulation: int = 1
    learning_rate: float = 2e-5
    warmup_steps: int = 0
    schedule: str = "cosine"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0
    compute_dtype: str = "float32"
    remat: bool = False
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    checkpoint_every: int = 1000
    keep: int = 2
    log_every: int = 10
    trainable: str | None = None

    def __post_init__(self):
        _require(isinstance(self.objective, Objective), "objective", self.objective,
                 f"an object of {sorted(kind.__name__ for kind in OBJECTIVES.values())}, or another Objective")
        for name in ("steps", "batch_size", "grad_accumulation", "checkpoint_every", "keep", "log_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.batch_size % self.grad_accumulation == 0, "grad_accumulation", self.grad_accumulation,
                 f"a divisor of batch_size = {self.batch_size}")
        _require(0 < self.learning_rate < float("inf"), "learning_rate", self.learning_rate, "a positive number")
        _require(0 <= self.warmup_steps <= self.steps, "warmup_steps", self.warmup_steps,
                 f"0 to steps = {self.steps}")
        _require(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {SCHEDULES}")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "a number in [0, 1)")
        _require(self.epsilon > 0, "epsilon", self.epsilon, "a positive number")
        _require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", self.clip_norm,
                 "a positive number, or None")
        _require(self.compute_dtype in DTYPES, "compute_dtype", self.compute_dtype, f"one of {DTYPES}")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        if self.trainable is not None:
            try:
                re.compile(self.trainable)
            except re.error as error:
                raise ValueError(f"trainable = {self.trainable!r}: not a regular expression ({error})") from None


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Returns the configuration as plain JSON values; the objective carries its name.

    Args:
      config: the configuration.
    """
    raw = dataclasses.asdict(config)
    raw["objective"] = {"name": config.objective.name} | raw["objective"]
    return plain(raw)


def plain(value: Any) -> Any:
    """Returns nested dictionaries and sequences as JSON would give them back."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns a line `field: one -> other` for every field in which two dictionaries differ.

    Args:
      one, other: nested dictionaries of plain values.
      prefix: of the field names.
    """
    lines = []
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: {a!r} -> {b!r}")
    return lines
