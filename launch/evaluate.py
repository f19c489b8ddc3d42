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

Rows are {"question", "answer"}, {"query", "response"} or {"messages": [...]}, one JSON object a line. Where all
answers end in "#### x" they are scored by x, otherwise by their whole text. DIR gets results.json (accuracy, forwards
by kind, tokens a forward and a second), answers.jsonl (every answer beside its reference) and report.html.
`python -m launch.decode --list` prints the decoders and what --set reaches. Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from launch import cli
from launch.decode import add_decoder, check_guide, make_decoder, with_guide

FILES = ("results.json", "answers.jsonl", "report.html")


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m launch.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", metavar="PATH", required=True, help="Hugging Face directory or hub id (safetensors)")
    p.add_argument("--data", metavar="FILE", type=Path, required=True,
                   help="questions and their answers (.jsonl, .json)")
    p.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new directory for what is found")
    add_decoder(p)
    p.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")
    p.add_argument("--max-new-tokens", type=int, help="longest answer, tokens (default: the preset's, else 256)")
    p.add_argument("--batch-size", type=int, default=32, help="questions decoded at once (default: %(default)s)")
    p.add_argument("--timed", type=int, default=8, metavar="N",
                   help="questions decoded again, three times and one by one, to time an answer (default: %(default)s)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (default: as stored)")
    p.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    return p


def run(options: argparse.Namespace) -> None:
    """Does what the command line says.

    Args:
      options: from `parser`.

    Raises:
      ValueError: bad input, named, before the model is read where that can be.
    """
    from dlm_jax.data import sources

    decoder, length = make_decoder(options.decoder, options.settings, options.preset)
    decoder.check()
    check_guide(options.decoder, options.guide)
    room = next(n for n in (options.max_new_tokens, length, 256) if n is not None)
    for name, value in (("--max-new-tokens", room), ("--batch-size", options.batch_size), ("--timed", options.timed),
                        ("--limit", options.limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: at least 1")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"--out {options.out} exists already; give a new directory")
    rows = sources.read_rows(options.data)[:options.limit]

    import jax
    import jax.numpy as jnp

    import dlm_jax
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.evals import report, runner, tasks
    from dlm_jax.io import folders

    tokenizer = tokenizers.load(folders.resolve(options.model))
    dtype = None if options.dtype is None else jnp.dtype(options.dtype)
    model, params = with_guide(*dlm_jax.load(options.model, dtype=dtype), tokenizer, options.guide, dtype)
    task = tasks.task_of(options.data.name, rows)
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=console) as bar:
        shown = bar.add_task("compiling", total=None)
        row, answers = runner.evaluate(
            options.decoder, decoder, model, params, tokenizer, task, max_new_tokens=room,
            batch_size=min(options.batch_size, len(rows)), timed=options.timed, seed=options.seed,
            progress=lambda done, total: bar.update(shown, description="answering", completed=done, total=total))
    results = {
        "title": "dlm_jax evaluation",
        "task": {"name": task.name, "metric": task.metric, "questions": len(rows)},
        "systems": [{**row, "family": options.decoder, "label": options.decoder, "headline": True}],
        "curves": [], "replays": [],
        "examples": [{"question": a.question, "expected": a.expected,
                      "answers": [{"system": options.decoder, "text": a.text, "right": a.right}]}
                     for a in sorted(answers, key=lambda a: a.right)[:4]],
        "facts": [["Model", str(options.model)], ["Guide", options.guide or "none"], ["Rows", str(options.data)],
                  ["Longest answer", f"{room} tokens"],
                  ["Decoder", ", ".join(f"{k} {v}" for k, v in row["decoder"].items())],
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
    console.print(f"{row['correct']} of {len(rows)} right by {task.metric}; {options.out} holds {', '.join(FILES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    options = parser().parse_args(arguments)
    return cli.exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
