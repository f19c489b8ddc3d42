"""What a training run carries from step to step, and which parameters it trains."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
from flax import traverse_util
from jax import Array

from dlm_jax.models.layers import VIEWS
from dlm_jax.train.config import TrainConfig
from dlm_jax.types import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: () int32 steps done.
      key: (2,) uint32 data of the base key; a step folds its number in.
      trainable: float32 parameters that get gradients, a nested dict without the frozen ones.
      frozen: the other parameters, in their own dtype.
      opt_state: the optimiser's state, for `trainable` only.
    """

    step: Array
    key: Array
    trainable: Params
    frozen: Params
    opt_state: Any


def partition(params: Params, pattern: str | None) -> tuple[Params, Params]:
    """Splits a nested dict by the paths of its leaves.

    Args:
      params: nested dict of anything, such as arrays or shardings.
      pattern: regular expression searched in paths such as "layers/attention/q_proj"; None takes all.

    Returns:
      The leaves whose path matches, and the others.

    Raises:
      ValueError: nothing matches, with the paths there are.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    chosen = {path: leaf for path, leaf in flat.items() if pattern is None or re.search(pattern, path)}
    if not chosen:
        raise ValueError(f"trainable = {pattern!r} matches no parameter; their paths are {sorted(flat)}")
    others = {path: leaf for path, leaf in flat.items() if path not in chosen}
    return traverse_util.unflatten_dict(chosen, sep="/"), traverse_util.unflatten_dict(others, sep="/")


def split(params: Params, config: TrainConfig) -> tuple[Params, Params]:
    """Splits parameters into those a run trains and those it leaves alone.

    The pattern is the run's own or, where it has none, its objective's.

    Args:
      params: nested dict of anything, such as arrays or shardings.
      config: the run.

    Returns:
      The trained leaves, and the others.

    Raises:
      ValueError: a pattern that matches nothing, or parameters that the objective leaves frozen.
    """
    if config.objective.trains is None:
        return partition(params, config.trainable)
    allowed = VIEWS[config.objective.trains]
    trainable, frozen = partition(params, config.trainable or allowed)
    beyond = [path for path in traverse_util.flatten_dict(trainable, sep="/") if not re.search(allowed, path)]
    if beyond:
        raise ValueError(f"trainable = {config.trainable!r} matches {beyond[0]}, but the objective "
                         f"{config.objective.name!r} trains only paths with {allowed!r}; "
                         "leave trainable out for all of them")
    return trainable, frozen


def merge(trainable: Params, frozen: Params) -> Params:
    """Undoes `partition`."""
    flat = traverse_util.flatten_dict(trainable, sep="/") | traverse_util.flatten_dict(frozen, sep="/")
    return traverse_util.unflatten_dict(flat, sep="/")
