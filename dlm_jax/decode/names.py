"""Decoders from what is typed: a name, and "field=value" texts that reach every field and part."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence

from dlm_jax import decode, text


def find(name: str) -> type:
    """Returns the class of a decoder.

    Args:
      name: key of `decode.DECODERS`.

    Raises:
      ValueError: an unknown name, with those known.
    """
    known = decode.DECODERS
    if name not in known:
        raise ValueError(f"decoder {name!r} is not known{text.close_to(name, known)}; accepted: {sorted(known)}")
    return known[name]


def parts(kind: type) -> dict[str, type]:
    """Returns the parts that fields of a decoder may hold, by name: those of its room, then the shared ones."""
    room = importlib.import_module(kind.__module__.rpartition(".")[0])
    return {name: found for name, found in {**vars(decode), **vars(room)}.items()
            if isinstance(found, type) and dataclasses.is_dataclass(found) and not issubclass(found, decode.Decoder)}


def override(decoder: decode.Decoder, settings: Sequence[str], flag: str = "--set") -> decode.Decoder:
    """Returns a decoder with fields replaced from text.

    Args:
      decoder: any.
      settings: see `text.override`; `temperature` is short for `sampler.temperature`, and so on.
      flag: how errors name the settings' origin.

    Raises:
      ValueError: an unknown field or part, or a value of another type, with what is accepted.
    """
    short = [field.name for field in dataclasses.fields(decode.Sampler)]
    full = [f"sampler.{setting}" if setting.partition("=")[0] in short else setting for setting in settings]
    return text.override(decoder, full, parts(type(decoder)), flag)
