"""Put what evaluations and sweeps found into one table and one plot.

Examples:

    # in the terminal
    python -m launch.report runs/scores/refusion runs/scores/thresholds

    # and as a page, as Markdown, and as plots of accuracy against tokens a forward and tokens a second
    python -m launch.report runs/scores/* --out runs/scores/report

DIR is what `python -m launch.evaluate`, `launch.sweep` or `launch.quickstart` wrote (or its results.json). Rows are put
together by what was asked: one table and one plot for each task. Results of several versions of this library, jax or
transformers are refused, until `--mixed` says that they may stand beside each other; the report lists the versions and
devices of each. Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import cli

VERSIONS = ("dlm_jax", "jax", "jaxlib", "transformers")
FILES = ("report.md", "report.html")
_STYLE = ("body{font:15px system-ui,sans-serif;color:#222;max-width:70em;margin:2em auto;padding:0 1em}"
          "table{border-collapse:collapse;margin:1em 0}th,td{padding:.3em .8em;border-bottom:1px solid #ddd;"
          "text-align:right;font-variant-numeric:tabular-nums}th:first-child,td:first-child{text-align:left}"
          "img{max-width:100%}p{color:#666}")


@dataclasses.dataclass(frozen=True)
class Found:
    """One file of results.

    Attributes:
      source: the directory as it was given.
      results: what the file holds.
    """

    source: str
    results: dict[str, Any]

    @property
    def versions(self) -> str:
        """The versions that numbers depend on, in words."""
        environment = self.results.get("environment", {})
        return ", ".join(f"{name} {environment[name]}" for name in VERSIONS if name in environment) or "none stated"

    @property
    def facts(self) -> dict[str, str]:
        """What the foot of a report says of the file."""
        environment, model = self.results.get("environment", {}), self.results.get("model", {})
        device = f"{environment['devices']} × {environment['device']}" if "device" in environment else "not stated"
        return {"results": self.source, "date": environment.get("date", "not stated"), "device": device,
                "versions": self.versions, "model": str(model.get("path", "not stated")),
                "config": str(model.get("config", "not stated"))}


@dataclasses.dataclass(frozen=True)
class Section:
    """The rows of one task.

    Attributes:
      title: the task, its number of questions, and what is measured.
      rows: of `runner.evaluate`; where they come from several files, their names and families say from which.
    """

    title: str
    rows: list[dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.report", __doc__)
    p.add_argument("found", nargs="+", metavar="DIR", type=Path, help="directories with results.json")
    p.add_argument("--out", metavar="DIR", type=Path, help="a new directory for report.md, report.html and plots")
    p.add_argument("--mixed", action="store_true", help="put results of several versions into one report")
    return p


def read(path: Path) -> Found:
    """Reads a file of results.

    Args:
      path: the file, or a directory with results.json.

    Raises:
      ValueError: no such file, one that is none, or one without rows.
    """
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: no results.json; give what python -m launch.evaluate or launch.sweep wrote")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON ({error})") from None
    if not isinstance(results, dict) or not {"task", "systems"} <= set(results):
        raise ValueError(f"{file}: no file of results; give what python -m launch.evaluate or launch.sweep wrote")
    if not results["systems"]:
        raise ValueError(f"{file} holds no rows: nothing was measured")
    return Found(str(path), results)


def check(found: Sequence[Found], mixed: bool) -> None:
    """Raises ValueError for results of several versions, unless they may be mixed.

    Args:
      found: the files.
      mixed: whether they may.
    """
    other = next((each for each in found if each.versions != found[0].versions), None)
    if other is not None and not mixed:
        raise ValueError(f"{found[0].source} was made with {found[0].versions}, {other.source} with {other.versions}: "
                         "report them apart, or give --mixed to put them into one report")


def sections(found: Sequence[Found]) -> list[Section]:
    """Returns the rows of all files, by what was asked.

    Args:
      found: the files.
    """
    made: dict[str, list[dict[str, Any]]] = {}
    short = [Path(each.source).name for each in found]
    called = short if len(set(short)) == len(short) else [each.source for each in found]
    for each, name in zip(found, called):
        task, name = each.results["task"], f"{name} " if len(found) > 1 else ""
        title = f"{task['name']}: {task['questions']} questions, {task['metric']}"
        made.setdefault(title, []).extend(
            row | {"name": name + row["name"], "family": name + row["family"]} for row in each.results["systems"])
    return [Section(title, rows) for title, rows in made.items()]


def markdown(parts: Sequence[Section], found: Sequence[Found], pictures: Sequence[Path]) -> str:
    """Returns the report as Markdown, beside its pictures."""
    from dlm_jax.evals import report

    texts = ["# Results\n"]
    for part, picture in zip(parts, pictures):
        texts.append(f"## {part.title}\n\n{_pipes(report.columns(part.rows))}\n\n![{part.title}]({picture.name})\n")
    return "\n".join([*texts, "## Where the numbers are from\n", _pipes(_facts(found)), ""])


def page(parts: Sequence[Section], found: Sequence[Found], pictures: Sequence[Path]) -> str:
    """Returns the report as a page of one file."""
    from dlm_jax.evals import report

    texts = []
    for part, picture in zip(parts, pictures):
        data = base64.b64encode(picture.read_bytes()).decode()
        texts.append(f"<h2>{escape(part.title)}</h2>{_cells(report.columns(part.rows))}"
                     f'<img alt="{escape(part.title)}" src="data:image/png;base64,{data}">'
                     "<p>Bars are 95 % bootstrap intervals over questions; lines go through points of one knob.</p>")
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Results</title><style>{_STYLE}</style>'
            f"<h1>Results</h1>{''.join(texts)}<h2>Where the numbers are from</h2>{_cells(_facts(found))}</html>\n")


def _facts(found: Sequence[Found]) -> dict[str, list[str]]:
    return {title: [each.facts[title] for each in found] for title in found[0].facts}


def _pipes(columns: dict[str, list[str]]) -> str:
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join([line(columns), line(rule), *map(line, zip(*columns.values()))])


def _cells(columns: dict[str, list[str]]) -> str:
    row = lambda kind, cells: "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"
    return f"<table>{row('th', columns)}{''.join(row('td', cells) for cells in zip(*columns.values()))}</table>"


def run(options: argparse.Namespace) -> int:
    """Does what the command line says; returns the exit code.

    Args:
      options: from `parser`.

    Raises:
      ValueError: bad input.
    """
    from dlm_jax.evals import frontier, report

    if options.out is not None:
        frontier.check()
        if options.out.exists():
            raise ValueError(f"--out {options.out} exists already; give a new directory")
    found = [read(path) for path in options.found]
    check(found, options.mixed)
    parts = sections(found)
    for part in parts:
        Console().print(report.table(part.rows, part.title))
    if options.out is None:
        return 0
    options.out.mkdir(parents=True)
    pictures = [options.out / f"frontier{'' if len(parts) == 1 else f'_{n}'}.png" for n, _ in enumerate(parts, 1)]
    for part, picture in zip(parts, pictures):
        frontier.draw(picture, part.rows)
    for name, make in zip(FILES, (markdown, page)):
        (options.out / name).write_text(make(parts, found, pictures), encoding="utf-8")
    cli.log.info("%s holds %s", options.out, ", ".join([*FILES, *(picture.name for picture in pictures)]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code, 2 for bad input."""
    return cli.main(parser().parse_args, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
