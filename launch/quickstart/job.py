"""The stages in order, and the command line around them."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dlm_jax.evals import report, tasks
from launch import cli
from launch.quickstart import kept, lanes, rows, stages, summary, systems, transfer
from launch.quickstart.plan import Budget, Plan

_HELP = """\
Trains a tiny autoregressive Qwen3 on worked word problems, makes models of other kinds from it, answers held-out
questions with all of them, and writes results.json and report.html.

examples:
  python -m launch.quickstart                     the whole job: a quarter of an hour on 2 cores
  python -m launch.quickstart --budget smoke      the same road in a minute, to poor models
  python -m launch.quickstart --data rows.jsonl   your rows; a tenth of them (256 at most) is held out
  python -m launch.quickstart --study transfer    one hybrid seed, and what each ingredient of FLARE makes of it
  python -m launch.quickstart --study lanes       a masked model for long canvases, which AsyncLane is measured on

Rows are {"question", "answer"}, {"query", "response"} or {"messages": [...]}, one JSON object a line. Where all
answers end in "#### x" they are scored by x, otherwise by their whole text. The same command again continues
where the last one stopped.
"""

_NEXT = """\
look at {out}/report.html, then
  python -m launch.decode --model {out}/models/refusion --decoder refusion --set slot_size=8 --stream \\
      --prompt "Mia has 9 apples, finds 4 more and gives 6 to Tom. How many apples now?"
  python -m launch.evaluate --model {out}/models/masked --data {out}/data/test.jsonl --out runs/scores/masked \\
      --decoder masked --set "schedule=Blocks(8)" --set "commit=Threshold(0.9)"
  python -m launch.quickstart --data rows.jsonl      the same with your rows
  python -m launch.models                            checkpoints that load as they are"""
PLANS = {"systems": systems.PLAN, "transfer": transfer.PLAN, "lanes": lanes.PLAN}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def default_out(data: Path | None, study: str = "systems") -> Path:
    """Returns where a run goes that names no directory: rows of one's own, and other studies, are runs of their own."""
    name = "quickstart" if data is None else data.stem
    return Path("runs") / (name if study == "systems" else f"{name}-{study}")


def run(data: Path | None, out: Path, seed: int, budget: Budget, plan: Plan) -> dict[str, Any]:
    """Does the whole job, or what is left of it.

    Args:
      data: the user's rows, None for generated word problems.
      out: directory of this run.
      seed: of everything random.
      budget: how large.
      plan: the study.

    Returns:
      What results.json holds.

    Raises:
      ValueError: bad rows, or a directory that holds something else.
      Stopped: by a signal, with everything so far saved.
    """
    began = time.perf_counter()
    train_rows, test_rows = rows.make(data, seed, budget.rows, budget.questions, plan.stories)
    texts = {"train": rows.as_jsonl(train_rows), "test": rows.as_jsonl(test_rows)}
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:16]
    kept.claim(out, {"study": plan.title, "data": "word problems" if data is None else data.name,
                     "rows": digest, "seed": seed, "budget": dataclasses.asdict(budget)})
    count, stage = len(plan.trainings) + 2, iter(range(1, 99))
    head = lambda text: console.print(f"[bold]\\[{next(stage)}/{count}][/bold] {text}")

    head(f"rows and tokenizer: {len(train_rows)} rows to train on, {len(test_rows)} questions held out")
    for name, text in texts.items():
        if not (out / "data" / f"{name}.jsonl").exists():
            kept.write(out / "data" / f"{name}.jsonl", text)
    tokenizer = rows.make_tokenizer(out / "tokenizer", train_rows, budget.vocabulary)
    model = stages.make_model(tokenizer, budget, plan.trainings[0].body)
    length, room = rows.lengths(train_rows, tokenizer, budget.longest)
    most, held = model.config.max_position_embeddings - room, len(test_rows)
    test_rows = rows.answerable(test_rows, tokenizer, most)
    dropped = held - len(test_rows)
    questions = f"{len(test_rows)} answered, {dropped or 'none'} dropped for a prompt of over {most} tokens"
    if dropped:
        console.print(f"held-out questions: {questions}")
    job = stages.Job(out, tokenizer, length, room, seed, budget)

    models, trained = {}, {}
    for training in plan.trainings:
        tokens = training.length or length
        head(f"train {training.title}: {budget.steps[training.name]} steps of rows of {tokens} tokens")
        models[training.name], trained[training.name] = stages.train(training, job, train_rows)

    head(f"answer {len(test_rows)} questions with {len(plan.systems)} systems, up to {room} tokens each")
    task = tasks.task_of("worked word problems" if data is None else data.name, test_rows, ("hash",))
    answered = {}
    for system in plan.systems:
        with console.status(f"{system.name} (compiling first)"):
            answered[system.name] = stages.answer(system, job, models, task)

    source = "generated word problems" if data is None else data.name
    facts = summary.describe(plan, model, tokenizer, trained, seed, source, questions)
    results = summary.summarise(plan, task, trained, answered, facts, dropped)
    results["wall_seconds"] = time.perf_counter() - began
    kept.write(out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
    report.write(out / "report.html", results)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Parses flags, runs, and returns the exit code: 0 done, 2 bad input, 130 stopped by a signal."""
    parser = cli.parser("python -m launch.quickstart", _HELP)
    parser.add_argument("--data", type=Path, help="JSONL or JSON file of rows (default: generated word problems)")
    parser.add_argument("--out", type=Path,
                        help="directory of this run (default: runs/quickstart; with --data runs/<name of the file>)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--study", choices=sorted(PLANS), default="systems",
                        help="which models are trained and answer (default: %(default)s)")
    parser.add_argument("--budget", choices=sorted(systems.PLAN.budgets), default="standard",
                        help="how large the job is (default: %(default)s)")

    def work(options: argparse.Namespace) -> int:
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed}: must be 0 or more")
        plan, out = PLANS[options.study], options.out or default_out(options.data, options.study)
        try:
            results = run(options.data, out, options.seed, plan.budgets[options.budget], plan)
        except (stages.Stopped, KeyboardInterrupt) as stop:
            print(stop or "stopped; the same command continues", file=sys.stderr)
            return 130
        console.print(report.table(results["systems"]))
        console.print(f"results: {out / 'results.json'}\nreport:  {out / 'report.html'}")
        if plan is systems.PLAN:
            console.print(_NEXT.format(out=out), markup=False, soft_wrap=True)
        return 0

    return cli.main(parser.parse_args, work, argv)
