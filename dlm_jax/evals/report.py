"""What a terminal and a browser show of a run.

The page has a table, curves, accuracy against tokens per forward, and a replay in one self-contained file: it is
`report_template.html` with the results put in as JSON. It fetches nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.table import Table

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


def columns(systems: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns what tables show of every system, by the columns' titles; columns that no system fills are left out.

    Args:
      systems: rows of `runner.evaluate`.
    """
    count = lambda digits: lambda value: f"{value:,.{digits}f}"
    percent = lambda value: f"{100 * value:.1f} %"
    known = {
        "accuracy": ("accuracy", percent),
        "tokens / forward": ("tokens_per_forward", count(2)),
        "ms / answer": ("seconds_per_answer", lambda value: f"{1000 * value:.1f}"),
        "tokens / s": ("tokens_per_second", count(0)),
        "in batches": ("tokens_per_second_batched", count(0)),
        "tokens / verification": ("tokens_per_verification", count(2)),
        "lossless": ("lossless", percent),
    }
    filled = lambda name: any(row.get(name) is not None for row in systems)
    return {"system": [row["name"] for row in systems], **{
        title: ["-" if row.get(name) is None else show(row[name]) for row in systems]
        for title, (name, show) in known.items() if filled(name)}}


def table(systems: Sequence[dict[str, Any]], title: str | None = None) -> Table:
    """Returns the table of a terminal, see `columns`.

    Args:
      systems: rows of `runner.evaluate`.
      title: what stands above it.
    """
    made, shown = Table(title=title, title_justify="left"), columns(systems)
    for name, cells in shown.items():
        least = max((len(cell) for cell in cells), default=0)  # what a narrow terminal may break are names and titles
        system = name == "system"
        made.add_column(name, justify="left" if system else "right", min_width=min(least, 16) if system else least)
    for cells in zip(*shown.values()):
        made.add_row(*cells)
    return made
