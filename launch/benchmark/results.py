"""What the decoding benchmarks share beside the clock: the file that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pallas_kernels import timing


def begin(what: str, arguments: list[str]) -> dict[str, Any]:
    """Returns what a file of results begins with; see `timing.record`."""
    return timing.record(" ".join(["python -m launch.benchmark", what, *arguments]))


def write(path: str | None, result: dict[str, Any]) -> None:
    """Writes a result as JSON, where a path was given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
