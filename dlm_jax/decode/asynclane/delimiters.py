"""Boundaries built from any tokenizer, whose ids are sorted by the text that each stands for.

Source: AsyncLane (arXiv 2606.08411), Sec. 4.1, Table 6.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dlm_jax.decode.asynclane.boundary import Boundary

PERIODS, PUNCTUATION = ".。", ",;:!?，；：！？、"
_OPEN, _CLOSE, _NO_END = "([{", ")]}", (",", "\\", "=", "+", "-", "*", "/", "%")
_WORDS = ("and", "or", "not", "in")


def math_boundary(tokenizer: Any) -> Boundary:
    """Returns the boundary of mathematical text: periods, Chinese ones included, but none inside a number.

    Args:
      tokenizer: with `decode`, `__len__` and `all_special_ids`, as those of `transformers`.

    Raises:
      ValueError: a tokenizer without any such token.
    """
    return _prose("math", tokenizer, PERIODS)


def punctuation_boundary(tokenizer: Any) -> Boundary:
    """Returns `math_boundary` with commas and other punctuation (Table 6); arguments as there."""
    return _prose("punctuation", tokenizer, PERIODS + PUNCTUATION)


def code_boundary(tokenizer: Any) -> Boundary:
    """Returns the boundary of code: line ends outside brackets and strings, behind complete statements; as there."""
    texts = _texts(tokenizer)
    which = lambda test: tuple(i for i, text in texts.items() if test(text))
    open_, close = [], []
    for i, text in texts.items():
        left, right = _unmatched(text)
        open_ += [i] * left
        close += [i] * right
    return Boundary(
        delimiters=_some("code", "a line end", which(lambda text: "\n" in text)), numeric_rule="off",
        open=tuple(open_), close=tuple(close), quote=which(lambda text: text.count('"') % 2 == 1),
        no_fork_after=which(lambda text: text.rstrip(" \t").endswith(_NO_END) or text.strip() in _WORDS))


def interval_boundary(tokens: int) -> Boundary:
    """Returns the boundary behind every so many tokens of a lane (Table 6: 16), whatever they are."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens = {tokens!r}: expected an int of at least 1")
    return Boundary(interval=tokens)


BOUNDARIES: dict[str, Callable[[Any], Boundary]] = {
    "math": math_boundary, "punctuation": punctuation_boundary, "code": code_boundary}


def _prose(rule: str, tokenizer: Any, ends: str) -> Boundary:
    texts = _texts(tokenizer)
    which = lambda test: tuple(i for i, text in texts.items() if test(text))
    inside = re.compile(r"\d.*\.\s*$", re.DOTALL)  # a number that is a token with its point
    last = lambda text: text.rstrip()[-1:]
    delimiter = lambda text: last(text) in ends if last(text) and not inside.search(text) else False
    return Boundary(
        delimiters=_some(rule, f"text that ends in one of {ends}", which(delimiter)),
        numeric_delimiters=which(lambda text: delimiter(text) and last(text) in ".,"),
        digit_end=which(lambda text: text[-1:].isdigit()), digit_start=which(lambda text: text[:1].isdigit()))


def _some(rule: str, what: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    if not ids:
        raise ValueError(f"the {rule} boundary splits behind tokens with {what}, and this tokenizer has none: take "
                         "another rule, interval_boundary(16) for instance, or a Boundary of your own ids")
    return ids


def _texts(tokenizer: Any) -> dict[int, str]:
    """Returns the text of every id that is not special."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    return {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special}


def _unmatched(text: str) -> tuple[int, int]:
    """Returns how many brackets a text leaves open, and how many it closes that were open before."""
    open_ = close = 0
    for letter in text:
        if letter in _OPEN:
            open_ += 1
        elif letter in _CLOSE and open_:
            open_ -= 1
        elif letter in _CLOSE:
            close += 1
    return open_, close
