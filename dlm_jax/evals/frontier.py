"""Accuracy against what parallel decoding saves: tokens a forward, and tokens a second."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

AXES = {"tokens_per_forward": "tokens / forward", "tokens_per_second": "tokens / s, one answer at a time"}
COLOURS = ("#3b7dd8", "#e08a2e", "#2f9e6e", "#c0392b", "#8e5bb5", "#7a6a53", "#d4669b", "#4aa3a2")
MARKERS = "os^DvpXP<>"
_INK, _RULE = "#333333", "#dddddd"


def check() -> None:
    """Raises ValueError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib, which is not installed: pip install 'dlm_jax[eval]'")


def lines(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each family, those that differ in one numeric knob alone in its order.

    Args:
      rows: of `runner.evaluate`, each with "family", and with "knob" ({"field", "value"}) where it is of a sweep.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append(row)
    return {family: sorted(each, key=lambda row: row["knob"]["value"]) if joined(each) else each
            for family, each in found.items()}


def joined(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a line may go through the rows of a family: all are points of one knob."""
    return len(rows) > 1 and all(row.get("knob") for row in rows) and len({row["knob"]["field"] for row in rows}) == 1


def draw(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Draws the frontier: a panel an axis, bars for the accuracy's 95% interval, a line through points of one knob.

    Args:
      path: of the PNG file, written whole or not at all.
      rows: as in `lines`.

    Raises:
      ValueError: no rows, or no matplotlib.
    """
    check()
    if not rows:
        raise ValueError("no rows to draw: give results of at least one system")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families = lines(rows)
    colours = dict(zip(families, itertools.cycle(COLOURS)))
    series = [part for each in families.values() for part in ([each] if joined(each) else [[row] for row in each])]
    figure = Figure(figsize=(11, 4.6 + 0.22 * -(-len(series) // 3)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, (axis, title) in zip(panels, AXES.items()):
        markers = {family: itertools.cycle(MARKERS) for family in families}
        for part in series:
            family = part[0]["family"]
            _series(panel, axis, part, colours[family], next(markers[family]))
        panel.set_xlabel(title, color=_INK)
        panel.grid(color=_RULE, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.1, y=0.12)
        panel.set_xlim(left=0)
        panel.set_ylim(*(min(max(end, -3), 103) for end in panel.get_ylim()))
    panels[0].set_ylabel("accuracy, %", color=_INK)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=min(3, len(series)), frameon=False, fontsize=9)
    part = Path(path).with_suffix(".part")
    figure.savefig(part, format="png", dpi=150)
    part.replace(path)


def _series(panel: Any, axis: str, rows: Sequence[dict[str, Any]], colour: str, marker: str) -> None:
    """Draws points of one knob, or a single one, into a panel; rows without the axis' number are left out."""
    shown = [row for row in rows if row.get(axis) is not None]
    if not shown:
        return
    x, y = [row[axis] for row in shown], [100 * row["accuracy"] for row in shown]
    ends = [row.get("accuracy_interval") or [row["accuracy"]] * 2 for row in shown]
    below = [max(0, 100 * (row["accuracy"] - low)) for row, (low, _) in zip(shown, ends)]
    above = [max(0, 100 * (high - row["accuracy"])) for row, (_, high) in zip(shown, ends)]
    panel.errorbar(x, y, yerr=[below, above], fmt="none", ecolor=colour, elinewidth=1, alpha=0.35)
    panel.plot(x, y, linestyle="-" if joined(rows) else "none", linewidth=1.6, marker=marker, markersize=7,
               markeredgecolor="white", markeredgewidth=0.8, color=colour,
               label=rows[0]["family" if joined(rows) else "name"])
    for at, height, row in zip(x, y, shown) if joined(rows) else ():
        panel.annotate(f"{row['knob']['value']:g}", (at, height), xytext=(5, 4), textcoords="offset points",
                       fontsize=8, color=colour)
