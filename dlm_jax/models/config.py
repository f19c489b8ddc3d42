"""Shape and family of a transformer, read from and written to Hugging Face config dictionaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm decoder stack; every field is static.

    Attributes:
      family: "qwen3" (q/k norm, no bias) or "qwen2" (bias on q, k, v, no q/k norm).
      vocab_size: V. hidden_size: D. intermediate_size: MLP width.
      num_layers: L. num_heads: N query heads. num_kv_heads: K, a divisor of N. head_dim: H, even.
      rope_theta: rotary base. rms_norm_eps: added to mean squares.
      tie_word_embeddings: the head is the embedding.
      initializer_range: standard deviation of fresh weights.
      max_position_embeddings: longest position the checkpoint was made for, tokens; generation refuses more.
      bos_token_id, eos_token_id, pad_token_id, mask_token_id: special ids, None where unknown.
    """

    family: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self):
        if self.family not in _ARCHITECTURES:
            raise ValueError(f"model family {self.family!r} is not supported; accepted: {sorted(_ARCHITECTURES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("rope_theta", "rms_norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a positive number")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"initializer_range = {self.initializer_range}: must be 0 or a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}; "
                "every KV head serves the same number of query heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: rotary embedding needs an even number of at least 2")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} = {value} lies outside the vocabulary of {self.vocab_size} ids")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before RoPE."""
        return self.family == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """Whether the q, k and v projections carry a bias."""
        return self.family == "qwen2"

    def replace(self, **changes) -> "TransformerConfig":
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def from_hf(raw: Mapping[str, Any]) -> TransformerConfig:
    """Reads a Hugging Face `config.json` dictionary, with the old or the new home of the rotary base.

    Args:
      raw: the parsed file.

    Returns:
      The configuration.

    Raises:
      ValueError: an unsupported model type or feature, named with what is accepted.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise ValueError(f"model_type {family!r} is not supported; accepted: {sorted(_ARCHITECTURES)}")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window = true is not supported; accepted: false or absent")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act = {raw['hidden_act']!r} is not supported; accepted: 'silu'")
    if family == "qwen3" and raw.get("attention_bias"):
        raise ValueError("attention_bias = true is not supported for qwen3; accepted: false or absent")
    rope, scaling = (raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, value in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} = {value!r}: expected an object or null")
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ValueError(f"rope_type = {kind!r} is not supported; accepted: 'default'")
    heads, width, head_dim = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size"), raw.get("head_dim")
    if head_dim is None and (heads < 1 or width % heads):
        raise ValueError(f"hidden_size = {width} is not a multiple of num_attention_heads = {heads} "
                         "and head_dim is not given; add head_dim to config.json")
    theta_home = rope if rope.get("rope_theta") is not None else raw
    return TransformerConfig(
        family=family,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=width,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=width // heads if head_dim is None else _integer(raw, "head_dim"),
        rope_theta=_number(theta_home, "rope_theta", 10000.0),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_boolean(raw, "tie_word_embeddings", False),
        initializer_range=_number(raw, "initializer_range", 0.02),
        max_position_embeddings=_integer(raw, "max_position_embeddings", 32768),
        bos_token_id=_token(raw, "bos_token_id"),
        eos_token_id=_token(raw, "eos_token_id"),
        pad_token_id=_token(raw, "pad_token_id"),
        mask_token_id=_token(raw, "mask_token_id"),
    )


def _field(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"a {raw['model_type']} model lacks {name!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _field(raw, name, default)
    if not _is_number(value):
        raise ValueError(f"{name} = {value!r}: expected a number")
    return float(value)


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _field(raw, name, default)
    if not _is_number(value) or value % 1:
        raise ValueError(f"{name} = {value!r}: expected a whole number")
    return int(value)


def _boolean(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = _field(raw, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: expected true or false")
    return value


def _token(raw: Mapping[str, Any], name: str) -> int | None:
    """Reads a special id; of several, the first."""
    value = raw.get(name)
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{name} = []: expected an id, a list of at least one, or null")
        value = value[0]
    return None if value is None else _integer({name: value}, name)


def to_hf(config: TransformerConfig, dtype: str = "float32") -> dict[str, Any]:
    """Writes a dictionary that `transformers` reads as the same model.

    Args:
      config: the configuration.
      dtype: name of the weights' dtype, as stored.

    Returns:
      The content of `config.json`; the rotary base stands in both its old and its new place.
    """
    raw = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "use_sliding_window": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.family == "qwen3":
        raw["attention_bias"] = False
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"):
        if getattr(config, name) is not None:
            raw[name] = getattr(config, name)
    return raw
