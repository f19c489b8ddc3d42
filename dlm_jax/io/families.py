"""Where every tensor of a Hugging Face checkpoint lives in the parameter tree: one table a family, for `io.names`.

A row is (checkpoint name, parameter path, layout). The layout reads "stored axes -> parameter axes"; brackets
mark axes that are one axis in the file: a torch Linear from D to N heads of H is "(N H) D -> D N H". A letter in
braces in the name, as {L}, runs over all its values, and the tensors are stacked on a leading axis of that size;
{L:3::4} runs over every fourth from 3 on, as layers do that come once in a period of four. A name that ends in [q]
means the piece q of a tensor that holds several, see `PIECES`.

A table tells of all that a family's models may have: a row below a mixer or an MLP that a layer does not have leaves
that layer out, and a row of what a model lacks, a bias or a norm, is no row of that model.

Letters: V vocabulary, D width, F MLP width, N query heads, K KV heads, H head dim, Q width of a query and its gate,
L layers; of the delta rule Hk and Hv heads of widths dk and dv, R value heads a key head, T taps; X experts of width
Fx, and Fs, the shared one's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = tuple[str, str, str]

_DENSE: tuple[Row, ...] = (
    ("model.embed_tokens.weight", "embed", "V D -> V D"),
    ("model.norm.weight", "final_norm", "D -> D"),
    ("model.layers.{L}.input_layernorm.weight", "layers.input_norm", "D -> D"),
    ("model.layers.{L}.post_attention_layernorm.weight", "layers.post_attention_norm", "D -> D"),
    ("model.layers.{L}.self_attn.q_proj.weight", "layers.attention.q_proj", "(N H) D -> D N H"),
    ("model.layers.{L}.self_attn.k_proj.weight", "layers.attention.k_proj", "(K H) D -> D K H"),
    ("model.layers.{L}.self_attn.v_proj.weight", "layers.attention.v_proj", "(K H) D -> D K H"),
    ("model.layers.{L}.self_attn.o_proj.weight", "layers.attention.o_proj", "D (N H) -> N H D"),
    ("model.layers.{L}.mlp.gate_proj.weight", "layers.mlp.gate_proj", "F D -> D F"),
    ("model.layers.{L}.mlp.up_proj.weight", "layers.mlp.up_proj", "F D -> D F"),
    ("model.layers.{L}.mlp.down_proj.weight", "layers.mlp.down_proj", "D F -> F D"),
    ("model.layers.{L}.self_attn.q_norm.weight", "layers.attention.q_norm", "H -> H"),
    ("model.layers.{L}.self_attn.k_norm.weight", "layers.attention.k_norm", "H -> H"),
    ("model.layers.{L}.self_attn.q_proj.bias", "layers.attention.q_bias", "(N H) -> N H"),
    ("model.layers.{L}.self_attn.k_proj.bias", "layers.attention.k_bias", "(K H) -> K H"),
    ("model.layers.{L}.self_attn.v_proj.bias", "layers.attention.v_bias", "(K H) -> K H"),
    ("model.layers.{L}.self_attn.o_proj.bias", "layers.attention.o_bias", "D -> D"),
)


def _with_diffusion_view(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Adds the second attention set of a dual model (Orthrus): every tensor of the first under another name."""
    return rows + tuple(
        (re.sub(r"\.(weight|bias)$", r"_diff.\1", name), path.replace(".attention.", ".attention_diffusion."), layout)
        for name, path, layout in rows if ".attention." in path)


_HYBRID: tuple[Row, ...] = (
    *(row for row in _DENSE if not row[1].endswith(".q_proj")),
    ("model.layers.{L}.self_attn.q_proj.weight", "layers.attention.q_proj", "(N Q) D -> D N Q"),
    *(("model.layers.{L}.linear_attn." + name, "layers.gated_delta." + path, layout) for name, path, layout in (
        ("conv1d.weight[q]", "q_conv", "(Hk dk) 1 T -> Hk dk T"),
        ("conv1d.weight[k]", "k_conv", "(Hk dk) 1 T -> Hk dk T"),
        ("conv1d.weight[v]", "v_conv", "(Hv dv) 1 T -> Hv dv T"),
        ("A_log", "a_log", "Hv -> Hv"),
        ("dt_bias", "dt_bias", "Hv -> Hv"),
        ("norm.weight", "out_norm", "dv -> dv"),
        ("out_proj.weight", "o_proj", "D (Hv dv) -> Hv dv D"))),
)
_PROJECTIONS = (("q", "(Hk dk) D -> D Hk dk"), ("k", "(Hk dk) D -> D Hk dk"), ("v", "(Hv dv) D -> D Hv dv"),
                ("z", "(Hv dv) D -> D Hv dv"), ("b", "Hv D -> D Hv"), ("a", "Hv D -> D Hv"))


def _delta_projections(**tensors: str) -> tuple[Row, ...]:
    """Rows of the delta rule's projections, from what each checkpoint tensor holds."""
    home = {of: f"{name}.weight" + (f"[{of}]" if len(held) > 1 else "") for name, held in tensors.items()
            for of in held}
    return tuple((f"model.layers.{{L}}.linear_attn.{home[of]}", f"layers.gated_delta.{of}_proj", layout)
                 for of, layout in _PROJECTIONS)


def _moe(*rows: Row) -> tuple[Row, ...]:
    """Completes rows of a mixture of experts."""
    return tuple(("model.layers.{L}.mlp." + name, "layers.moe." + path, layout) for name, path, layout in rows)


def _shared(name: str, prefix: str = "model.layers.{L}.mlp.") -> tuple[Row, ...]:
    """Returns the rows of the expert that reads every token."""
    return tuple((f"{prefix}{name}.{part}_proj.weight", f"layers.moe.shared_{part}_proj", layout) for part, layout in (
        ("gate", "Fs D -> D Fs"), ("up", "Fs D -> D Fs"), ("down", "D Fs -> Fs D")))


_ROUTER = _moe(("gate.weight", "router", "X D -> D X"))
# the experts of a layer, by `MoE.layout`
EXPERTS: Mapping[str, tuple[Row, ...]] = {
    "each": _moe(*((f"experts.{{X}}.{part}_proj.weight", f"{part}_proj", layout) for part, layout in (
        ("gate", "Fx D -> D Fx"), ("up", "Fx D -> D Fx"), ("down", "D Fx -> Fx D")))),
    "stacked": _moe(*((f"experts.{part}_proj", f"{part}_proj", layout) for part, layout in (
        ("gate", "X Fx D -> X D Fx"), ("up", "X Fx D -> X D Fx"), ("down", "X D Fx -> X Fx D")))),
    "paired": _moe(("w1[gate]", "gate_proj", "X Fx D -> X D Fx"), ("w1[up]", "up_proj", "X Fx D -> X D Fx"),
                   ("w2", "down_proj", "X D Fx -> X Fx D"))}
# and how to tell their tensors
LAYOUT_MARKS = {"each": r"\.mlp\.experts\.\d+\.", "stacked": r"\.mlp\.experts\.\w+_proj$", "paired": r"\.mlp\.w[12]$"}

# tensors that hold several along an axis, name's end -> (repeats, piece -> rows in a repeat); Qwen3-Next's repeat for
# every key head, and an axis that repeats before that of the pieces says so by itself
_FLAT = {"q": "Hk dk", "k": "Hk dk", "v": "Hv dv"}
PIECES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "conv1d.weight": ("", _FLAT), "in_proj_qkv.weight": ("", _FLAT),
    "in_proj_qkvz.weight": ("Hk", {"q": "dk", "k": "dk", "v": "R dv", "z": "R dv"}),
    "in_proj_ba.weight": ("Hk", {"b": "R", "a": "R"}),
    "query_key_value.weight": ("", {"q": "N H", "k": "K H", "v": "K H"}),
    "query_key_value.bias": ("", {"q": "N H", "k": "K H", "v": "K H"}),
    "mlp.w1": ("X", {"gate": "Fx", "up": "Fx"})}

_BLOCK = "model.transformer.blocks.{L}."
_LLADA: tuple[Row, ...] = (
    ("model.transformer.wte.weight", "embed", "V D -> V D"),
    ("model.transformer.ln_f.weight", "final_norm", "D -> D"),
    (_BLOCK + "attn_norm.weight", "layers.input_norm", "D -> D"),
    (_BLOCK + "ff_norm.weight", "layers.post_attention_norm", "D -> D"),
    (_BLOCK + "q_proj.weight", "layers.attention.q_proj", "(N H) D -> D N H"),
    (_BLOCK + "k_proj.weight", "layers.attention.k_proj", "(K H) D -> D K H"),
    (_BLOCK + "v_proj.weight", "layers.attention.v_proj", "(K H) D -> D K H"),
    (_BLOCK + "attn_out.weight", "layers.attention.o_proj", "D (N H) -> N H D"),
    (_BLOCK + "ff_proj.weight", "layers.mlp.gate_proj", "F D -> D F"),
    (_BLOCK + "up_proj.weight", "layers.mlp.up_proj", "F D -> D F"),
    (_BLOCK + "ff_out.weight", "layers.mlp.down_proj", "D F -> F D"),
)

_LLADA2: tuple[Row, ...] = (
    ("model.word_embeddings.weight", "embed", "V D -> V D"),
    *(row for row in _DENSE[1:] if ".attention." not in row[1]),
    *((f"model.layers.{{L}}.attention.{name}", f"layers.attention.{path}", layout) for name, path, layout in (
        ("query_key_value.weight[q]", "q_proj", "(N H) D -> D N H"),
        ("query_key_value.weight[k]", "k_proj", "(K H) D -> D K H"),
        ("query_key_value.weight[v]", "v_proj", "(K H) D -> D K H"),
        ("query_key_value.bias[q]", "q_bias", "(N H) -> N H"),
        ("query_key_value.bias[k]", "k_bias", "(K H) -> K H"),
        ("query_key_value.bias[v]", "v_bias", "(K H) -> K H"),
        ("query_layernorm.weight", "q_norm", "H -> H"),
        ("key_layernorm.weight", "k_norm", "H -> H"),
        ("dense.weight", "o_proj", "D (N H) -> N H D"),
        ("dense.bias", "o_bias", "D -> D"))),
    *_ROUTER, *_moe(("gate.expert_bias", "expert_bias", "X -> X")), *_shared("shared_experts"))

TABLES: Mapping[str, tuple[Row, ...]] = {
    "qwen3": _DENSE, "qwen2": _DENSE,
    "qwen3_5_text": _HYBRID + _delta_projections(in_proj_qkv="qkv", in_proj_z="z", in_proj_b="b", in_proj_a="a"),
    "qwen3_next": _HYBRID + _delta_projections(in_proj_qkvz="qkvz", in_proj_ba="ba") + _ROUTER
    + _shared("shared_expert") + _moe(("shared_expert_gate.weight", "shared_gate", "1 D -> D")),
    "orthrus": _with_diffusion_view(_DENSE), "orthrus-qwen2": _with_diffusion_view(_DENSE),
    "llada": _LLADA, "Dream": _DENSE, "a2d-qwen3": _DENSE, "a2d-qwen2": _DENSE,
    "a2d-llama": _DENSE, "illada": _DENSE, "edlm": _DENSE,
    "sdar": _DENSE, "Fast_dLLM_Qwen": _DENSE, "wedlm-qwen3": _DENSE,
    "wedlm-qwen2": _DENSE, "llama": _DENSE, "stable-diffcoder": _DENSE,
    "nemotron_labs_diffusion": tuple((re.sub("^model", "encoder", name), *rest) for name, *rest in _DENSE),
    "sdar_moe": _DENSE + _ROUTER, "rnd1": _DENSE + _ROUTER, "llada2_moe": _LLADA2,
    "llada_moe": _DENSE + _ROUTER + _moe(("expert_bias", "expert_bias", "X -> X"))
    + _shared("shared_expert", "model.layers.{L}.")}
HEAD = "lm_head.weight"  # and where it has another name
HEADS = {"llada": "model.transformer.ff_out.weight", "nemotron_labs_diffusion": "diffusion_head.weight"}
