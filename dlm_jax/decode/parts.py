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
_WRITTEN = (bool, int, float, complex, str, tuple, list, dict, np.generic, type(None))  # what people write


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
        if dataclasses.is_dataclass(value) and not jax.tree_util.all_leaves([value]):
            changes[field.name] = traced(value, f"{label}.")
            continue
        if not isinstance(value, (*_WRITTEN, np.ndarray, jax.Array)):
            raise ValueError(f"{label} = {value!r}: put @flax.struct.dataclass above class {type(value).__name__}, "
                             "even where its base has one")
        usual = type(value) if type(field.default) not in _KINDS else type(field.default)  # Rule(1) is Rule(1.0)
        kind = _KINDS.get(field.metadata.get("kind", usual))
        if kind is None and not isinstance(value, (np.generic, np.ndarray, jax.Array)):
            raise ValueError(f"{label} = {value!r} of {type(part).__name__} is no number: mark the field as compiled "
                             f"in, as in {field.name}: {type(value).__name__} = decode.static({value!r})")
        changes[field.name] = np.asarray(value, kind)  # of numpy: it travels with the call, a transfer each costs more
    return part.replace(**changes)


def check_kinds(part: Any, examples: dict[str, tuple[type, Any]]) -> None:
    """Raises ValueError unless fields hold parts of their kinds.

    Args:
      part: a decoder.
      examples: field -> (kind, an example of it).
    """
    for name, (kind, example) in examples.items():
        value = getattr(part, name)
        if isinstance(value, type) or not isinstance(value, kind):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise ValueError(f"{name} = {value!r}: expected {article} {kind.__name__}, such as {example!r}")


def shaped(part: Any, method: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Returns what a part's method returned, once it has the shape that it must have.

    Args:
      part: named in the message.
      method: its name.
      value: an array.
      shape: expected.

    Raises:
      ValueError: another shape.
    """
    if np.shape(value) != shape:
        raise ValueError(
            f"{type(part).__name__}.{method} returned an array of shape {np.shape(value)}: expected {shape}")
    return value


def check_number(name: str, value: float, least: float, most: float = math.inf, kind: type = float) -> None:
    """Raises ValueError unless a hyperparameter is a number of its kind in [least, most].

    Args:
      name: of the hyperparameter.
      value: what was given; a float may be given as an int. Arrays and placeholders, of which jax makes parts, pass.
      least, most: accepted range.
      kind: float or int.
    """
    if not isinstance(value, _WRITTEN):
        return
    fits = isinstance(value, (int, np.integer)) or (kind is float and isinstance(value, (float, np.floating)))
    if not fits or isinstance(value, bool) or not least <= value <= most or value == math.inf:  # NaN: false
        upper = " and finite" if most == math.inf else f" and at most {most}"
        upper = "" if kind is int and most == math.inf else upper
        raise ValueError(f"{name} = {value!r}: expected {'an int' if kind is int else 'a number'} of at least "
                         f"{least}{upper}")
