"""Readers of conversation rows; every complaint names the file and the line.

JSON is parsed here: `datasets` would infer types, which makes dates of texts that look like one, and forget the lines.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dlm_jax.data import tables

MAPPED = 1 << 28  # bytes; a longer JSONL file stays on disk
_AT_ONCE = 1 << 12  # rows of a table that are Python objects at one time
Parsed = TypeVar("Parsed")

_ROLES = ("system", "user", "assistant")
_ACCEPTED = 'expected {"messages": [...]}, {"query", "response"} or {"question", "answer"}'
_PAIRS = (("query", "response"), ("question", "answer"))
_QUESTIONS = ("prompt", "question", "query")


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
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no character") from None
    return value


def _messages(values: list[Any]) -> list[dict[str, str]]:
    kept = []
    for number, message in enumerate(values):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise ValueError(f"message {number} has the role {role!r}, expected one of {list(_ROLES)}")
        kept.append({"role": role, "content": _text(message.get("content"), f'"content" of message {number}')})
    return kept


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
    kept = _messages(messages)
    if kept[-1]["role"] != "assistant":
        raise ValueError(f"the last message is the {kept[-1]['role']}'s, expected the assistant's answer")
    return Row(kept[:-1], kept[-1]["content"], final_answer(kept[-1]["content"]))


def parse_prompt(raw: Any) -> list[dict[str, str]]:
    """Turns one parsed JSON object into the messages of a prompt.

    Args:
      raw: {"prompt"}, {"question"}, {"query"} or {"messages": [...]}; an answer that comes with it is left out.

    Raises:
      ValueError: what is wrong with it and what is accepted.
    """
    accepted = f'expected a JSON object with "messages" or one of {list(_QUESTIONS)}'
    if not isinstance(raw, dict):
        raise ValueError(f"a row is {type(raw).__name__}, {accepted}")
    for name in _QUESTIONS:
        if name in raw:
            return user_prompt(raw[name], f'"{name}"')
    if not isinstance(raw.get("messages"), list):
        raise ValueError(f"a row has the keys {sorted(map(str, raw))}, {accepted}")
    messages = _messages(raw["messages"])
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError('"messages" asks nothing: the last message before the answer is to be the user\'s')
    return messages


def user_prompt(text: Any, name: str) -> list[dict[str, str]]:
    """Returns a text as the messages of a prompt.

    Args:
      text: what the user says.
      name: of it, in complaints.

    Raises:
      ValueError: no text, or an empty one.
    """
    return [{"role": "user", "content": _text(text, name)}]


def decode_text(raw: bytes, name: str | os.PathLike[str]) -> str:
    r"""Returns the text of a file, without a byte order mark and with "\n" between its lines.

    Args:
      raw: what the file holds, UTF-8.
      name: of the file, in complaints.

    Raises:
      ValueError: it is not UTF-8 (with the line number).
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"{name}:{line}: not UTF-8; convert the file, e.g. with iconv") from None


def parse_file(raw: bytes, name: str | os.PathLike[str], parse: Callable[[Any], Parsed]) -> list[Parsed]:
    """Parses every object of a JSONL file or of a .json file with one list; blank lines are skipped.

    Args:
      raw: what the file holds, UTF-8.
      name: of the file, in complaints.
      parse: turns one object into a value, or raises ValueError.

    Raises:
      ValueError: a line that is not JSON, or that `parse` refuses (with its line number).
    """
    found = []
    for number, value in _objects(name, decode_text(raw, name)):
        try:
            found.append(parse(value))
        except ValueError as error:
            raise ValueError(f"{name}:{number}: {error}") from None
    return found


def _objects(path: str | os.PathLike[str], text: str) -> Iterator[tuple[int, Any]]:
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
                yield number, _parsed(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}); fix or remove the line") from None


class Rows(Sequence[Row]):
    """The rows of a table, parsed whenever they are asked for; what they hold stays on disk."""

    def __init__(self, table: Any, parse: Callable[[dict[str, Any]], Row | None], place: Callable[[int], str]):
        """Parses every row once, and forgets them.

        Args:
          table: a `datasets.Dataset`.
          parse: turns a row's columns into a `Row`, or into None to leave it out.
          place: where a row of the table is, by its number from 0, in complaints.

        Raises:
          ValueError: a row that `parse` refuses (with its place).
        """
        self._table, self._parse, self._place, self._kept = table, parse, place, range(len(table))
        kept = array.array("q")
        for start in range(0, len(table), _AT_ONCE):
            part = range(start, min(start + _AT_ONCE, len(table)))
            kept.extend(number for number, row in zip(part, self[part.start:part.stop]) if row is not None)
        self._kept = kept if len(kept) < len(table) else range(len(table))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index):
        if not isinstance(index, slice):
            return self[index:][0] if index == -1 else self[index:index + 1][0]
        found, numbers = [], self._kept[index]
        for number, record in zip(numbers, tables.records(self._table, numbers) if len(numbers) else ()):
            try:
                found.append(self._parse(record))
            except ValueError as error:
                raise ValueError(f"{self._place(number)}: {error}") from None
        return found

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start:start + _AT_ONCE]


def read_rows(source: str | os.PathLike[str]) -> Sequence[Row]:
    """Reads every row of a file, a directory or a dataset of the hub.

    Args:
      source: a JSONL file, a .json file with one list, a .parquet, .arrow or .csv file, a directory that `datasets`
        saved or reads, or a hub id: "owner/name", "owner/name:split" or "owner/name:config:split".

    Returns:
      The rows in order; those of all but JSON and short JSONL files stay on disk until they are asked for.

    Raises:
      ValueError: nothing there, no rows in it, or a bad row (with its line where the format has lines).
    """
    text = os.fspath(source)
    path = Path(text).expanduser()
    kinds = (".json", *tables.KINDS)
    if path.is_file():
        rows = _rows_of_file(path)
    elif path.is_dir():
        rows = _rows_of_table(tables.open_folder(path), lambda number: f"{text}: row {number + 1}")
    elif tables.hub_id(text) and path.suffix not in kinds:
        rows = _rows_of_table(tables.open_hub(text), lambda number: f"{text}: row {number + 1}")
    else:
        raise ValueError(f"{text}: no such file; give one of rows ({', '.join(kinds)}), a directory, or a hub id such "
                         "as owner/name:split")
    if not rows:
        raise ValueError(f"{text}:1: the file holds no rows; {_ACCEPTED}, one a line")
    return rows


def _rows_of_file(path: Path) -> Sequence[Row]:
    if path.suffix == ".jsonl" and path.stat().st_size > MAPPED:
        line = lambda record: parse_row(_parsed(record["text"])) if record["text"].strip() else None
        return Rows(tables.open_file(path), line, lambda number: f"{path}:{number + 1}")
    if path.suffix == ".csv":
        return _rows_of_table(tables.open_file(path), lambda number: f"{path}:{tables.line_of(path, number)}")
    if path.suffix in (".parquet", ".arrow"):
        return _rows_of_table(tables.open_file(path), lambda number: f"{path}: row {number + 1}")
    return parse_file(path.read_bytes(), path, parse_row)


def _rows_of_table(table: Any, place: Callable[[int], str]) -> Rows:
    # other columns may hold images; a table without a known one is refused with the names it has
    known = [name for name in table.column_names if name in ("messages", *itertools.chain(*_PAIRS))]
    return Rows(table.select_columns(known) if known else table, parse_row, place)
