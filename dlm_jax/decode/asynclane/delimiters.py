"""Boundaries built from any tokenizer, whose ids are sorted by the text that each stands for.

A token is a delimiter where a lane may be split right behind it, so nothing but blanks and closing marks follows the
period or line end that it holds; `.com` and a line end with the next word are none.

- Prose: it ends in a mark, or in one with quotes or brackets closed behind it, and then blanks. A "." or "," may
  belong to a number, and then ends nothing, where a digit stands right before it and nothing of its token behind it:
  the digit in the token itself (`3.`), or in the one before (`3`, `.`).
- Code: it ends in a line end, perhaps with the next line's blanks, whose line does not break off: in the token itself
  (`,` with a line end) or in the one before; behind blanks alone nobody knows. Brackets of one token that match cancel.
  Of quotes count `"`, not those behind a backslash, and ''', which alone of the single ones can span lines; others
  are apostrophes, too.

A mark that is spelled as several tokens, a full stop as three bytes or ''' as three quotes, is not seen.

Source: AsyncLane (arXiv 2606.08411), Sec. 4.1, Table 6.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dlm_jax.decode.asynclane.boundary import Boundary

PERIODS, PUNCTUATION = ".。", ",;:!?，；：！？、"
_NUMERIC, _CLOSING = ".,", re.escape("\"'”’»›」』》〉)]}）】］｝")
_OPEN, _CLOSE = "([{", ")]}"
_QUOTES = re.compile(r"(?<!\\)\"|'''")
_BLANK = re.compile(r"[^\S\n]+\Z")
_UNFINISHED = re.compile(r"([,\\=+\-*/%]|(^|\W)(and|or|not|in))\s*$")


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
        delimiters=_some("code", "a line end", which(_ends_line)), numeric_rule="off", open=tuple(open_),
        close=tuple(close), quote=which(lambda text: len(_QUOTES.findall(text)) % 2 == 1),
        no_fork_after=which(lambda text: _UNFINISHED.search(text) or _BLANK.match(text)))


def interval_boundary(tokens: int) -> Boundary:
    """Returns the boundary behind every so many tokens of a lane (Table 6: 16), whatever they are."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens = {tokens!r}: expected an int of at least 1")
    return Boundary(interval=tokens)


BOUNDARIES: dict[str, Callable[[Any], Boundary]] = {
    "math": math_boundary, "punctuation": punctuation_boundary, "code": code_boundary}


def _prose(rule: str, tokenizer: Any, marks: str) -> Boundary:
    texts = _texts(tokenizer)
    which = lambda test: tuple(i for i, text in texts.items() if test(text))
    ends = re.compile(rf"[{re.escape(marks)}][{_CLOSING}]*\s*$")
    number = re.compile(rf"\d[{_NUMERIC}]\Z")
    delimiters = which(lambda text: ends.search(text) and not number.search(text))
    return Boundary(
        delimiters=_some(rule, f"text that ends in one of {marks}", delimiters),
        numeric_delimiters=tuple(i for i in delimiters if texts[i].lstrip() in tuple(_NUMERIC)),
        digit_end=which(lambda text: text[-1:].isdecimal()), digit_start=which(lambda text: text[:1].isdecimal()))


def _ends_line(text: str) -> bool:
    """Whether a text ends in a line end and the blanks of the next line, and its own line does not break off."""
    line, newline, indent = text.rpartition("\n")
    return bool(newline) and not indent.strip() and not _UNFINISHED.search(line)


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
