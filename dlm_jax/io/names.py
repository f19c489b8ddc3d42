"""What the rows of `io.families` mean for a model: its parameters, and the tensors that each is stacked from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dlm_jax.io import tensor_files
from dlm_jax.io.families import EXPERTS, HEAD, HEADS, LAYOUT_MARKS, PIECES, TABLES, Row
from dlm_jax.models.config import TransformerConfig, parts

_PARTS = ("attention", "gated_delta", "mlp", "moe")  # what some layers have and others may not

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
    """Where a piece of a tensor lies along an axis, which is `repeats` times `rows` long.

    Attributes:
      repeats: how often the pieces alternate.
      rows: of all pieces in a repeat.
      start, stop: of this one.
      apart: whether the repeats are an axis of their own, before that of the pieces.
    """

    repeats: int
    rows: int
    start: int
    stop: int
    apart: bool = False

    def _parts(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.repeats, self.rows, *tensor.shape[1 + self.apart:])[:, self.start: self.stop]

    def shape(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, from that which it would have if the piece were all of it."""
        return (self.repeats, self.rows, *groups[2:]) if self.apart else (self.repeats * self.rows, *groups[1:])

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the piece of a tensor of the whole shape; a view where the pieces do not alternate along one axis."""
        parts = self._parts(tensor)
        return parts if self.apart else parts.reshape(-1, *tensor.shape[1:])

    def put(self, tensor: np.ndarray, piece: np.ndarray) -> None:
        """Writes the piece into a tensor of the whole shape."""
        parts = self._parts(tensor)
        parts[...] = piece.reshape(parts.shape)


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
        groups = tuple(math.prod(size for _, size in group) for group in self.stored)
        return groups if self.piece is None else self.piece.shape(groups)

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
        """Returns a tensor of `stored_shape`, or its piece, as one of `part_shape`; a view wherever one can be made."""
        tensor = tensor if self.piece is None else self.piece.cut(tensor)
        flat = [(letter, size) for letter, size in itertools.chain(*self.stored) if letter != "1"]
        order = [letter for letter, _ in flat]
        return tensor.reshape([size for _, size in flat]).transpose([order.index(letter) for letter in self.axes])

    def to_stored(self, part: np.ndarray) -> np.ndarray:
        """Returns a part, of `part_shape`, as it is stored, whole tensor or piece, C-contiguous."""
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
    piece = None if held is None else _piece(name, held, sizes, left.split()[0])
    return Parameter(tuple(path.split(".")), names, lead, stored, tuple(right.split()), piece)


def _piece(name: str, held: str, sizes: Mapping[str, int], first: str) -> Piece:
    repeats, pieces = next(value for end, value in PIECES.items() if name.endswith("." + end))
    product = lambda letters: math.prod(sizes[letter] for letter in letters.split())
    lengths = {of: product(letters) for of, letters in pieces.items()}
    start = sum(length for of, length in itertools.takewhile(lambda item: item[0] != held, lengths.items()))
    return Piece(product(repeats), sum(lengths.values()), start, start + lengths[held], first == repeats)


def head_row(config: TransformerConfig) -> Row:
    """Returns the row of the head, which a checkpoint lacks where the head is the embedding."""
    return HEADS.get(config.family, HEAD), "lm_head", "V D -> V D"


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
    rows += EXPERTS[config.moe.layout] if config.moe is not None else ()
    lacking = {name for name, has in _optional(config).items() if not has}
    return [parameter(placed, letters(config)) for row in rows for placed in _placed(row, config.pattern)
            if row[1].rpartition(".")[2] not in lacking]


def _optional(config: TransformerConfig) -> dict[str, bool]:
    """Returns the names of parameters that some models of a family lack, and whether this one has them."""
    moe = config.moe
    return {
        **dict.fromkeys(("q_norm", "k_norm"), config.qk_norm), "o_bias": config.o_bias,
        **dict.fromkeys(("q_bias", "k_bias", "v_bias"), config.qkv_bias),
        **dict.fromkeys(("shared_gate_proj", "shared_up_proj", "shared_down_proj"), moe and moe.shared_width > 0),
        "shared_gate": moe and moe.shared_gate, "expert_bias": moe and moe.bias is not None}


def fitting(stored: Iterable[str]) -> list[str]:
    """Returns the families whose tables have all of a checkpoint's tensors.

    Args:
      stored: tensor names.
    """
    stored = [name for name in map(plain, stored) if not IGNORED.search(name)]
    found = []
    for family, rows in TABLES.items():
        experts = itertools.chain(*EXPERTS.values()) if any(".moe." in path for _, path, _ in rows) else ()
        told = {name for name, _, _ in (*rows, *experts)} | {HEADS.get(family, HEAD)}
        known = re.compile("|".join(
            re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(re.sub(r"\[\w+\]$", "", name))) for name in sorted(told)))
        if all(map(known.fullmatch, stored)) and rows[0][0] in stored:
            found.append(family)
    return found


def as_stored(config: TransformerConfig, stored: Iterable[str]) -> TransformerConfig:
    """Returns a configuration with the layout of experts that a checkpoint has.

    Args:
      config: of the model.
      stored: the checkpoint's tensor names.

    Raises:
      ValueError: experts in several layouts.
    """
    if config.moe is None:
        return config
    found = {layout: name for name in stored for layout, like in LAYOUT_MARKS.items() if re.search(like, name)}
    if len(found) > 1:
        raise ValueError(f"experts are stored in several layouts: {', '.join(found.values())}; the checkpoint is half "
                         "converted: store those of every layer the same way")
    return config.replace(moe=dataclasses.replace(config.moe, layout=next(iter(found), config.moe.layout)))


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
