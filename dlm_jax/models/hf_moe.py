"""What config dictionaries say of mixtures of experts: one reader and one writer for every way of saying it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlm_jax.models.config import MoE, TransformerConfig, parts
from dlm_jax.models.fields import boolean, integer, integers, number

Raw = Mapping[str, Any]
_STACKED = {"llada2_moe_veomni": "llada2_moe"}  # model types whose experts are stacked, and those where each is apart


def plain_type(model_type: Any) -> Any:
    """Returns the model type of the same model with every expert by itself; anything else as it is."""
    return _STACKED.get(model_type, model_type) if isinstance(model_type, str) else model_type


def period(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest run of layer kinds that repeats to all of them."""
    count = len(kinds)
    size = next((n for n in range(1, count + 1)
                 if count % n == 0 and list(kinds) == list(kinds[:n]) * (count // n)), count)
    return tuple(kinds[:size])


def _pattern(raw: Raw, sparse: Callable[[int], bool]) -> tuple[str, ...]:
    return period(["attention+moe" if sparse(i) else "attention" for i in range(integer(raw, "num_hidden_layers"))])


def _is_sparse(config: TransformerConfig) -> list[bool]:
    return [parts(kind)[1] == "moe" for kind in config.pattern * config.num_periods]


def sparse_layers(raw: Raw) -> Callable[[int], bool]:
    """Returns whether a layer of a Qwen model has experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    step, plain = integer(raw, "decoder_sparse_step", 1), integers(raw, "mlp_only_layers") or []
    if step < 1:
        raise ValueError(f"decoder_sparse_step = {step}: expected at least 1 layer")
    return lambda i: i not in plain and (i + 1) % step == 0


def _read_qwen(raw: Raw) -> tuple[dict[str, Any], Callable[[], MoE]]:
    """SDAR-MoE and RND1: softmax routers and no more."""
    return {"pattern": _pattern(raw, sparse_layers(raw))}, lambda: MoE(
        experts=integer(raw, "num_experts"), active=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "moe_intermediate_size"), normalise=boolean(raw, "norm_topk_prob", False))


def write_qwen(config: TransformerConfig) -> dict[str, Any]:
    """Returns what Qwen models say of their experts."""
    raw: dict[str, Any] = {"mlp_only_layers": [i for i, sparse in enumerate(_is_sparse(config)) if not sparse]}
    if config.moe is None:
        return raw
    moe = config.moe
    raw |= {"num_experts": moe.experts, "num_experts_per_tok": moe.active, "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.normalise, "decoder_sparse_step": 1}
    return raw | ({"shared_expert_intermediate_size": moe.shared_width} if moe.shared_gate else {})


def read_shared_gate(raw: Raw) -> MoE:
    """Returns the experts of Qwen3-Next."""
    return MoE(experts=integer(raw, "num_experts", 512), active=integer(raw, "num_experts_per_tok"),
               width=integer(raw, "moe_intermediate_size"), normalise=boolean(raw, "norm_topk_prob", True),
               shared_width=integer(raw, "shared_expert_intermediate_size"), shared_gate=True)


def _read_llada2(raw: Raw) -> tuple[dict[str, Any], Callable[[], MoE]]:
    """LLaDA2: sigmoid routers whose bias only chooses, groups, leading dense layers."""
    dense = integer(raw, "first_k_dense_replace", 0)
    fields = {
        "pattern": _pattern(raw, lambda i: i >= dense),
        "partial_rotary_factor": number(raw, "partial_rotary_factor", 0.5),
        "qkv_bias": boolean(raw, "use_qkv_bias", False), "o_bias": boolean(raw, "use_bias", False)}

    def experts() -> MoE:
        active, width = integer(raw, "num_experts_per_tok"), integer(raw, "moe_intermediate_size")
        return MoE(
            experts=integer(raw, "num_experts"), active=active, width=width,
            shared_width=width * integer(raw, "num_shared_experts", 0), scores="sigmoid", normalise=active > 1,
            bias="selection", groups=integer(raw, "n_group", 8), active_groups=integer(raw, "topk_group", 4),
            scale=number(raw, "routed_scaling_factor", 2.5),
            layout="stacked" if raw["model_type"] in _STACKED else "each")

    return fields, experts


def _write_llada2(config: TransformerConfig) -> dict[str, Any]:
    sparse, moe = _is_sparse(config), config.moe
    raw: dict[str, Any] = {
        "first_k_dense_replace": sparse.index(True) if any(sparse) else len(sparse),
        "partial_rotary_factor": config.partial_rotary_factor, "rotary_dim": config.rotary_dim, "rope_scaling": None,
        "use_qkv_bias": config.qkv_bias, "use_bias": config.o_bias, "use_qk_norm": True, "use_cache": False}
    if moe is None:
        return raw
    stacked = {plain: stacked for stacked, plain in _STACKED.items()}
    return raw | {
        "model_type": stacked[config.family] if moe.layout == "stacked" else config.family,
        "num_experts": moe.experts, "num_experts_per_tok": moe.active, "moe_intermediate_size": moe.width,
        "num_shared_experts": moe.shared_width // moe.width or None, "n_group": moe.groups,
        "topk_group": moe.active_groups, "routed_scaling_factor": moe.scale, "score_function": moe.scores,
        "norm_topk_prob": True, "moe_router_enable_expert_bias": True}


def _read_llada(raw: Raw) -> tuple[dict[str, Any], Callable[[], MoE]]:
    """LLaDA-MoE: softmax routers whose bias stays in the weights, a list of which layers are sparse."""
    count, sparse = integer(raw, "num_hidden_layers"), integers(raw, "moe_layer_freq")
    if sparse is not None and len(sparse) != count:
        raise ValueError(f"moe_layer_freq lists {len(sparse)} layers, num_hidden_layers is {count}")
    bias = boolean(raw, "attention_bias", False)
    fields = {
        "pattern": _pattern(raw, lambda i: sparse is None or sparse[i] != 0),
        "intermediate_size": integer(raw, "dense_intermediate_size", raw.get("expert_intermediate_size")),
        "partial_rotary_factor": number(raw, "partial_rotary_factor", 1.0),
        "qk_norm": boolean(raw, "qk_layernorm", True), "qkv_bias": bias, "o_bias": bias,
        "clip_qkv": None if raw.get("clip_qkv") is None else number(raw, "clip_qkv")}
    return fields, lambda: MoE(
        experts=integer(raw, "num_experts"), active=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "expert_intermediate_size"),
        shared_width=integer(raw, "shared_expert_intermediate_size", 0), normalise=False,
        bias="weight" if boolean(raw, "moe_router_enable_expert_bias", False) else None)


def _write_llada(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    raw: dict[str, Any] = {
        "dense_intermediate_size": config.intermediate_size, "moe_layer_freq": [int(x) for x in _is_sparse(config)],
        "partial_rotary_factor": config.partial_rotary_factor, "qk_layernorm": config.qk_norm,
        "attention_bias": config.qkv_bias, "clip_qkv": config.clip_qkv, "rope_scaling": None, "use_cache": False}
    if moe is None:
        return raw
    return raw | {
        "num_experts": moe.experts, "num_experts_per_tok": moe.active, "expert_intermediate_size": moe.width,
        "shared_expert_intermediate_size": moe.shared_width or None, "norm_topk_prob": None,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": moe.bias is not None}


_READERS = {"sdar_moe": _read_qwen, "rnd1": _read_qwen, "llada2_moe": _read_llada2, "llada_moe": _read_llada}
_WRITERS = {"sdar_moe": write_qwen, "rnd1": write_qwen, "llada2_moe": _write_llada2, "llada_moe": _write_llada}


def read(family: str, raw: Raw) -> dict[str, Any]:
    """Returns the fields of a configuration that follow from what a family says of its experts; {} for other families.

    Args:
      family: of `config.FAMILIES`.
      raw: the parsed config.json.

    Raises:
      ValueError: a field that is missing or malformed, or numbers that do not fit.
    """
    if family not in _READERS:
        return {}
    fields, experts = _READERS[family](raw)
    sparse = any(parts(kind)[1] == "moe" for kind in fields["pattern"])
    return fields | {"moe": experts() if sparse else None}


def write(config: TransformerConfig, raw: dict[str, Any]) -> dict[str, Any]:
    """Undoes `read`.

    Args:
      config: the configuration.
      raw: a dictionary with its other fields.

    Returns:
      The dictionary with what the family says of its experts; as it is for other families.

    Raises:
      ValueError: experts that the family has no words for.
    """
    if config.family not in _WRITERS:
        return raw
    made = raw | _WRITERS[config.family](config)
    if config.family == "llada_moe":
        del made["intermediate_size"]
    said = read(config.family, made)
    layout = {} if config.moe is None or said["moe"] is None else {"layout": config.moe.layout}
    if (said["pattern"], said["moe"] and dataclasses.replace(said["moe"], **layout)) != (config.pattern, config.moe):
        raise ValueError(f"a {config.family} config.json cannot say pattern = {config.pattern}, moe = {config.moe}; "
                         f"the nearest it can say is pattern = {said['pattern']}, moe = {said['moe']}")
    return made
