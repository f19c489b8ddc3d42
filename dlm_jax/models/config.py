"""Shape and family of a transformer, read from and written to Hugging Face config dictionaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What all models of a `model_type` have in common.

    Attributes:
      architecture: class name in config.json.
      qk_norm: queries and keys are normalised per head before RoPE.
      qkv_bias: the q, k and v projections carry a bias.
      bidirectional: every token sees every other; else those up to itself.
      shift: the output at index i predicts the token at i + shift.
      dual: a second attention set in every layer, the diffusion view.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    bidirectional: bool = False
    shift: int = 1
    dual: bool = False


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "orthrus": Family(architecture="OrthrusLM", qk_norm=True, dual=True),
    "orthrus-qwen2": Family(architecture="OrthrusQwen2LM", qkv_bias=True, dual=True),
    "llada": Family(architecture="LLaDAModelLM", bidirectional=True, shift=0),
    "Dream": Family(architecture="DreamModel", qkv_bias=True, bidirectional=True),
    "a2d-qwen3": Family(architecture="A2DQwen3LMHeadModel", qk_norm=True, bidirectional=True, shift=0),
    "a2d-qwen2": Family(architecture="A2DQwen2LMHeadModel", qkv_bias=True, bidirectional=True, shift=0),
}
# LLaDA's config.json has OLMo's names for the same things
_LLADA_NAMES = {
    "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "initializer_range": "init_std",
    "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type"}
_LLADA_FIXED = {
    "alibi": False, "attention_layer_norm": False, "block_type": "llama", "include_bias": False,
    "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms", "multi_query_attention": False,
    "rope": True, "scale_logits": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm transformer stack; every field is static.

    Attributes:
      family: a key of `FAMILIES`, the `model_type` of config.json.
      vocab_size: V. hidden_size: D. intermediate_size: MLP width.
      num_layers: L. num_heads: N query heads. num_kv_heads: K, a divisor of N. head_dim: H, even.
      rope_theta: rotary base. rms_norm_eps: added to mean squares.
      tie_word_embeddings: the head is the embedding.
      initializer_range: standard deviation of fresh weights.
      max_position_embeddings: longest position the checkpoint was made for, tokens; generation refuses more.
      bos_token_id, eos_token_id, pad_token_id, mask_token_id: special ids, None where unknown.
      block_size: tokens of the blocks a dual or block-diffusion model was trained on, None where unknown.
      pattern: kinds of the layers that repeat, names of `layers.MIXERS`; a stack is num_layers / len(pattern) periods.
      logit_shift: in place of the family's shift, for a bidirectional model (0 or 1); None keeps the family's.
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
    block_size: int | None = None
    logit_shift: int | None = None
    pattern: tuple[str, ...] = ("attention",)

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"model family {self.family!r} is not supported; accepted: {sorted(FAMILIES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not self.pattern or self.num_layers % len(self.pattern):
            raise ValueError(f"num_layers = {self.num_layers} is not a multiple of the {len(self.pattern)} layers of "
                             f"pattern {self.pattern}: a stack is whole periods of one layer or more")
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
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: must be at least 1")
        if self.logit_shift is not None and (self.logit_shift not in (0, 1) or not self.bidirectional):
            raise ValueError(f"logit_shift = {self.logit_shift} for family {self.family!r}: expected 0 or 1, and only "
                             "for a bidirectional family; a causal model always predicts the next token")

    @property
    def num_periods(self) -> int:
        """How often `pattern` repeats."""
        return self.num_layers // len(self.pattern)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before RoPE."""
        return FAMILIES[self.family].qk_norm

    @property
    def qkv_bias(self) -> bool:
        """Whether the q, k and v projections carry a bias."""
        return FAMILIES[self.family].qkv_bias

    @property
    def bidirectional(self) -> bool:
        """Whether every token sees every other by default, not only those up to itself."""
        return FAMILIES[self.family].bidirectional

    @property
    def shift(self) -> int:
        """The output at index i predicts the token at i + shift."""
        return FAMILIES[self.family].shift if self.logit_shift is None else self.logit_shift

    @property
    def dual(self) -> bool:
        """Whether every layer has a second attention set, the diffusion view."""
        return FAMILIES[self.family].dual

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
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; accepted: {sorted(FAMILIES)}")
    if family == "llada":
        raw = _from_llada(raw)
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window = true is not supported; accepted: false or absent")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act = {raw['hidden_act']!r} is not supported; accepted: 'silu'")
    if FAMILIES[family].qk_norm and raw.get("attention_bias"):
        raise ValueError(f"attention_bias = true is not supported for {family}; accepted: false or absent")
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
        **{name: _integer(raw, name) for name in ("block_size", "logit_shift") if raw.get(name) is not None},
    )


def _from_llada(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns LLaDA's dictionary under the common names."""
    for name, value in _LLADA_FIXED.items():
        if raw.get(name) not in (None, value):
            raise ValueError(f"{name} = {raw[name]!r} is not supported for llada; accepted: {value!r} or absent")
    renamed = {ours: raw[theirs] for ours, theirs in _LLADA_NAMES.items() if theirs in raw}
    if raw.get("embedding_size") is not None:  # rows of the embedding, the ids there are logits for
        renamed["vocab_size"] = raw["embedding_size"]
    return {**raw, **renamed}


def _to_llada(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `_from_llada`."""
    dropped = {"rope_parameters", "use_sliding_window", *_LLADA_NAMES}
    kept = {name: value for name, value in raw.items() if name not in dropped}
    return kept | {theirs: raw[ours] for ours, theirs in _LLADA_NAMES.items()} | _LLADA_FIXED | {
        "embedding_size": raw["vocab_size"], "use_cache": False, "bias_for_layer_norm": False,
        "layer_norm_with_affine": True, "embedding_dropout": 0.0, "residual_dropout": 0.0}


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
        "architectures": [FAMILIES[config.family].architecture],
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
    if config.qk_norm:
        raw["attention_bias"] = False
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "block_size", "logit_shift"):
        if getattr(config, name) is not None:
            raw[name] = getattr(config, name)
    return _to_llada(raw) if config.family == "llada" else raw
