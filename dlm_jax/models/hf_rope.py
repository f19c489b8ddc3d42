"""What config dictionaries say of the rotary embedding, in the old place or the new one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dlm_jax.models.config import FAMILIES, TransformerConfig, Yarn
from dlm_jax.models.fields import number

_YARN = {"factor": "factor", "original": "original_max_position_embeddings", "fast": "beta_fast", "slow": "beta_slow",
         "query_growth": "llama_4_scaling_beta"}


def homes(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns `rope_parameters` and `rope_scaling`, empty where absent.

    Raises:
      ValueError: one that is no object.
    """
    found = tuple(raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, value in zip(("rope_parameters", "rope_scaling"), found):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} = {value!r}: expected an object or null")
    return found


def read(family: str, raw: Mapping[str, Any]) -> Yarn | None:
    """Returns how the embedding was stretched, None where it was not.

    Args:
      family: of `config.FAMILIES`.
      raw: the parsed config.json.

    Raises:
      ValueError: a kind of stretching that the family has not.
    """
    rope, scaling = homes(raw)
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    accepted = ("default", "yarn") if FAMILIES[family].stretched else ("default",)
    if kind not in accepted:
        raise ValueError(f"rope_type = {kind!r} is not supported; accepted: {', '.join(map(repr, accepted))}")
    if kind == "default":
        return None
    told = {**scaling, **rope, "model_type": raw.get("model_type")}
    usual = {"fast": 32.0, "slow": 1.0, "query_growth": 0.0}
    fields = {ours: number(told, theirs, usual.get(ours)) for ours, theirs in _YARN.items()}
    if told.get("truncate") is False:
        raise ValueError("truncate = false of a yarn embedding is not supported; accepted: true or absent")
    return Yarn(**fields | {"original": int(fields["original"])}, magnitude=_magnitude(told, fields["factor"]))


def _magnitude(told: Mapping[str, Any], factor: float) -> float:
    """Returns the factor on what has turned, as `transformers` finds it."""
    if told.get("attention_factor") is not None:
        return number(told, "attention_factor")
    scale = lambda weight: 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    one, other = told.get("mscale"), told.get("mscale_all_dim")
    return scale(number(told, "mscale")) / scale(number(told, "mscale_all_dim")) if one and other else scale(1.0)


def write(config: TransformerConfig) -> dict[str, Any]:
    """Undoes `read`; returns the content of `rope_parameters`."""
    if config.yarn is None:
        return {"rope_theta": config.rope_theta, "rope_type": "default"}
    return {"rope_theta": config.rope_theta, "rope_type": "yarn", "type": "yarn",
            **{theirs: getattr(config.yarn, ours) for ours, theirs in _YARN.items()},
            "attention_factor": config.yarn.magnitude}
