"""Score a checkpoint and a decoder on rows with known answers.

Examples:

    # a tiny model on the questions that `make quickstart` held out
    python -m launch.evaluate --model runs/quickstart/models/refusion --data runs/quickstart/data/test.jsonl \\
        --decoder refusion --set slot_size=8 --set block_length=16 --out runs/scores/refusion

    # a published checkpoint on GSM8K's test rows, with the paper's settings (Table 7); first on twenty of them
    python -m launch.evaluate --model PATH --data gsm8k_test.jsonl --decoder refusion --preset refusion:gsm8k \\
        --dtype bfloat16 --limit 20 --out runs/scores/look
    python -m launch.evaluate --model PATH --data gsm8k_test.jsonl --decoder refusion --preset refusion:gsm8k \\
        --dtype bfloat16 --out runs/scores/gsm8k

    # is Orthrus what it claims to be on these rows? Exit code 1 where it is not
    python -m launch.evaluate --model runs/orthrus/model --data rows.jsonl --decoder orthrus --check-lossless \\
        --out runs/scores/orthrus

Rows are {"question", "answer"}, {"query", "response"} or {"messages": [...]} of a JSONL, JSON, Parquet, Arrow or CSV
file, a directory, or the hub (--data openai/gsm8k:main:test). Where every reference has a final result (behind ####,
boxed, after "the answer is", or all there is) answers are scored by theirs, which --extract says how to find, otherwise
by their whole text. DIR gets results.json (accuracy, what found how many results, forwards by kind, tokens a forward
and a second), answers.jsonl (every answer beside its reference) and report.html.
`python -m launch.decode --list` prints the decoders and what --set reaches. Exit codes: 0 done, 1 a decoder that
--check-lossless finds at fault, 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlm_jax.evals import extractors
from launch import cli, decoders

FILES = ("results.json", "answers.jsonl", "report.html")


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.evaluate", __doc__)
    p.add_argument("--data", metavar="ROWS", type=Path, required=True,
                   help="questions and their answers: a file, a directory, or a hub id")
    p.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new directory for what is found")
    decoders.add_options(p, batch_size=32)
    p.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")
    p.add_argument("--timed", type=int, default=8, metavar="N",
                   help="questions decoded again, three times and one by one, to time an answer (default: %(default)s)")
    p.add_argument("--extract", nargs="+", metavar="NAME", default=extractors.DEFAULT,
                   help=f"where to seek an answer's final result, in order; of {', '.join(extractors.EXTRACTORS)} "
                   "(default: all but the last two, in this order)")
    p.add_argument("--check-lossless", action="store_true",
                   help="compare every answer with plain autoregressive decoding (--decoder orthrus, ar_trust)")
    return p


def run(options: argparse.Namespace) -> int:
    """Does what the command line says.

    Args:
      options: from `parser`.

    Returns:
      The exit code.

    Raises:
      ValueError: bad input, named, before the model is read where that can be.
    """
    from dlm_jax.data import sources

    name, chosen = decoders.chosen(options)
    cli.check_counts(options, "max_new_tokens", "batch_size", "timed", "limit")
    if options.check_lossless and (name == "autoregressive" or not chosen.decoder.lossless):
        raise ValueError(f"--check-lossless: --decoder {name} makes no such claim; accepted with --decoder orthrus "
                         "and ar_trust")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"--out {options.out} exists already; give a new directory")
    extractors.check(options.extract)
    rows = sources.read_rows(options.data)[:options.limit]
    subject = decoders.load(options)

    from dlm_jax.evals import runner, tasks

    task = tasks.task_of(options.data.name, rows, options.extract)
    ask = dict(max_new_tokens=chosen.max_new_tokens, batch_size=min(options.batch_size, len(rows)),
               encode=subject.encode)
    asked = (chosen.decoder, subject.model, subject.params, subject.tokenizer, task)
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=Console(stderr=True)) as bar:
        shown = bar.add_task("compiling", total=None)
        claim = runner.losslessness(*asked, **ask) if options.check_lossless else {}
        row, answers = runner.evaluate(
            name, *asked, timed=options.timed, seed=options.seed, **ask,
            progress=lambda done, total: bar.update(shown, description="answering", completed=done, total=total))
    row |= {**claim, "family": name, "label": name, "headline": True}
    write(options, row, answers, task, chosen)
    if claim:
        cli.log.info(claim["lossless_report"])
    return int(claim.get("divergences", 0) > 0)


def write(options: argparse.Namespace, row: dict[str, Any], answers: Sequence[Any], task: Any, chosen: Any) -> None:
    """Writes what was found.

    Args:
      options: from `parser`.
      row, answers: of `runner.evaluate`.
      task: what was asked.
      chosen: `configs.Decoding` that was asked.
    """
    import jax

    from dlm_jax.evals import report

    results = {
        "title": "dlm_jax evaluation",
        "task": {"name": task.name, "metric": task.metric, "questions": len(answers)},
        "systems": [row],
        "curves": [], "replays": [],
        "examples": [{"question": a.question, "expected": a.expected,
                      "answers": [{"system": row["name"], "text": a.text, "right": a.right}]}
                     for a in sorted(answers, key=lambda a: a.right)[:4]],
        "facts": [["Model", str(options.model)], ["Guide", options.guide or "none"], ["Rows", str(options.data)],
                  ["Longest answer", f"{chosen.max_new_tokens} tokens"],
                  ["Decoder", repr(chosen.decoder)],
                  ["Software", f"jax {jax.__version__} on {jax.device_count()} × {jax.default_backend()}"],
                  ["Seed", str(options.seed)]],
    }
    results_file, answers_file, page = (options.out / name for name in FILES)
    options.out.mkdir(parents=True, exist_ok=True)
    answers_file.write_text("".join(json.dumps(dataclasses.asdict(a), ensure_ascii=False) + "\n" for a in answers),
                            encoding="utf-8")
    results_file.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    report.write(page, results)
    Console().print(report.table(results["systems"]))
    cli.log.info("%d of %d right by %s; %s holds %s", row["correct"], len(answers), task.metric, options.out,
                 ", ".join(FILES))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code, 2 for bad input."""
    return cli.main(parser().parse_args, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
