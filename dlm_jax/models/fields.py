"""Fields of a Hugging Face config dictionary, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def field(raw: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Returns a field, or the default where it is absent or null; ValueError where there is no default either."""
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"a {raw.get('model_type')} model lacks {name!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Returns a field that is a number."""
    value = field(raw, name, default)
    if not _is_number(value):
        raise ValueError(f"{name} = {value!r}: expected a number")
    return float(value)


def integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a field that is a whole number."""
    value = field(raw, name, default)
    if not _is_number(value) or value % 1:
        raise ValueError(f"{name} = {value!r}: expected a whole number")
    return int(value)


def boolean(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns a field that is true or false."""
    value = field(raw, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: expected true or false")
    return value


def integers(raw: Mapping[str, Any], name: str) -> list[int] | None:
    """Returns a field that is a list of whole numbers, None where it is absent or null."""
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or any(not _is_number(x) or x % 1 for x in value):
        raise ValueError(f"{name} = {value!r}: expected a list of whole numbers")
    return [int(x) for x in value]


def token(raw: Mapping[str, Any], name: str) -> int | None:
    """Returns a special id; of several, the first."""
    value = raw.get(name)
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{name} = []: expected an id, a list of at least one, or null")
        value = value[0]
    return None if value is None else integer({name: value}, name)
