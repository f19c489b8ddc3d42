"""Which family a config.json belongs to: its model type, its classes and the code that it names, taken together.

Families borrow each other's model types, and configs of converted models keep those of what they were made from.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dlm_jax.models.config import FAMILIES
from dlm_jax.models.hf_moe import plain_type

_LIKE = 0.5  # similarity of names from which on one is the other's neighbour


def classes(raw: Mapping[str, Any]) -> list[str]:
    """Returns the names of the model classes of a config.json: those of its own code, else its architectures.

    Converted checkpoints keep the architecture of what they were made from; the code that they name is what they are.
    """
    named, code = raw.get("architectures") or [], raw.get("auto_map") or {}
    own = [str(value).rpartition(".")[2] for key, value in code.items() if key.startswith("AutoModel")] \
        if isinstance(code, Mapping) else []
    return list(dict.fromkeys(own or map(str, named if isinstance(named, list) else [named])))


def recognise(raw: Mapping[str, Any]) -> str:
    """Finds the family of a model.

    Args:
      raw: the parsed config.json.

    Returns:
      A key of `config.FAMILIES`.

    Raises:
      ValueError: an unknown model, with the nearest family and what differs, or one that is said to be of two families.
    """
    model_type, named = plain_type(raw.get("model_type")), classes(raw)
    by_type = [name for name, family in FAMILIES.items() if model_type == (family.model_type or name)]
    by_class = [name for name in FAMILIES if {*_classes_of(name)} & {*named}]
    both = [name for name in by_type if name in by_class]
    if not by_type:
        raise ValueError(f"model_type {model_type!r} is not supported; accepted: {sorted(FAMILIES)}"
                         + _nearest(raw, model_type, named))
    if by_class and not both:
        raise ValueError(f"model_type {model_type!r} is of family {by_type[0]!r} and {', '.join(named)} of "
                         f"{by_class[0]!r}: correct one of them in config.json")
    if not both and raw.get("auto_map"):
        raise ValueError(f"{', '.join(named)} of model_type {model_type!r} is code of its own that is not known here"
                         + _nearest(raw, model_type, named))
    held = both or by_type
    marks = {name: FAMILIES[name].mark for name in held}
    fit = [name for name in held if marks[name] and raw.get(marks[name])] or [
        name for name in held if not marks[name]]
    if not both and len(fit) > 1:  # no class says which: the one that is called like its type
        fit = [name for name in fit if FAMILIES[name].model_type is None]
    if len(fit) != 1:
        raise ValueError(f"model_type {model_type!r} with {', '.join(f'{m} = {raw.get(m)!r}' for m in marks.values())} "
                         f"may be any of {sorted(fit or held)}: just one of these fields is set in each")
    return fit[0]


def _classes_of(name: str) -> tuple[str, ...]:
    family = FAMILIES[name]
    return (family.architecture, *family.aliases)


def _nearest(raw: Mapping[str, Any], model_type: Any, named: list[str]) -> str:
    """Returns a sentence on the family whose names are most like a model's, and what differs."""
    alike = lambda one, other: difflib.SequenceMatcher(None, str(one).lower(), other.lower()).ratio()
    score = {name: max(alike(mine, theirs) for mine in (model_type, *named)
                       for theirs in (family.model_type or name, *_classes_of(name)))
             for name, family in FAMILIES.items()}
    best = max(score, key=score.get)
    if score[best] < _LIKE:
        return ""
    family = FAMILIES[best]
    differs = [f"{what} {ours!r}, not {theirs!r}" for what, ours, theirs in (
        ("model_type", family.model_type or best, model_type), ("class", family.architecture, ", ".join(named) or None))
        if ours != theirs]
    differs += [f"{name} = {raw[name]!r}" for name in ("num_experts", "n_routed_experts", "layer_types", "rope_scaling",
                                                       "sliding_window") if raw.get(name)]
    return (f". The nearest known family is {best!r}, which has {'; '.join(differs[:2])}"
            + (f", and this model has {', '.join(differs[2:])}" if differs[2:] else "")
            + ": where the network is the same, write those names into config.json")
