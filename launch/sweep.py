"""Score a checkpoint on held-out rows at every point of a grid over a decoder's fields.

Examples:

    # how sure a draft must be: five points, one line
    python -m launch.sweep --model runs/quickstart/models/masked --data runs/quickstart/data/test.jsonl \\
        --decoder masked --set "schedule=Blocks(8)" --set "commit=Threshold()" \\
        --grid commit.threshold=0.5,0.6,0.7,0.8,0.9 --out runs/scores/thresholds

    # the same under three cache policies: three lines
    python -m launch.sweep --model runs/quickstart/models/masked --data runs/quickstart/data/test.jsonl \\
        --decoder masked --set "schedule=Blocks(8)" --set "commit=Threshold()" \\
        --grid commit.threshold=0.5,0.7,0.9 --grid "cache=NoCache(),Prefix(),Dual()" --out runs/scores/caches

    # a paper's settings, and ReFusion's two thresholds around them
    python -m launch.sweep --model PATH --task gsm8k --data gsm8k_test.jsonl --preset refusion:gsm8k \\
        --grid slot_threshold=0.3,0.6,0.9 --grid token_threshold=0.3,0.6 --out runs/scores/frontier

Options are those of `python -m launch.evaluate`; `--grid` takes a field as `--set` does, with several values, and may
be repeated. Points that differ in the first field alone are joined by a line, where its values are numbers. DIR gets
results.json (a row a point), report.html and frontier.png (accuracy against tokens a forward and tokens a second). A
killed sweep goes on with the same command and `--resume`: finished points and batches are not decoded again. Exit
codes: 0 done, 1 a decoder that --check-lossless finds at fault, 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dlm_jax import text
from launch import cli, decoders, evaluate

POINTS = "points"  # of a sweep that has not ended
FILES = ("results.json", "report.html", "frontier.png")


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a grid.

    Attributes:
      settings: "field=value" of every axis.
      name: of the decoder.
      chosen: its `configs.Decoding`.
    """

    settings: tuple[str, ...]
    name: str
    chosen: Any

    @property
    def knob(self) -> dict[str, Any] | None:
        """The first axis' field and value; None where the value is no number."""
        field, _, value = self.settings[0].partition("=")
        try:
            return {"field": field, "value": float(value)}
        except ValueError:
            return None

    @property
    def family(self) -> str:
        """What tells its line from others."""
        return " ".join([self.name, *self.settings[self.knob is not None:]])


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = evaluate.parser("python -m launch.sweep", __doc__)
    p.add_argument("--grid", action="append", default=[], metavar="FIELD=VALUE,...", required=True,
                   help="values of a field of the decoder; may be repeated")
    return p


def points(options: argparse.Namespace) -> list[Point]:
    """Returns every point of the grid; all decoders are made, so that a bad value ends the sweep before it begins.

    Args:
      options: from `parser`, after `evaluate.follow`.

    Raises:
      ValueError: as `text.grid` and `decoders.chosen`.
    """
    found = []
    for settings in text.grid(options.grid):
        at = argparse.Namespace(**{**vars(options), "settings": [*options.settings, *settings]})
        name, chosen = decoders.chosen(at)
        evaluate.check(at, name, chosen)
        found.append(Point(settings, name, chosen))
    return found


def run(options: argparse.Namespace) -> int:
    """Does what the command line says.

    Args:
      options: from `parser`.

    Returns:
      The exit code.

    Raises:
      ValueError: bad input, named, before the model is read where that can be.
    """
    from dlm_jax.evals import frontier

    frontier.check()
    protocol, grid = evaluate.follow(options), points(options)
    evaluate.check_out(options, (POINTS, evaluate.BATCHES))
    task = evaluate.read(options)
    subject = decoders.load(options)
    rows = []
    for number, point in enumerate(grid, 1):
        label = " ".join(point.settings)
        row = kept(options, point, task)
        cli.log.info("%d of %d: %s%s", number, len(grid), label, ", found" if row else "")
        rows.append(row or measured(options, point, subject, task, protocol))
    best = max(rows, key=lambda row: row["accuracy"])
    rows = [row | {"headline": row is best} for row in rows]
    write(options, rows, task, subject)
    return int(any(row.get("divergences") for row in rows))


def identity(options: argparse.Namespace, point: Point, task: Any) -> str:
    """Returns what a kept row must be of, to stand for this point."""
    asked = {name: str(value) for name, value in vars(options).items() if name not in ("out", "resume", "grid")}
    questions = [[row.prompt_messages, row.response] for row in task.rows]
    same = json.dumps([asked, point.settings, repr(point.chosen), questions, task.metric], default=str)
    return hashlib.sha256(same.encode()).hexdigest()[:24]


def kept(options: argparse.Namespace, point: Point, task: Any) -> dict[str, Any] | None:
    """Returns the row of a point that an earlier run of the same command has finished, else None."""
    file = options.out / POINTS / f"{identity(options, point, task)}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def measured(options: argparse.Namespace, point: Point, subject: Any, task: Any, protocol: Any) -> dict[str, Any]:
    """Scores a point and keeps its row."""
    row, _ = evaluate.score(options, point.name, point.chosen, subject, task, protocol, " ".join(point.settings))
    row |= {"family": point.family, "settings": list(point.settings), "knob": point.knob}
    file = options.out / POINTS / f"{identity(options, point, task)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(".part")
    half.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    half.replace(file)  # whole or not at all
    shutil.rmtree(options.out / evaluate.BATCHES)
    return row


def write(options: argparse.Namespace, rows: Sequence[dict[str, Any]], task: Any, subject: Any) -> None:
    """Writes what was found.

    Args:
      options: from `parser`.
      rows: of every point.
      task: what was asked.
      subject: with what.
    """
    from dlm_jax.evals import frontier, report

    facts = [["Grid", ", ".join(options.grid)], ["Settings", ", ".join(options.settings) or "none"],
             ["Preset", options.preset or "none"]]
    found = evaluate.results(options, rows, task, subject, facts)
    results_file, page, picture = (options.out / name for name in FILES)
    frontier.draw(picture, rows)
    report.write(page, found)
    results_file.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(options.out / POINTS)
    Console().print(report.table(rows))
    cli.log.info("%d points; %s holds %s", len(rows), options.out, ", ".join(FILES))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code, 2 for bad input."""
    return cli.main(parser().parse_args, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
