"""Where every tensor of a Hugging Face checkpoint lives in the parameter tree: one table a family.

A row is (checkpoint name, parameter path, layout). The layout reads "stored axes -> parameter axes"; brackets
mark axes that are one axis in the file: a torch Linear from D to N heads of H is "(N H) D -> D N H". A letter in
braces in the name, as {L}, runs over all its values, and the tensors are stacked on a leading axis of that size;
{L:3::4} runs over every fourth from 3 on, as layers do that come once in a period of four.

Letters: V vocabulary, D width, F MLP width, N query heads, K KV heads, H head dim, L layers.
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
from dlm_jax.models.config import TransformerConfig

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
    "orthrus": _with_diffusion_view(_QWEN3), "orthrus-qwen2": _with_diffusion_view(_QWEN2),
    "llada": _LLADA, "Dream": _QWEN2, "a2d-qwen3": _QWEN3, "a2d-qwen2": _QWEN2}
_HEADS = {"llada": "model.transformer.ff_out.weight"}

# buffers that old exporters wrote beside the weights; they follow from the config
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")


def letters(config: TransformerConfig) -> dict[str, int]:
    """Returns the size of every letter the tables use."""
    return {"V": config.vocab_size, "D": config.hidden_size, "F": config.intermediate_size,
            "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim, "L": config.num_layers}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter and the checkpoint tensors it is stacked from.

    Attributes:
      path: keys from the root of the tree.
      names: checkpoint names, in C order of the leading axes.
      lead: sizes of the leading (stacked) axes; empty for a single tensor.
      stored: axes of a stored tensor, each a group of (letter, size).
      axes: letters of the parameter behind the leading axes.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    lead: tuple[int, ...]
    stored: tuple[tuple[tuple[str, int], ...], ...]
    axes: tuple[str, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each checkpoint tensor."""
        return tuple(math.prod(size for _, size in group) for group in self.stored)

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
        """Returns a stored tensor as a view in the parameter's layout."""
        flat = list(itertools.chain(*self.stored))
        order = [letter for letter, _ in flat]
        return tensor.reshape([size for _, size in flat]).transpose([order.index(letter) for letter in self.axes])

    def to_stored(self, part: np.ndarray) -> np.ndarray:
        """Returns one part of the parameter in the stored layout, C-contiguous."""
        order = [letter for letter, _ in itertools.chain(*self.stored)]
        turned = part.transpose([self.axes.index(letter) for letter in order])
        return tensor_files.contiguous(turned).reshape(self.stored_shape)


def parameter(row: Row, sizes: Mapping[str, int]) -> Parameter:
    """Resolves a row of a table.

    Args:
      row: checkpoint name, dotted parameter path, layout.
      sizes: size of every letter.

    Returns:
      The parameter with names and sizes filled in.
    """
    name, path, layout = row
    left, right = layout.split("->")
    stored = tuple(tuple((letter, sizes[letter]) for letter in group.strip("()").split())
                   for group in re.findall(r"\([^)]*\)|\S+", left))
    stacked = [range(int(start or 0), sizes[letter], int(step or 1))
               for letter, start, step in re.findall(r"\{(\w+)(?::(\d+)::(\d+))?\}", name)]
    lead, blank = tuple(map(len, stacked)), re.sub(r"\{[^}]*\}", "{}", name)
    names = tuple(blank.format(*index) for index in itertools.product(*stacked))
    return Parameter(tuple(path.split(".")), names, lead, stored, tuple(right.split()))


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
    return [parameter(row, letters(config)) for row in rows]
