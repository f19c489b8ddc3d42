"""Where a lane may be split: sets of token ids, and what the compiled step makes of them.

Everything is data of the token and its neighbours, so the same program serves prose, code and a tokenizer of any kind.

Letters: B batch, G canvas length, V vocabulary.

Source: AsyncLane (arXiv 2606.08411), Eqs. 4-5 and Sec. 4.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from dlm_jax.decode.request import Request

NUMERIC_RULES = ("left", "both", "off")
_SETS = ("delimiters", "numeric_delimiters", "digit_end", "digit_start", "quote", "no_fork_after")
_ENDS = len(_SETS)  # the bit of tokens that end an answer
_BRACKETS = ("open", "close")


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Sets of token ids that say where a sentence or a statement ends; `delimiters` builds them from a tokenizer.

    Attributes:
      delimiters: that may end a prefix; without any, and without an interval, no lane forks.
      numeric_delimiters: of these, such as "." may stand inside a number.
      digit_end, digit_start: tokens whose text ends or begins with a digit.
      numeric_rule: "left" refuses a numeric delimiter behind a digit or a mask; "both" only where a digit or a mask
        follows as well; "off" never.
      open, close: brackets, an id listed once for each; no split while one is open.
      quote: tokens with an odd number of quotes; no split while one is open.
      no_fork_after: tokens behind which, as behind a mask, a delimiter ends no statement; empty for no such rule.
      interval: K: split after the K-th token of a lane, and nowhere else; 0 for the rules above.
    """

    delimiters: tuple[int, ...] = ()
    numeric_delimiters: tuple[int, ...] = ()
    digit_end: tuple[int, ...] = ()
    digit_start: tuple[int, ...] = ()
    numeric_rule: str = "left"
    open: tuple[int, ...] = ()
    close: tuple[int, ...] = ()
    quote: tuple[int, ...] = ()
    no_fork_after: tuple[int, ...] = ()
    interval: int = 0

    def __post_init__(self):
        if self.numeric_rule not in NUMERIC_RULES:
            raise ValueError(f"numeric_rule = {self.numeric_rule!r}: accepted are {NUMERIC_RULES}")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 0:
            raise ValueError(f"interval = {self.interval!r}: expected an int of at least 0, tokens of a lane")
        for name in (*_SETS, *_BRACKETS):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
                raise ValueError(f"{name} = {value!r}: expected token ids, such as (13, 30)")
            ids = tuple(int(i) for i in value)
            if any(i < 0 for i in ids):
                raise ValueError(f"{name} holds {min(ids)}: token ids are at least 0")
            object.__setattr__(self, name, ids)

    def __repr__(self) -> str:
        """Names what is not the default; a tokenizer's sets have thousands of ids."""
        few = lambda value: value if not isinstance(value, tuple) or len(value) <= 8 else f"<{len(value)} ids>"
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return f"Boundary({', '.join(f'{name}={few(value)}' for name, value, usual in fields if value != usual)})"

    def check(self, vocab_size: int) -> None:
        """Raises ValueError for ids that a vocabulary does not have."""
        for name in (*_SETS, *_BRACKETS):
            ids = getattr(self, name)
            if ids and max(ids) >= vocab_size:
                raise ValueError(f"boundary.{name} holds token id {max(ids)}, outside the vocabulary of {vocab_size} "
                                 "ids: build the boundary from this model's tokenizer")


@struct.dataclass
class Classes:
    """A boundary as tables over the vocabulary, arguments of the compiled program.

    Attributes:
      sets: (V,) int32, a bit for each set that a token is in, and one for tokens that end an answer.
      open, close: (V,) int32 brackets that it opens and closes.
      both: () bool, the numeric rule "both".
      incomplete: () bool, whether any token leaves a statement incomplete.
      interval: () int32.
    """

    sets: Array
    open: Array
    close: Array
    both: Array
    incomplete: Array
    interval: Array

    @property
    def forks(self) -> bool:
        """Whether any lane may ever be split; asks for the numbers themselves, outside of compiled code."""
        return bool(self.interval > 0) or bool(np.any(np.asarray(self.sets) & 1 << _SETS.index("delimiters")))

    def within(self, name: str, tokens: Array) -> Array:
        """Returns (...) bool: whether each of the (...) int32 tokens is in a set of `Boundary`."""
        return (jnp.asarray(self.sets)[tokens] >> _SETS.index(name)) & 1 == 1

    def ends(self, tokens: Array, eos_id: Array) -> Array:
        """Returns (...) bool: whether each of the (...) int32 tokens ends an answer; `eos_id` is () int32."""
        return ((jnp.asarray(self.sets)[tokens] >> _ENDS) & 1 == 1) | (tokens == eos_id)

    def ending(self, eos_id: Array) -> Array:
        """Returns (V,) bool, the tokens that end an answer."""
        return self.ends(jnp.arange(self.sets.shape[0]), eos_id)


def classes(boundary: Boundary, vocab_size: int, ends: Sequence[int] = ()) -> Classes:
    """Returns the tables of a boundary.

    Args:
      boundary: the sets.
      vocab_size: V.
      ends: tokens that end an answer besides the request's EOS.
    """
    sets = np.zeros(vocab_size, np.int32)
    members = {name: getattr(boundary, name) for name in _SETS}
    if boundary.numeric_rule == "off":
        members["numeric_delimiters"] = ()
    for bit, ids in enumerate((*members.values(), ends)):
        sets[np.unique(np.asarray(ids, np.int64))] |= 1 << bit
    brackets = (np.bincount(np.asarray(getattr(boundary, name), np.int64), minlength=vocab_size).astype(np.int32)
                for name in _BRACKETS)
    return Classes(sets, *brackets, np.bool_(boundary.numeric_rule == "both"),
                   np.bool_(len(boundary.no_fork_after) > 0), np.int32(boundary.interval))


def valid(table: Classes, request: Request, tokens: Array, filled: Array) -> Array:
    """Returns (B, G) bool: the tokens that are delimiters and close what comes before them.

    Args:
      table: of the boundary.
      request: the batch.
      tokens: (B, G) int32.
      filled: (B, G) bool tokens that are written; the others are masks.
    """
    G = request.capacity
    index = jnp.arange(G, dtype=jnp.int32)
    tokens = jnp.where(filled, tokens, 0)
    prompted = request.prompt_length[:, None] > 0
    last = jnp.take_along_axis(request.prompt, jnp.maximum(request.prompt_length - 1, 0)[:, None], axis=1)
    before, known = jnp.concatenate([last, tokens[:, :-1]], axis=1), jnp.concatenate(
        [jnp.ones_like(prompted), filled[:, :-1]], axis=1)
    there = (index > 0) | prompted  # whether a token stands before it
    is_in = lambda name, tokens: table.within(name, tokens)

    left = there & (~known | is_in("digit_end", before))
    after = index + 1 < request.max_new_tokens[:, None]
    right = after & jnp.roll(~filled | is_in("digit_start", tokens), -1, axis=1)
    number = is_in("numeric_delimiters", tokens) & left & (right | ~table.both)
    incomplete = table.incomplete & there & (~known | is_in("no_fork_after", before))

    opens, closes = (jnp.where(filled, jnp.asarray(x)[tokens], 0) for x in (table.open, table.close))
    # depth = max(0, depth - closes) + opens, token by token
    balance = jnp.cumsum(opens - closes, axis=1)
    depth = balance + jnp.maximum(jax.lax.cummax(opens - balance, axis=1), 0)
    quoted = jnp.cumsum(filled & is_in("quote", tokens), axis=1) % 2 == 1
    return filled & is_in("delimiters", tokens) & ~number & ~incomplete & (depth <= 0) & ~quoted


def split(table: Classes, candidates: Array, filled: Array, ends: Array, start: Array, length: Array) -> Array:
    """Returns (B,) int32 tokens of the prefix that a lane may hand over, its delimiter included (Eq. 4); 0 for none.

    Args:
      table: of the boundary.
      candidates: (B, G) bool, see `valid`.
      filled: (B, G) bool tokens that are written.
      ends: (B, G) bool tokens that end an answer; what follows the lane's first does not count.
      start, length: (B,) int32 of the lane.
    """
    index = jnp.arange(filled.shape[1], dtype=jnp.int32)
    place = index - start[:, None] + 1
    inside = (place >= 1) & (place <= length[:, None])
    goes_on = inside & (jnp.cumsum(ends & inside, axis=1) == 0)
    ruled = jnp.max(jnp.where(candidates & goes_on, place, 0), axis=1)
    fixed = jnp.max(jnp.where(filled & goes_on & (place == table.interval), place, 0), axis=1)
    return jnp.where(table.interval > 0, fixed, ruled)
