"""An explicit map between the vocabularies of two tokenizers, so that a model may be guided by one of another family.

Two tokens are the same where they stand for the same bytes, or are special tokens of the same name; special tokens
without a namesake are paired by role (end of sequence with end of sequence, …). Everything else is `UNMAPPED`.

The map is one of ids, token by token. Where two tokenizers cut the same text differently ("1234" as one token or as
four), no map of ids makes one sequence out of the other: such tokens are unmapped, or mapped in a context that the
other tokenizer would never produce. `coverage` of a typical text tells how much that matters.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

UNMAPPED = -1
# in order of precedence: where one token has two roles, it ends an answer
ROLES = ("eos", "bos", "pad", "unk", "mask", "sep", "cls")
FORMAT = "dlm_jax.vocabulary_map"


@dataclasses.dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Ids of two vocabularies that stand for the same token.

    Attributes:
      to_guide: (draft vocabulary,) int32 guide id of each draft id, `UNMAPPED` for none.
      to_draft: (guide vocabulary,) int32 draft id of each guide id, `UNMAPPED` for none. Not always the inverse:
        by role, several ids may map to one.
      placeholder: guide id that is fed in place of an unmapped draft id.
      draft_tokens: draft ids that stand for a token; the rest pads the vocabulary.
      guide_tokens: likewise.
    """

    to_guide: np.ndarray
    to_draft: np.ndarray
    placeholder: int
    draft_tokens: int
    guide_tokens: int

    def __post_init__(self):
        for name, ids, size in (("to_guide", self.to_guide, self.guide_size), ("to_draft", self.to_draft,
                                                                              self.draft_size)):
            if ids.ndim != 1 or ids.dtype != np.int32 or not ids.size:
                raise ValueError(f"vocabulary map: {name} is {ids.dtype} of shape {ids.shape}, "
                                 "expected a list of int32")
            if ids.min() < UNMAPPED or ids.max() >= size:
                raise ValueError(f"vocabulary map: {name} holds id {max(ids.max(), -ids.min())}, the other vocabulary "
                                 f"has {size} ids: was it made for these models?")
        if not 0 <= self.placeholder < self.guide_size:
            raise ValueError(f"vocabulary map: placeholder = {self.placeholder} is none of {self.guide_size} guide ids")

    @property
    def draft_size(self) -> int:
        """Ids of the draft vocabulary, padding included."""
        return len(self.to_guide)

    @property
    def guide_size(self) -> int:
        """Ids of the guide's vocabulary, padding included."""
        return len(self.to_draft)

    @property
    def feed(self) -> np.ndarray:
        """(draft vocabulary,) int32: the guide id that is fed for each draft id, the placeholder where unmapped."""
        return np.where(self.to_guide == UNMAPPED, self.placeholder, self.to_guide).astype(np.int32)

    def coverage(self, tokens: Sequence[int] | None = None) -> float:
        """Returns the share of draft tokens that the guide knows.

        Args:
          tokens: draft ids of a text, which weight the share by how often each occurs; None counts every id once.

        Raises:
          ValueError: ids outside the draft vocabulary.
        """
        if tokens is None:
            return float((self.to_guide != UNMAPPED).sum() / self.draft_tokens)
        ids = np.asarray(tokens)
        if not ids.size or ids.min() < 0 or ids.max() >= self.draft_size:
            raise ValueError(f"tokens: expected at least one id, each in [0, {self.draft_size})")
        return float((self.to_guide[ids] != UNMAPPED).mean())


def identity(size: int, guide_size: int | None = None) -> VocabularyMap:
    """Returns the map of a vocabulary that both models share; padding at the end may differ.

    Args:
      size: ids of the draft vocabulary.
      guide_size: ids of the guide's; None for the same.
    """
    guide_size = size if guide_size is None else guide_size
    if min(size, guide_size) < 1:
        raise ValueError(f"vocabularies of {size} and {guide_size} ids: at least 1")
    up_to = lambda n, most: np.where(np.arange(n) < most, np.arange(n), UNMAPPED).astype(np.int32)
    return VocabularyMap(up_to(size, guide_size), up_to(guide_size, size), 0, size, guide_size)


def build(
    draft_tokenizer: Any,
    guide_tokenizer: Any,
    *,
    draft_size: int | None = None,
    guide_size: int | None = None,
    also: Mapping[str, str] | None = None,
) -> VocabularyMap:
    """Builds the map between two tokenizers.

    Args:
      draft_tokenizer, guide_tokenizer: as `data.tokenizer.load` returns them.
      draft_size, guide_size: vocabulary sizes of the models, where embeddings are padded; None takes the tokenizers'.
      also: further pairs of tokens by their exact strings, draft to guide (for instance a chat template's markers);
        they come before every other rule.

    Returns:
      The map; the identity where the two vocabularies are the same.

    Raises:
      ValueError: a model's vocabulary is smaller than its tokenizer's, or `also` names a token that does not exist.
    """
    draft, guide = keys(draft_tokenizer), keys(guide_tokenizer)
    size = lambda ids, given, whose: _size(max(ids) + 1, given, whose)
    to_guide = np.full(size(draft, draft_size, "draft"), UNMAPPED, np.int32)
    to_draft = np.full(size(guide, guide_size, "guide"), UNMAPPED, np.int32)
    if draft == guide:
        ids = np.array(sorted(draft), np.int32)
        to_guide[ids] = to_draft[ids] = ids
    else:
        _join(to_guide, draft, guide)
        _join(to_draft, guide, draft)
    by_role = [(_role(draft_tokenizer, role), _role(guide_tokenizer, role)) for role in ROLES]
    for a, b in by_role:
        if a is not None and b is not None:
            to_guide[a] = b if to_guide[a] == UNMAPPED else to_guide[a]
            to_draft[b] = a if to_draft[b] == UNMAPPED else to_draft[b]
    for name, other in (also or {}).items():
        a, b = _named(draft_tokenizer, name, "draft"), _named(guide_tokenizer, other, "guide")
        to_guide[a], to_draft[b] = b, a
    spare = [_role(guide_tokenizer, role) for role in ("unk", "pad", "eos")]
    placeholder = next((id for id in spare if id is not None), 0)
    return VocabularyMap(to_guide, to_draft, placeholder, len(draft), len(guide))


def keys(tokenizer: Any) -> dict[int, Hashable]:
    """Returns what each id stands for: the bytes of an ordinary token, the name of a special one.

    Args:
      tokenizer: a Hugging Face tokenizer; byte-level and sentencepiece spellings are undone.
    """
    added = tokenizer.added_tokens_decoder
    decode = _spelling(tokenizer)
    found: dict[int, Hashable] = {}
    for text, id in tokenizer.get_vocab().items():
        if id in added:
            found[id] = ("special", text) if added[id].special else text.encode()
        else:
            found[id] = decode(text)
    return found


def save(mapping: VocabularyMap, file: str | os.PathLike[str]) -> None:
    """Writes a map as one safetensors file, its numbers as JSON in the header.

    Args:
      mapping: the map.
      file: its path, usually ending in .safetensors.
    """
    facts = {name: int(getattr(mapping, name)) for name in ("placeholder", "draft_tokens", "guide_tokens")}
    save_file({"to_guide": mapping.to_guide, "to_draft": mapping.to_draft}, str(file),
              metadata={"format": FORMAT, "facts": json.dumps(facts)})


def load(file: str | os.PathLike[str]) -> VocabularyMap:
    """Reads what `save` wrote.

    Args:
      file: its path.

    Raises:
      ValueError: no such file, or no vocabulary map.
    """
    if not Path(file).is_file():
        raise ValueError(f"vocabulary map {file}: no such file; make one with data.vocabulary_map.build and save")
    try:
        with safe_open(str(file), "numpy") as tensors:
            metadata = tensors.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"vocabulary map {file}: the file holds something else")
            arrays = {name: tensors.get_tensor(name) for name in ("to_guide", "to_draft")}
            return VocabularyMap(**arrays, **json.loads(metadata["facts"]))
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"vocabulary map {file}: damaged ({error}); build it again") from None


def _size(tokens: int, given: int | None, whose: str) -> int:
    if given is not None and given < tokens:
        raise ValueError(f"{whose}_size = {given}: the {whose} tokenizer has ids up to {tokens - 1}; give the model's "
                         "vocab_size, or the tokenizer that belongs to the model")
    return tokens if given is None else given


def _join(into: np.ndarray, here: dict[int, Hashable], there: dict[int, Hashable]) -> None:
    """Sets, for every id of `here`, the lowest id of `there` with the same key."""
    index = {key: id for id, key in sorted(there.items(), reverse=True)}
    for id, key in here.items():
        into[id] = index.get(key, UNMAPPED)


def _role(tokenizer: Any, role: str) -> int | None:
    return getattr(tokenizer, f"{role}_token_id", None)


def _named(tokenizer: Any, text: str, whose: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if text not in vocabulary:
        raise ValueError(f"also: the {whose} tokenizer has no token {text!r}")
    return vocabulary[text]


def _spelling(tokenizer: Any):
    """Returns the function that turns a token as the vocabulary spells it into bytes."""
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if getattr(tokenizer, "is_fast", False) else {}
    steps = json.dumps([state.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"ByteLevel"' in steps:
        alphabet = _byte_alphabet()
        return lambda text: bytes(alphabet[c] for c in text) if all(c in alphabet for c in text) else text.encode()
    if "▁" not in steps:
        return str.encode

    def plain(text: str) -> bytes:
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("▁", " ").encode()

    return plain


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level spelling: printable Latin-1 is itself, the rest follows from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in itself]
    table = {chr(b): b for b in itself} | {chr(256 + i): b for i, b in enumerate(rest)}
    assert table.keys() == set(ByteLevel.alphabet())
    return table
