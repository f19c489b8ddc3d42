"""Readers of conversation rows; every complaint names the file and the line."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROLES = ("system", "user", "assistant")
_ACCEPTED = 'expected {"messages": [...]}, {"query", "response"} or {"question", "answer"}'
_PAIRS = (("query", "response"), ("question", "answer"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One supervised conversation.

    Attributes:
      prompt_messages: {"role", "content"} each, up to the last answer.
      response: the last answer's text.
      answer: the final result after `####` in the response, None where there is none.
    """

    prompt_messages: list[dict[str, str]]
    response: str
    answer: str | None = None


def final_answer(text: str) -> str | None:
    """Returns what follows the last `####` of a text, without spaces around it and commas; None where there is none.

    Args:
      text: an answer, as GSM8K writes them.
    """
    _, found, tail = text.rpartition("####")
    lines = tail.strip().splitlines()
    return lines[0].strip().replace(",", "") if found and lines else None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, expected text")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    return value


def parse_row(raw: Any) -> Row:
    """Turns one parsed JSON object into a `Row`.

    Args:
      raw: {"messages": [{"role", "content"}...]} ending in the assistant's answer, {"query", "response"}, or
        {"question", "answer"}. Other keys are ignored.

    Raises:
      ValueError: what is wrong with it and what is accepted.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"a row is {type(raw).__name__}, {_ACCEPTED}")
    for query, response in _PAIRS:
        if query in raw and response in raw:
            text = _text(raw[response], f'"{response}"')
            return Row([{"role": "user", "content": _text(raw[query], f'"{query}"')}], text, final_answer(text))
    messages = raw.get("messages")
    if not isinstance(messages, list):
        raise ValueError(f"a row has the keys {sorted(map(str, raw))}, {_ACCEPTED}")
    if len(messages) < 2:
        raise ValueError(f'"messages" holds {len(messages)} messages, expected a question and its answer at least')
    kept = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise ValueError(f"message {number} has the role {role!r}, expected one of {list(_ROLES)}")
        kept.append({"role": role, "content": _text(message.get("content"), f'"content" of message {number}')})
    if kept[-1]["role"] != "assistant":
        raise ValueError(f"the last message is the {kept[-1]['role']}'s, expected the assistant's answer")
    return Row(kept[:-1], kept[-1]["content"], final_answer(kept[-1]["content"]))


def _objects(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yields (line number, object); one JSON list, or one object a line."""
    if text.lstrip().startswith("["):
        try:
            whole = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg}); fix or remove the line") from None
        # a list does not tell the lines of its items: the decoder is walked over them once more for that
        decoder, at = json.JSONDecoder(), text.index("[") + 1
        for item in whole:
            while text[at] in " \t\r\n,":
                at += 1
            yield text.count("\n", 0, at) + 1, item
            at = decoder.raw_decode(text, at)[1]
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg}); fix or remove the line") from None


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Reads every row of a JSONL file or of a .json file with one list; blank lines are skipped.

    Args:
      path: the file, UTF-8.

    Returns:
      The rows in file order.

    Raises:
      ValueError: no such file, no rows in it, or a bad row (with its line number).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a JSONL or JSON file of rows")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8; convert the file, e.g. with iconv") from None
    rows = []
    for number, raw in _objects(path, text):
        try:
            rows.append(parse_row(raw))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not rows:
        raise ValueError(f"{path}:1: the file holds no rows; {_ACCEPTED}, one a line")
    return rows
