"""One self-contained page about a run: table, curves, accuracy against tokens per forward, and a replay.

The page is `report_template.html` with the results put in as JSON. It fetches nothing.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

_SLOT = "/*RESULTS*/null"
_NEEDED = ("title", "task", "systems", "curves", "replays", "examples", "facts")


def render(results: dict[str, Any]) -> str:
    """Returns the page.

    Args:
      results: plain values:
        title: str. task: {"name", "metric", "questions"}.
        systems: rows of `runner.evaluate`, each with "family" (one connected series a family; the first row of
          the first family is the baseline) and "headline" (bool: named in the summary).
        curves: {"name", "unit", "series": {name: [[step, value], ...]}} each.
        replays: one question decoded by several systems: {"question", "expected", "tracks": [`runner.replay`]} each.
        examples: {"question", "expected", "answers": [{"system", "text", "right"}]} each.
        facts: [label, value] text pairs for the foot of the page.

    Raises:
      ValueError: a part is missing.
    """
    missing = [name for name in _NEEDED if name not in results]
    if missing:
        raise ValueError(f"the results lack {missing}; needed: {list(_NEEDED)}")
    template = (resources.files("dlm_jax.evals") / "report_template.html").read_text(encoding="utf-8")
    # "<" never occurs in the data as HTML sees it, so that no text of a row can end the script element
    data = json.dumps(results, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return template.replace(_SLOT, data.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"), 1)


def write(path: str | os.PathLike[str], results: dict[str, Any]) -> None:
    """Writes the page.

    Args:
      path: file, written whole or not at all.
      results: as in `render`.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(render(results), encoding="utf-8")
    part.replace(path)
