"""What survives a stop: every result is a file that appears whole, under the key it was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlm_jax.train.config import plain


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all, with the folders above it.

    Args:
      path: the file.
      text: its content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def result(path: Path, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the value kept in a file for this key, or makes and keeps it.

    Args:
      path: JSON file.
      key: plain values that decide the result.
      make: returns plain values.
    """
    key = plain(key)
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == key:
            return found["value"]
    value = plain(make())
    write(path, json.dumps({"key": key, "value": value}, ensure_ascii=False, indent=1) + "\n")
    return value


def claim(out: Path, identity: dict[str, Any]) -> None:
    """Makes a directory the one of this run.

    Args:
      out: the directory; new, empty, or of the same run.
      identity: the options that decide the results.

    Raises:
      ValueError: it holds something else, or another run.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose another --out")
    path, identity = out / "run.json", plain(identity)
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        other = [f"{name}: {saved.get(name)!r} there, {identity[name]!r} here" for name in identity
                 if saved.get(name) != identity[name]]
        if other:
            raise ValueError(f"{out} holds another run ({'; '.join(other)}); choose another --out, or remove it")
    elif out.exists() and any(path.suffix != ".part" for path in out.iterdir()):
        raise ValueError(f"{out} holds files that are no quickstart run; choose another --out")
    else:
        write(path, json.dumps(identity, indent=2) + "\n")
