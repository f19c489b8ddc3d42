"""Where every tensor of a Hugging Face checkpoint lives in the parameter tree: one table a family.

A row is (checkpoint name, parameter path, layout). The layout reads "stored axes -> parameter axes"; brackets
mark axes that are one axis in the file: a torch Linear from D to N heads of H is "(N H) D -> D N H". A letter in
braces in the name, as {L}, runs over all its values, and the tensors are stacked on a leading axis of that size;
{L:3::4} runs over every fourth from 3 on, as layers do that come once in a period of four. A name that ends in [q]
means the piece q of a tensor that holds several, see `PIECES`.

A table tells of layers of all kinds; a row below a mixer or an MLP that a layer does not have leaves that layer out.

Letters: V vocabulary, D width, F MLP width, N query heads, K KV heads, H head dim, Q width of a query and its gate,
L layers; of the delta rule Hk and Hv heads of widths dk and dv, R value heads a key head, T taps; X experts of width
Fx, and Fs, the shared one's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from dlm_jax.io import tensor_files
from dlm_jax.models.config import TransformerConfig, parts

Row = tuple[str, str, str]
_PARTS = ("attention", "gated_delta", "mlp", "moe")  # what some layers have and others may not

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
)
_QK_NORM: tuple[Row, ...] = (
    ("model.layers.{L}.self_attn.q_norm.weight", "layers.attention.q_norm", "H -> H"),
    ("model.layers.{L}.self_attn.k_norm.weight", "layers.attention.k_norm", "H -> H"),
)
_QKV_BIAS: tuple[Row, ...] = (
    ("model.layers.{L}.self_attn.q_proj.bias", "layers.attention.q_bias", "(N H) -> N H"),
    ("model.layers.{L}.self_attn.k_proj.bias", "layers.attention.k_bias", "(K H) -> K H"),
    ("model.layers.{L}.self_attn.v_proj.bias", "layers.attention.v_bias", "(K H) -> K H"),
)


def _with_diffusion_view(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Adds the second attention set of a dual model (Orthrus): every tensor of the first under another name."""
    return rows + tuple(
        (re.sub(r"\.(weight|bias)$", r"_diff.\1", name), path.replace(".attention.", ".attention_diffusion."), layout)
        for name, path, layout in rows if ".attention." in path)


_HYBRID: tuple[Row, ...] = (
    *(row for row in _DENSE + _QK_NORM if not row[1].endswith(".q_proj")),
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


_MOE: tuple[Row, ...] = tuple(("model.layers.{L}.mlp." + name, "layers.moe." + path, layout) for name, path, layout in (
    ("gate.weight", "router", "X D -> D X"),
    ("experts.{X}.gate_proj.weight", "gate_proj", "Fx D -> D Fx"),
    ("experts.{X}.up_proj.weight", "up_proj", "Fx D -> D Fx"),
    ("experts.{X}.down_proj.weight", "down_proj", "D Fx -> Fx D"),
    ("shared_expert.gate_proj.weight", "shared_gate_proj", "Fs D -> D Fs"),
    ("shared_expert.up_proj.weight", "shared_up_proj", "Fs D -> D Fs"),
    ("shared_expert.down_proj.weight", "shared_down_proj", "D Fs -> Fs D"),
    ("shared_expert_gate.weight", "shared_gate", "1 D -> D")))

# tensors that hold several along their first axis, name's end -> (repeats, piece -> rows in a repeat); Qwen3-Next's
# repeat for every key head
_FLAT = {"q": "Hk dk", "k": "Hk dk", "v": "Hv dv"}
PIECES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "conv1d.weight": ("", _FLAT), "in_proj_qkv.weight": ("", _FLAT),
    "in_proj_qkvz.weight": ("Hk", {"q": "dk", "k": "dk", "v": "R dv", "z": "R dv"}),
    "in_proj_ba.weight": ("Hk", {"b": "R", "a": "R"})}

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

_QWEN3, _QWEN2 = _DENSE + _QK_NORM, _DENSE + _QKV_BIAS
TABLES: Mapping[str, tuple[Row, ...]] = {
    "qwen3": _QWEN3, "qwen2": _QWEN2,
    "qwen3_5_text": _HYBRID + _delta_projections(in_proj_qkv="qkv", in_proj_z="z", in_proj_b="b", in_proj_a="a"),
    "qwen3_next": _HYBRID + _delta_projections(in_proj_qkvz="qkvz", in_proj_ba="ba") + _MOE,
    "orthrus": _with_diffusion_view(_QWEN3), "orthrus-qwen2": _with_diffusion_view(_QWEN2),
    "llada": _LLADA, "Dream": _QWEN2, "a2d-qwen3": _QWEN3, "a2d-qwen2": _QWEN2,
    "sdar": _QWEN3, "Fast_dLLM_Qwen": _QWEN2, "wedlm-qwen3": _QWEN3, "wedlm-qwen2": _QWEN2, "llama": _DENSE, "stable-diffcoder": _DENSE,
    "nemotron_labs_diffusion": tuple((re.sub("^model", "encoder", name), *rest) for name, *rest in _DENSE)}
_HEADS = {"llada": "model.transformer.ff_out.weight", "nemotron_labs_diffusion": "diffusion_head.weight"}

# buffers that old exporters wrote beside the weights; they follow from the config
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
# what a checkpoint may hold beside its text model: a vision tower, and heads that predict several tokens
BESIDE = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.|mtp\.")
_TEXT_PREFIX = re.compile(r"^(model\.language_model|language_model\.model)\.")


def plain(name: str) -> str:
    """Returns the name that a tensor has where nothing is wrapped around its text model."""
    return _TEXT_PREFIX.sub("model.", name).removeprefix("language_model.")


def letters(config: TransformerConfig) -> dict[str, int]:
    """Returns the size of every letter the tables use."""
    sizes = {"1": 1, "V": config.vocab_size, "D": config.hidden_size, "F": config.intermediate_size,
             "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim, "L": config.num_layers,
             "Q": config.head_dim * (1 + config.gated_attention)}
    delta, moe = config.gated_delta, config.moe
    if delta is not None:
        sizes |= {"Hk": delta.key_heads, "Hv": delta.value_heads, "dk": delta.key_dim, "dv": delta.value_dim,
                  "R": delta.value_heads // delta.key_heads, "T": delta.taps}
    if moe is not None:
        sizes |= {"X": moe.experts, "Fx": moe.width, "Fs": moe.shared_width}
    return sizes


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where a piece of a tensor lies along its first axis, which is `repeats` times `rows` long.

    Attributes:
      repeats: how often the pieces alternate.
      rows: of all pieces in a repeat.
      start, stop: of this one.
    """

    repeats: int
    rows: int
    start: int
    stop: int

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the piece of a tensor; a view where the pieces do not alternate."""
        parts = tensor.reshape(self.repeats, self.rows, *tensor.shape[1:])[:, self.start: self.stop]
        return parts.reshape(-1, *tensor.shape[1:])

    def put(self, tensor: np.ndarray, piece: np.ndarray) -> None:
        """Writes the piece into a tensor."""
        parts = tensor.reshape(self.repeats, self.rows, *tensor.shape[1:])
        parts[:, self.start: self.stop] = piece.reshape(self.repeats, -1, *tensor.shape[1:])


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter and the checkpoint tensors it is stacked from.

    Attributes:
      path: keys from the root of the tree.
      names: checkpoint names, in C order of the leading axes.
      lead: sizes of the leading (stacked) axes; empty for a single tensor.
      stored: axes of a stored tensor, each a group of (letter, size).
      axes: letters of the parameter behind the leading axes.
      piece: of the checkpoint tensors that the parameter is; None for whole tensors.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    lead: tuple[int, ...]
    stored: tuple[tuple[tuple[str, int], ...], ...]
    axes: tuple[str, ...]
    piece: Piece | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each checkpoint tensor."""
        first, *rest = (math.prod(size for _, size in group) for group in self.stored)
        return (first if self.piece is None else self.piece.repeats * self.piece.rows, *rest)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one stacked part of the parameter."""
        sizes = dict(itertools.chain(*self.stored))
        return tuple(sizes[letter] for letter in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.lead + self.part_shape

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a stored tensor, or its piece, in the parameter's layout; a view wherever one can be made."""
        tensor = tensor if self.piece is None else self.piece.cut(tensor)
        flat = [(letter, size) for letter, size in itertools.chain(*self.stored) if letter != "1"]
        order = [letter for letter, _ in flat]
        return tensor.reshape([size for _, size in flat]).transpose([order.index(letter) for letter in self.axes])

    def to_stored(self, part: np.ndarray) -> np.ndarray:
        """Returns one part of the parameter as it is stored, whole tensor or piece, C-contiguous."""
        order = [letter for letter, _ in itertools.chain(*self.stored) if letter != "1"]
        turned = part.transpose([self.axes.index(letter) for letter in order])
        return tensor_files.contiguous(turned).reshape([math.prod(size for _, size in group) for group in self.stored])


def parameter(row: Row, sizes: Mapping[str, int]) -> Parameter:
    """Resolves a row of a table.

    Args:
      row: checkpoint name, dotted parameter path, layout.
      sizes: size of every letter.

    Returns:
      The parameter with names and sizes filled in.
    """
    name, path, layout = row
    name, held = re.fullmatch(r"(.*?)(?:\[(\w+)\])?", name).groups()
    left, right = layout.split("->")
    stored = tuple(tuple((letter, sizes[letter]) for letter in group.strip("()").split())
                   for group in re.findall(r"\([^)]*\)|\S+", left))
    stacked = [range(int(start or 0), sizes[letter], int(step or 1))
               for letter, start, step in re.findall(r"\{(\w+)(?::(\d+)::(\d+))?\}", name)]
    lead, blank = tuple(map(len, stacked)), re.sub(r"\{[^}]*\}", "{}", name)
    names = tuple(blank.format(*index) for index in itertools.product(*stacked))
    piece = None if held is None else _piece(name, held, sizes)
    return Parameter(tuple(path.split(".")), names, lead, stored, tuple(right.split()), piece)


def _piece(name: str, held: str, sizes: Mapping[str, int]) -> Piece:
    repeats, pieces = next(value for end, value in PIECES.items() if name.endswith("." + end))
    product = lambda letters: math.prod(sizes[letter] for letter in letters.split())
    lengths = {of: product(letters) for of, letters in pieces.items()}
    start = sum(length for of, length in itertools.takewhile(lambda item: item[0] != held, lengths.items()))
    return Piece(product(repeats), sum(lengths.values()), start, start + lengths[held])


def head_row(config: TransformerConfig) -> Row:
    """Returns the row of the head, which a checkpoint lacks where the head is the embedding."""
    return _HEADS.get(config.family, "lm_head.weight"), "lm_head", "V D -> V D"


def dtype(config: TransformerConfig, params: Mapping) -> np.dtype:
    """Returns the dtype that a checkpoint is said to have, its embedding's.

    Args:
      config: of the model.
      params: parameter tree.
    """
    return np.dtype(functools.reduce(lambda tree, key: tree[key], parameters(config)[0].path, params).dtype)


def parameters(config: TransformerConfig) -> Sequence[Parameter]:
    """Returns every parameter of a configuration, the embedding first, in the order of its family's table."""
    rows = TABLES[config.family] + (() if config.tie_word_embeddings else (head_row(config),))
    return [parameter(placed, letters(config)) for row in rows for placed in _placed(row, config.pattern)]


def _placed(row: Row, pattern: tuple[str, ...]) -> list[Row]:
    """Returns a row once for every place of a period that has it."""
    name, path, layout = row
    room, *below = path.split(".")
    if room != "layers":
        return [row]
    has = [below[0] not in _PARTS or below[0] in parts(kind) for kind in pattern]
    if len(pattern) == 1:
        return [row] * has[0]
    return [(name.replace("{L}", f"{{L:{place}::{len(pattern)}}}"), ".".join((room, f"layer_{place}", *below)), layout)
            for place, here in enumerate(has) if here]
