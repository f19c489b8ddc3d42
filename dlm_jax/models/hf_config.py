"""Configurations read from and written to Hugging Face config dictionaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dlm_jax.conventions import ACCEPTED, Conventions
from dlm_jax.models import families, hf_moe, hf_rope
from dlm_jax.models.config import FAMILIES, GatedDelta, TransformerConfig, parts
from dlm_jax.models.fields import boolean, integer, number, token

_WRAPPED = {"qwen3_5": "qwen3_5_text"}  # model types whose text_config is a model of ours, beside parts that are not
_CONVENTIONS = "diffusion_conventions"
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
_TRAINED = ("block_size", "logit_shift", "noisy_shift")  # what ours say of how they were trained
_MIXERS = {"linear_attention": "gated_delta", "full_attention": "attention"}
_GATED_DELTA = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim"}

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


def from_hf(raw: Mapping[str, Any]) -> TransformerConfig:
    """Reads a Hugging Face `config.json` dictionary, with the old or the new home of the rotary base.

    Args:
      raw: the parsed file.

    Returns:
      The configuration.

    Raises:
      ValueError: an unsupported model type or feature, named with what is accepted.
    """
    raw = _text_model(raw)
    family = families.recognise(raw)
    if family == "llada":
        raw = _from_llada(raw)
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window = true is not supported; accepted: false or absent")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act = {raw['hidden_act']!r} is not supported; accepted: 'silu'")
    experts = hf_moe.read(family, raw)
    if FAMILIES[family].qk_norm and raw.get("attention_bias") and "qkv_bias" not in experts:
        raise ValueError(f"attention_bias = true is not supported for {family}; accepted: false or absent")
    yarn, rope = hf_rope.read(family, raw), hf_rope.homes(raw)[0]
    heads, width, head_dim = integer(raw, "num_attention_heads"), integer(raw, "hidden_size"), raw.get("head_dim")
    if head_dim is None and (heads < 1 or width % heads):
        raise ValueError(f"hidden_size = {width} is not a multiple of num_attention_heads = {heads} "
                         "and head_dim is not given; add head_dim to config.json")
    home = lambda name: rope if rope.get(name) is not None else raw
    return TransformerConfig(
        family=family,
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=width,
        intermediate_size=experts.pop("intermediate_size", None) or integer(raw, "intermediate_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=integer(raw, "num_key_value_heads", heads),
        head_dim=width // heads if head_dim is None else integer(raw, "head_dim"),
        rope_theta=number(home("rope_theta"), "rope_theta", 10000.0),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=boolean(raw, "tie_word_embeddings", False),
        initializer_range=number(raw, "initializer_range", 0.02),
        max_position_embeddings=integer(raw, "max_position_embeddings", 32768),
        **_released(family, raw) | {name: token(raw, name) for name in _SPECIAL_IDS if token(raw, name) is not None} | {
            name: integer(raw, theirs) for name, theirs in _trained(family) if raw.get(theirs) is not None},
        **_told(raw),
        yarn=yarn,
        **(_layers(raw, home("partial_rotary_factor")) if FAMILIES[family].gated_attention else experts),
    )


def _trained(family: str) -> list[tuple[str, str]]:
    """Returns names of ours and the family's for how a model was trained."""
    return [(name, FAMILIES[family].renamed.get(name, name)) for name in _TRAINED]


def _released(family: str, raw: Mapping[str, Any]) -> dict[str, int]:
    """Returns what all released models of a family share and their configs may leave out."""
    usual, size, theirs = FAMILIES[family], integer(raw, "vocab_size"), dict(_trained(family))
    known = usual.mask_token_id is not None and usual.mask_token_id < size
    found = {name: getattr(usual, name) for name in ("mask_token_id", "eos_token_id", "block_size")}
    return {name: value for name, value in found.items()
            if known and value is not None and theirs.get(name, name) not in raw}


def _told(raw: Mapping[str, Any]) -> dict[str, Conventions]:
    """Reads the conventions that a model of ours has in place of its family's."""
    value = raw.get(_CONVENTIONS)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or set(value) - set(ACCEPTED):
        raise ValueError(f"{_CONVENTIONS} = {value!r}: expected an object with some of {sorted(ACCEPTED)}")
    return {"conventions": Conventions(**value)}


def is_family(raw: Mapping[str, Any], family: str) -> bool:
    """Tells whether a config dictionary is one of a family's models, unwrapped."""
    try:
        return families.recognise(raw) == family
    except ValueError:
        return False


def _text_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the dictionary of the text model that another wraps, or the dictionary itself."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _WRAPPED:
        return raw
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"text_config = {inner!r} of a {family} model: expected an object, the text model's")
    outer = {name: raw[name] for name in ("tie_word_embeddings",) if raw.get(name) is not None}
    ids = {name: raw[name] for name in _SPECIAL_IDS if inner.get(name) is None and raw.get(name) is not None}
    return {**inner, **outer, **ids, "model_type": inner.get("model_type", _WRAPPED[family])}


def _layers(raw: Mapping[str, Any], rotary_home: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what a hybrid family says of its layers: their kinds as the shortest period, and the shapes of each."""
    count, every = integer(raw, "num_hidden_layers"), integer(raw, "full_attention_interval", 4)
    if every < 1:
        raise ValueError(f"full_attention_interval = {every}: expected at least 1 layer")
    if not isinstance(raw.get("layer_types") or [], list):
        raise ValueError(f"layer_types = {raw['layer_types']!r}: expected a list with a type for every layer")
    if raw.get("attn_output_gate") is False:
        raise ValueError("attn_output_gate = false is not supported; accepted: true or absent")
    if raw["model_type"] != "qwen3_next" and raw.get("num_experts"):
        raise ValueError(f"num_experts = {raw['num_experts']} of a {raw['model_type']} model is not supported; "
                         "accepted: 0 or absent, or model_type 'qwen3_next'")
    types = raw.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    unknown = [kind for kind in types if kind not in _MIXERS]
    if unknown:
        raise ValueError(f"layer type {unknown[0]!r} in layer_types is not supported; accepted: {sorted(_MIXERS)}")
    if len(types) != count:
        raise ValueError(f"layer_types lists {len(types)} layers, num_hidden_layers is {count}")
    kinds = [_MIXERS[kind] for kind in types]
    if raw["model_type"] == "qwen3_next" and integer(raw, "num_experts", 512):
        sparse = hf_moe.sparse_layers(raw)
        kinds = [kind + "+moe" if sparse(i) else kind for i, kind in enumerate(kinds)]
    read = lambda names: {ours: integer(raw, theirs) for ours, theirs in names.items()}
    used = {part for kind in kinds for part in parts(kind)}
    return {
        "pattern": hf_moe.period(kinds),
        "partial_rotary_factor": number(rotary_home, "partial_rotary_factor", 0.25),
        "gated_delta": GatedDelta(**read(_GATED_DELTA)) if "gated_delta" in used else None,
        "moe": hf_moe.read_shared_gate(raw) if "moe" in used else None}


def _layers_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Undoes `_layers`."""
    layers = [parts(kind) for kind in config.pattern * config.num_periods]
    types = {ours: theirs for theirs, ours in _MIXERS.items()}
    raw = {"layer_types": [types[mixer] for mixer, _ in layers], "partial_rotary_factor": config.partial_rotary_factor}
    if config.gated_delta is not None:
        raw |= {theirs: getattr(config.gated_delta, ours) for ours, theirs in _GATED_DELTA.items()}
    return raw | hf_moe.write_qwen(config) if config.family == "qwen3_next" else raw


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
        "model_type": FAMILIES[config.family].model_type or config.family,
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
        "rope_parameters": hf_rope.write(config),
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
    if FAMILIES[config.family].mark:
        raw[FAMILIES[config.family].mark] = True
    for name, theirs in (*zip(_SPECIAL_IDS, _SPECIAL_IDS), *_trained(config.family)):
        if getattr(config, name) is not None or getattr(FAMILIES[config.family], name, None) is not None:
            raw[theirs] = getattr(config, name)  # null, too, where what is left out means what released models have
    if config.conventions is not None:
        raw[_CONVENTIONS] = dataclasses.asdict(config.conventions)
    if config.gated_attention:
        raw |= _layers_to_hf(config)
        raw["rope_parameters"] |= {"partial_rotary_factor": config.partial_rotary_factor}
        del raw["use_sliding_window"]
    return _to_llada(raw) if config.family == "llada" else hf_moe.write(config, raw)
