"""What decoders and their parts are made of: frozen dataclasses whose numbers are traced and whose kinds are static.

A part is a `flax.struct.dataclass`: its fields are arguments of the compiled program, so that changing a number
compiles nothing, and its class is part of the program. A field made by `static` is compiled in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from flax import struct

_KINDS = {float: np.float32, int: np.int32, bool: np.bool_}


def static(default: Any = dataclasses.MISSING, least: int | None = None) -> Any:
    """Returns a field that is compiled in.

    Args:
      default: of the field.
      least: smallest whole number accepted; None where the field is no number.
    """
    metadata = {} if least is None else {"kind": int, "least": least, "most": math.inf}
    return struct.field(default=default, pytree_node=False, metadata=metadata)


def number(default: Any = dataclasses.MISSING, least: float = 0.0, most: float = math.inf) -> Any:
    """Returns a traced field for a number in [least, most]; a default of None makes it optional."""
    return struct.field(default=default, metadata={"kind": float, "least": least, "most": most})


def whole(default: Any = dataclasses.MISSING, least: int = 0, most: float = math.inf) -> Any:
    """Returns a traced field for a whole number in [least, most]; a default of None makes it optional."""
    return struct.field(default=default, metadata={"kind": int, "least": least, "most": most})


class Part:
    """Refuses fields outside their range when a part is made."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, rule = getattr(self, field.name), field.metadata
            if "kind" in rule and not (value is None and field.default is None):
                check_number(field.name, value, rule["least"], rule["most"], rule["kind"])


def traced(part: Any, name: str = "") -> Any:
    """Returns a part with its numbers as arrays, so that they become arguments of the compiled program.

    Args:
      part: a decoder, or a part of one.
      name: how messages call it.

    Raises:
      ValueError: a field that is neither a number nor static.
    """
    changes = {}
    for field in dataclasses.fields(part):
        value, label = getattr(part, field.name), f"{name}{field.name}"
        if not field.metadata.get("pytree_node", True) or (value is None and field.default is None):
            continue
        if dataclasses.is_dataclass(value):
            changes[field.name] = traced(value, f"{label}.")
            continue
        kind = _KINDS.get(field.metadata.get("kind", type(value)))
        if kind is None and not isinstance(value, (np.generic, np.ndarray, jax.Array)):
            raise ValueError(f"{label} = {value!r} of {type(part).__name__} is no number: mark the field as compiled "
                             f"in, as in {field.name}: {type(value).__name__} = decode.static({value!r})")
        changes[field.name] = np.asarray(value, kind)  # of numpy: it travels with the call, a transfer each costs more
    return part.replace(**changes)


def check_number(name: str, value: float, least: float, most: float = math.inf, kind: type = float) -> None:
    """Raises ValueError unless a hyperparameter is a number of its kind in [least, most].

    Args:
      name: of the hyperparameter.
      value: what was given; a float may be given as an int. Arrays and placeholders, of which jax makes parts, pass.
      least, most: accepted range.
      kind: float or int.
    """
    if not isinstance(value, (bool, int, float, complex, str, tuple, list, dict, np.generic, type(None))):
        return
    fits = isinstance(value, (int, np.integer)) or (kind is float and isinstance(value, (float, np.floating)))
    if not fits or isinstance(value, bool) or not least <= value <= most or value == math.inf:  # NaN: false
        upper = " and finite" if most == math.inf else f" and at most {most}"
        raise ValueError(f"{name} = {value!r}: expected {'an int' if kind is int else 'a number'} of at least "
                         f"{least}{upper}")
