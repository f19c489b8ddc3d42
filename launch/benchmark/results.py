"""What the decoding benchmarks share beside the clock: options that count, and the file that is written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pallas_kernels import timing


def at_least_1(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for an option, by its field, that is less than 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")


def begin(what: str, arguments: list[str]) -> dict[str, Any]:
    """Returns what a file of results begins with; see `timing.record`."""
    return timing.record(" ".join(["python -m launch.benchmark", what, *arguments]))


def write(path: str | None, result: dict[str, Any]) -> None:
    """Writes a result as JSON, where a path was given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
