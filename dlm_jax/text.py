"""Text to the fields of frozen dataclasses: of runs, objectives, meshes, decoders and the parts of decoders.

A setting is "dotted.field=value". Numbers, words, true, false and none are written as they are, lists as 4,8,16. A
field that holds a part takes a call of one of the classes that the caller allows, whose arguments are values of the
same kinds: `Blocks(32, ahead=Ahead(0.1, sure=0.95))`. The syntax is read, nothing is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Parts = Mapping[str, type]  # the classes that values may be calls of, by name
_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "none"}


def override(config: Any, settings: Sequence[str], parts: Parts = types.MappingProxyType({}),
             flag: str = "--set") -> Any:
    """Returns a frozen dataclass with fields replaced from text.

    Args:
      config: nested frozen dataclasses.
      settings: "dotted.field=value"; a later one may change a field of the part that an earlier one put in.
      parts: classes that values may be calls of.
      flag: how errors name the setting's origin.

    Raises:
      ValueError: a setting of another form, an unknown field or part, or a value of another type, with what is
        accepted.
    """
    draft = _Draft(config)
    for setting in settings:
        path, equals, text = (word.strip() for word in setting.partition("="))
        accepted = draft.fields(parts)
        if not equals or not path:
            raise ValueError(f"{flag} {setting}: expected FIELD=VALUE with one of {', '.join(accepted)}")
        if path not in accepted:
            raise ValueError(f"{flag} {path}: no such field{close_to(path, accepted)}; accepted: {', '.join(accepted)}")
        *parents, last = path.split(".")
        inner = draft
        for name in parents:
            inner = inner.changes.setdefault(name, inner.get(name))
        try:
            value = parse(text, _hints(inner.base)[last], parts, f", as in {path}={show(inner.get(last).made())}")
        except ValueError as problem:
            raise ValueError(f"{flag} {setting}: {problem}") from None
        inner.changes[last] = _Draft(value)
    try:
        return draft.made()  # all at once: fields are checked against each other
    except ValueError as problem:
        raise ValueError(f"{flag} {', '.join(settings)}: {problem}") from None


def fields(config: Any, parts: Parts = types.MappingProxyType({})) -> list[str]:
    """Returns the dotted names of every field that `override` accepts.

    Args:
      config: nested frozen dataclasses.
      parts: classes that values may be calls of.
    """
    return _Draft(config).fields(parts)


def parse(text: str, hint: Any, parts: Parts = types.MappingProxyType({}), example: str = "") -> Any:
    """Returns the value that a text stands for.

    Args:
      text: the value.
      hint: type that it must have, as `typing.get_type_hints` returns it.
      parts: classes that it, and the arguments of calls, may be calls of.
      example: how the error ends.

    Raises:
      ValueError: a text that is no such value; the message says what is expected and leaves the text to the caller.
    """
    text, options, fitting = text.strip(), _options(hint), _fitting(hint, parts)
    called = _call(text) if fitting else None
    if type(None) in options and text.lower() == "none":
        return None
    if called and called[0] in fitting:
        return _build(*called, fitting[called[0]], parts)
    for option in options:
        try:
            return _plain(text, option)
        except ValueError:
            continue
    if called:
        raise ValueError(f"no part {called[0]!r}{close_to(called[0], fitting)}; accepted: "
                         f"{', '.join(calls(hint, parts))}")
    unread = "; no call can be read, is a bracket missing?" if fitting and not called and "(" in text else ""
    raise ValueError(f"expected {' or '.join([*calls(hint, parts), *filter(None, map(_describe, options))])}"
                     f"{example}{unread}")


def calls(hint: Any, parts: Parts) -> list[str]:
    """Returns how the parts that a value of a type may be are called, `Blocks(length, ahead)`.

    Args:
      hint: the type.
      parts: classes that values may be calls of.
    """
    return [f"{name}({', '.join(f.name for f in dataclasses.fields(kind) if f.init)})"
            for name, kind in _fitting(hint, parts).items()]


def grid(axes: Sequence[str], flag: str = "--grid") -> list[tuple[str, ...]]:
    """Returns the settings of every point of a grid, for `override`; the last axis varies fastest.

    Args:
      axes: "dotted.field=value,value,...", whose values may be calls with commas of their own.
      flag: how errors name the axes' origin.

    Raises:
      ValueError: an axis of another form, without values, or with one twice, or two axes of one field.
    """
    found: dict[str, list[str]] = {}
    for axis in axes:
        path, equals, values = (word.strip() for word in axis.partition("="))
        each = _apart(values)
        if not equals or not path or not all(each):
            raise ValueError(f"{flag} {axis}: expected FIELD=VALUE,VALUE,...")
        if path in found or len(set(each)) < len(each):
            raise ValueError(f"{flag} {axis}: {path if path in found else 'a value'} is given twice")
        found[path] = each
    return list(itertools.product(*([f"{path}={value}" for value in values] for path, values in found.items())))


def _apart(text: str) -> list[str]:
    """The parts of a text between those commas that no bracket encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def show(value: Any) -> str:
    """Returns the text that `parse` reads as this value."""
    if isinstance(value, tuple):
        return ",".join(map(show, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def brief(value: Any) -> str:
    """Returns the call that makes a value, without the fields that have their default."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    changed = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)
               if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={brief(inner)}' for name, inner in changed)})"


def close_to(name: str, accepted: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" for a name that is nearly one of those accepted, else nothing."""
    accepted = list(accepted)
    close = difflib.get_close_matches(name, accepted, n=1) or [a for a in accepted if a.endswith("." + name)]
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclasses.dataclass
class _Draft:
    """A value, and what is to be changed in it where it is a dataclass."""

    base: Any
    changes: dict[str, _Draft] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> _Draft:
        return self.changes.get(name) or _Draft(getattr(self.base, name))

    def made(self) -> Any:
        made = {name: draft.made() for name, draft in self.changes.items()}
        return dataclasses.replace(self.base, **made) if made else self.base

    def fields(self, parts: Parts, prefix: str = "") -> list[str]:
        found, hints = [], _hints(self.base)
        for field in dataclasses.fields(self.base):
            held, path = self.get(field.name), prefix + field.name
            nested = dataclasses.is_dataclass(held.base)
            if not nested or _fitting(hints[field.name], parts):
                found.append(path)
            if nested:
                found += held.fields(parts, f"{path}.")
        return found


def _hints(config: Any) -> dict[str, Any]:
    return typing.get_type_hints(type(config))


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fitting(hint: Any, parts: Parts) -> Parts:
    return {name: kind for name, kind in parts.items() if any(_fits(kind, option) for option in _options(hint))}


def _fits(kind: type, hint: Any) -> bool:
    """Whether instances of a class are meant by a type: itself, a base, or a protocol whose members it has."""
    if not isinstance(hint, type) or typing.get_origin(hint) is not None:
        return hint is Any
    if not getattr(hint, "_is_protocol", False):
        return issubclass(kind, hint)
    wanted = {name for base in hint.__mro__ if getattr(base, "_is_protocol", False)
              for name in (*vars(base), *vars(base).get("__annotations__", ())) if not name.startswith("_")}
    return all(hasattr(kind, name) or name in kind.__dataclass_fields__ for name in wanted)


def _plain(text: str, kind: Any) -> Any:
    """The value of a type that is no part; ValueError where the text is none."""
    if typing.get_origin(kind) is tuple:
        items = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
        return tuple(_plain(item.strip(), typing.get_args(kind)[0]) for item in items.split(",") if item.strip())
    if typing.get_origin(kind) is typing.Literal and text in typing.get_args(kind):
        return text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float, str):
        return kind(text)
    raise ValueError(text)


def _call(text: str) -> tuple[str, list[tuple[str | None, str]]] | None:
    """The name and the arguments (name or None, text) of a call; a bare name is a call without arguments."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    name, arguments = (node.func, [(None, a) for a in node.args] + [(k.arg or "**", k.value) for k in node.keywords]
                       ) if isinstance(node, ast.Call) else (node, [])
    if not isinstance(name, ast.Name):
        return None
    word = lambda a: a.value if isinstance(a, ast.Constant) and isinstance(a.value, str) else None
    return name.id, [(key, word(a) or ast.get_source_segment(text, a)) for key, a in arguments]


def _build(name: str, arguments: list[tuple[str | None, str]], kind: type, parts: Parts) -> Any:
    """The part that a call makes; arguments without a name are its first fields."""
    accepted, hints, values = [f for f in dataclasses.fields(kind) if f.init], typing.get_type_hints(kind), {}
    known = {field.name: field for field in accepted}
    for i, (key, text) in enumerate(arguments):
        key = key or (accepted[i].name if i < len(accepted) else text)
        if key not in known or key in values:
            twice = f"{key!r} is given twice" if key in values else f"no field {key!r}{close_to(key, known)}"
            raise ValueError(f"{name}: {twice}; accepted: {', '.join(known) or 'none'}")
        default = known[key].default
        example = "" if default is dataclasses.MISSING else f", as in {key}={show(default)}"
        try:
            values[key] = parse(text, hints[key], parts, example)
        except ValueError as problem:
            raise ValueError(f"{name}: {key}={text}: {problem}") from None
    lacking = [f.name for f in accepted if f.name not in values
               and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if lacking:
        raise ValueError(f"{name} needs {', '.join(lacking)}; accepted: {', '.join(known)}")
    return kind(**values)


def _describe(option: Any) -> str:
    if typing.get_origin(option) is tuple:
        return "integers such as 4,8,16" if int in typing.get_args(option) else "numbers such as 0.1,0.9"
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(typing.get_args(option))
    return _WORDS.get(option, "")
