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

    # a benchmark's own file under its paper's protocol: prompt, examples, extractors, lengths and decoder in one word
    python -m launch.evaluate --model PATH --data HumanEval.jsonl.gz --protocol refusion-2025:humaneval --out runs/he
    python -m launch.evaluate --model PATH --data gsm8k_test.jsonl --shots-data gsm8k_train.jsonl \\
        --protocol asynclane-2026-256:gsm8k --out runs/scores/lane
    python -m launch.evaluate --model PATH --data mbpp.jsonl --task mbpp --prompt begin_done --shots 3 \\
        --shots-data mbpp.jsonl --out runs/scores/mbpp

    # is Orthrus what it claims to be on these rows? Exit code 1 where it is not
    python -m launch.evaluate --model runs/orthrus/model --data rows.jsonl --decoder orthrus --check-lossless \\
        --out runs/scores/orthrus

Rows are {"question", "answer"}, {"query", "response"} or {"messages": [...]} of a JSONL, JSON, Parquet, Arrow or CSV
file, a directory, or the hub (--data openai/gsm8k:main:test). Where every reference has a final result (behind ####,
boxed, after "the answer is", or all there is) answers are scored by theirs, which --extract says how to find, otherwise
by their whole text. With --task or --protocol ROWS is a benchmark's own file instead (gsm8k; math; choice: ARC, MMLU,
MMLU-Pro, GPQA, HellaSwag, PIQA; humaneval; mbpp; ifeval), JSONL or JSON, .gz or not; programs run in a sandbox, without
network and without files but their own. DIR gets results.json (accuracy and how sure it is, what found how many
results, forwards by kind, tokens a forward and a second), answers.jsonl (every answer beside its reference) and
report.html.
`python -m launch.decode --list` prints the decoders and what --set reaches. Exit codes: 0 done, 1 a decoder that
--check-lossless finds at fault, 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlm_jax.evals import benchmarks, extractors, prompts, protocols
from launch import cli, decoders

BATCHES = "batches"  # of a run that has not ended
FILES = ("results.json", "answers.jsonl", "report.html")


def parser(program: str = "python -m launch.evaluate", description: str = __doc__) -> argparse.ArgumentParser:
    """Returns the command line, of this program or of another that scores.

    Args:
      program, description: see `cli.parser`.
    """
    p = cli.parser(program, description)
    p.add_argument("--data", metavar="ROWS", type=Path, required=True,
                   help="questions and their answers: a file, a directory, or a hub id")
    p.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new directory for what is found")
    decoders.add_options(p, batch_size=32)
    p.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")
    p.add_argument("--timed", type=int, default=8, metavar="N",
                   help="questions decoded again, three times and one by one, to time an answer (default: %(default)s)")
    p.add_argument("--task", metavar="KIND", help=f"ROWS is a benchmark's file; of {', '.join(benchmarks.KINDS)}")
    p.add_argument("--prompt", metavar="NAME", help="how --task puts a question (default: "
                   + ", ".join(f"{kind} {name}" for kind, name in prompts.DEFAULT.items()) + ")")
    p.add_argument("--shots", type=int, metavar="N", help="examples before every question of --task (default: 0)")
    p.add_argument("--shots-data", metavar="ROWS", type=Path, help="the benchmark's file that they come from")
    p.add_argument("--protocol", metavar="NAME", help="task, prompt, examples, lengths and decoder of a paper, as "
                   "refusion-2025:gsm8k; a wrong name lists them")
    p.add_argument("--unconfined", action="store_true",
                   help="run programs of humaneval and mbpp with limits but no sandbox: they reach network and files")
    p.add_argument("--extract", nargs="+", metavar="NAME",
                   help=f"where to seek an answer's final result, in order; of {', '.join(extractors.EXTRACTORS)} "
                   "(default: the prompt's; without --task all but the last two, in this order)")
    p.add_argument("--resume", action="store_true", help="go on with the same command, killed, in the same --out DIR")
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
    protocol = follow(options)
    name, chosen = decoders.chosen(options)
    check(options, name, chosen)
    check_out(options)
    task = read(options)
    subject = decoders.load(options)
    row, answers = score(options, name, chosen, subject, task, protocol)
    write(options, row, answers, task, chosen, subject)
    if "lossless_report" in row:
        cli.log.info(row["lossless_report"])
    return int(row.get("divergences", 0) > 0)


def check(options: argparse.Namespace, name: str, chosen: Any) -> None:
    """Raises ValueError for numbers below 1, and for a claim that the decoder does not make.

    Args:
      options: from `parser`.
      name, chosen: of `decoders.chosen`.
    """
    cli.check_counts(options, "max_new_tokens", "batch_size", "timed", "limit", "shots")
    if options.check_lossless and (name == "autoregressive" or not chosen.decoder.lossless):
        raise ValueError(f"--check-lossless: --decoder {name} makes no such claim; accepted with --decoder orthrus "
                         "and ar_trust")


def score(options: argparse.Namespace, name: str, chosen: Any, subject: Any, task: Any, protocol: Any = None,
          label: str | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Answers a task's questions while a bar shows how far it is.

    Args:
      options: from `parser`.
      name, chosen: of `decoders.chosen`.
      subject: of `decoders.load`.
      task: of `read`.
      protocol: of `follow`.
      label: what tables call it; None is the decoder's name.

    Returns:
      What `runner.evaluate` does; the row holds what `runner.losslessness` found, where that is asked.
    """
    from dlm_jax.evals import runner

    raw, label = not task.about.get("chat", True), label or name
    ask = dict(max_new_tokens=chosen.max_new_tokens, batch_size=min(options.batch_size, len(task.rows)),
               encode=lambda messages: subject.encode(messages, raw=raw))
    asked = (chosen.decoder, subject.model, subject.params, subject.tokenizer, task)
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=Console(stderr=True)) as bar:
        shown = bar.add_task("compiling", total=None)
        claim = runner.losslessness(*asked, **ask) if options.check_lossless else {}
        row, answers = runner.evaluate(
            label, *asked, timed=options.timed, seed=options.seed, **ask,
            keep=(options.out / BATCHES, f"{options.model} {options.guide} {options.dtype}"),
            progress=lambda done, total: bar.update(shown, description="answering", completed=done, total=total))
    row |= {**claim, "family": name, "label": label, "headline": True}
    row["asked"] |= {"protocol": options.protocol, "protocol_source": protocol.source} if protocol else {}
    return row, answers


def check_out(options: argparse.Namespace, unfinished: Sequence[str] = (BATCHES,)) -> None:
    """Raises ValueError for a directory that holds something else than what --resume is to go on with.

    Args:
      options: from `parser`.
      unfinished: what a run that has not ended holds.
    """
    out = options.out
    held = {path.name for path in out.iterdir()} if out.is_dir() else {"a file"} if out.exists() else set()
    other = ", ".join(sorted(held - set(unfinished)))
    if options.resume and other:
        raise ValueError(f"--resume: --out {out} holds {other}: that run has ended, or is none; give a new directory, "
                         "without --resume")
    if held and not options.resume:
        raise ValueError(f"--out {out} exists already; give a new directory"
                         + (", or --resume to go on with the killed run in it" if not other else ""))


def follow(options: argparse.Namespace) -> Any:
    """Fills in what a protocol says, where the command line leaves it open; returns the protocol or None.

    Args:
      options: from `parser`; changed.

    Raises:
      ValueError: an unknown protocol, or one beside what it settles.
    """
    if options.protocol is None:
        return None
    found = protocols.find(options.protocol)
    for name in ("task", "prompt", "shots", "extract"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} beside --protocol {options.protocol}, which settles it: leave out one of them")
    options.task, options.prompt, options.shots = found.kind, found.prompt, found.shots or None
    if options.preset is None and options.decoder is None:
        options.preset = found.preset
    options.max_new_tokens = options.max_new_tokens or found.max_new_tokens
    options.chat = [*(f"{name}={value}" for name, value in found.chat.items()), *options.chat]
    return found


def read(options: argparse.Namespace) -> Any:
    """Returns the `tasks.Task` that a command line asks.

    Args:
      options: from `parser`, after `follow`.

    Raises:
      ValueError: rows that cannot be read, or options that do not go together.
    """
    from dlm_jax.data import sources
    from dlm_jax.evals import tasks

    if options.task is None:
        for name in ("prompt", "shots", "shots_data", "unconfined"):
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} goes with --task KIND or --protocol NAME; without them "
                                 "rows are asked as they stand")
        names = options.extract or extractors.DEFAULT
        extractors.check(names)
        return tasks.task_of(options.data.name, sources.read_rows(options.data)[:options.limit], names)
    items = benchmarks.read(options.data, options.task)
    prompt, shots = prompts.find(options.prompt, options.task), examples(options)
    items = [item for item in benchmarks.asked(items, options.task) if item not in shots][:options.limit]
    if not items:
        raise ValueError(f"--data {options.data}: every row is an example before the question; give other --shots-data")
    return tasks.benchmark(options.task, items, prompt, shots, extract=options.extract, confined=not options.unconfined)


def examples(options: argparse.Namespace) -> list[Any]:
    """Returns the examples that go before every question.

    Args:
      options: from `parser`, after `follow`.

    Raises:
      ValueError: examples without a file, or a file with too few.
    """
    count = options.shots or 0
    names = protocols.find(options.protocol).shot_names if options.protocol else ()
    if not count:
        return []
    if options.shots_data is None:
        raise ValueError(f"{count} examples go before every question: give the benchmark's file that they come from, "
                         "--shots-data ROWS")
    found = benchmarks.read(options.shots_data, options.task)
    found = [item for item in found if item.name in names] if names else found[:count]
    if len(found) < count:
        raise ValueError(f"--shots-data {options.shots_data} has {len(found)} of the {count} examples"
                         + (f", those named {', '.join(names)}" if names else ""))
    return found


def results(options: argparse.Namespace, rows: Sequence[dict[str, Any]], task: Any, subject: Any,
            facts: Sequence[Sequence[str]], examples: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Returns what a file of results holds, see `report.render`.

    Args:
      options: from `parser`.
      rows: of `score`.
      task: what was asked.
      subject: what was asked it.
      facts: label and value of what tells these decoders from others.
      examples: answers to show.
    """
    import jax

    from pallas_kernels import timing

    return {
        "title": "dlm_jax evaluation",
        "task": {"name": task.name, "metric": task.metric, "questions": len(task.rows)},
        "systems": list(rows), "curves": [], "replays": [], "examples": list(examples),
        "environment": timing.environment(),
        "model": {"path": str(options.model), "guide": options.guide,
                  "config": hashlib.sha256(repr(subject.model.config).encode()).hexdigest()[:16]},
        "facts": [["Model", str(options.model)], ["Guide", options.guide or "none"], ["Rows", str(options.data)],
                  *facts, ["Software", f"jax {jax.__version__} on {jax.device_count()} × {jax.default_backend()}"],
                  ["Seed", str(options.seed)]],
    }


def write(options: argparse.Namespace, row: dict[str, Any], answers: Sequence[Any], task: Any, chosen: Any,
          subject: Any) -> None:
    """Writes what was found.

    Args:
      options: from `parser`.
      row, answers: of `score`.
      task: what was asked.
      chosen: `configs.Decoding` that was asked.
      subject: with what.
    """
    from dlm_jax.evals import report

    examples = [{"question": a.question, "expected": a.expected,
                 "answers": [{"system": row["name"], "text": a.text, "right": a.right}]}
                for a in sorted(answers, key=lambda a: a.right)[:4]]
    facts = [["Longest answer", f"{chosen.max_new_tokens} tokens"], ["Decoder", repr(chosen.decoder)]]
    found = results(options, [row], task, subject, facts, examples)
    results_file, answers_file, page = (options.out / name for name in FILES)
    options.out.mkdir(parents=True, exist_ok=True)
    answers_file.write_text("".join(json.dumps(dataclasses.asdict(a), ensure_ascii=False) + "\n" for a in answers),
                            encoding="utf-8")
    results_file.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    report.write(page, found)
    shutil.rmtree(options.out / BATCHES)
    Console().print(report.table(found["systems"]))
    cli.log.info("%d of %d right by %s; %s holds %s", row["correct"], len(answers), task.metric, options.out,
                 ", ".join(FILES))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code, 2 for bad input."""
    return cli.main(parser().parse_args, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
