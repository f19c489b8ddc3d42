"""AsyncLane beside the samplers it replaces: the paper's Tables 1 to 6 in miniature, on a trained model.

Examples:

    # block-wise, threshold with dual cache, several blocks at once, coupled, commit-and-advance and AsyncLane
    python -m launch.benchmark lanes --model runs/quickstart-lanes/models/long --refresh-interval 2 --output lanes.json

    # what each mechanism and each boundary brings (Tables 5 and 6)
    python -m launch.benchmark lanes --model PATH --ablations --lengths 256

    # our own numbers, where the paper has none: every combination of some values
    python -m launch.benchmark lanes --model PATH --sweep rho_min=0.25,0.5 --sweep cache.refresh_interval=4,12

The model is a masked-diffusion one with its tokenizer; questions are generated word problems, or rows of --data.
`calls` are by Eq. 13, lanes of a group together; `forwards` are those executed, all lanes of a row in one. These and
query positions are counted a token of the answers. Times are of whole answers, compile apart, medians of passes in
which all systems take turns; "no lane free" counts boundaries where the table of lanes was full. All is from one run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch import cli
from launch.benchmark import results

COLUMNS = {
    "length": "length", "system": "system", "accuracy": "accuracy %", "tokens_per_second": "tokens / s",
    "range": "of passes", "tokens": "tokens", "calls": "calls / token", "forwards": "forwards / token",
    "positions": "positions / token", "fork_pairs": "fork pairs", "average_lead": "lead",
    "positive_lead_ratio": "positive", "overlap_ratio": "overlap", "refused": "no lane free", "quartiles": "splits"}


def systems(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the decoders that a command line asks for, by name; boundaries wait for the tokenizer."""
    from dlm_jax import decode, text
    from dlm_jax.decode import asynclane, names

    block = options.block
    rule, sure = (f"top {options.top_n}", decode.TopN(options.top_n)) if options.top_n else (
        "threshold", decode.Threshold(options.threshold))
    lanes = dict(block_size=block, lookahead=block, commit=sure, tau_future=options.threshold,
                 cache=asynclane.Compact(margin=block, refresh_interval=options.refresh_interval))
    full = decode.AsyncLane(boundary=options.boundary, **lanes)
    if options.sweep and options.ablations:
        raise ValueError("--sweep and --ablations ask for different rows: give one of them")
    if options.sweep:
        return {" ".join(settings): text.override(full, settings, names.parts(decode.AsyncLane), "--sweep")
                for settings in text.grid(options.sweep, "--sweep")}
    if options.ablations:
        half = max(block // 2, 1)
        without = full.replace(cache=full.cache.replace(reuse_refresh_logits=False))
        return {"AsyncLane": full, "without lookahead": full.replace(lookahead=0), "without reuse": without,
                "without both": without.replace(lookahead=0),
                "punctuation": full.replace(boundary="punctuation"),
                f"interval {half}": full.replace(boundary=asynclane.interval_boundary(half))}
    return {"block-wise": asynclane.blockwise(block_size=block),
            f"{rule}, dual cache": decode.fast_dllm(block_length=block, stop=decode.Fill(), commit=sure),
            "several blocks": decode.d3llm(block_length=block, threshold=options.entropy, cache=decode.Dual()),
            "coupled": asynclane.coupled(options.boundary, **lanes),
            "commit and advance": asynclane.commit_and_advance(options.boundary, **lanes), "AsyncLane": full}


def generator(decoder: Any, length: int, subject: Any, prompts: list[list[int]], options: argparse.Namespace
              ) -> Callable[[], Any]:
    """Returns what answers all questions with one decoder.

    Args:
      decoder: the system.
      length: longest answer, tokens.
      subject: model, parameters and tokenizer.
      prompts: token ids of the questions.
      options: the command line.
    """
    import dlm_jax

    model, params, tokenizer = subject
    return functools.partial(
        dlm_jax.generate, model, params, prompts, decoder.reading(tokenizer), max_new_tokens=length,
        batch_size=options.batch, eos_id=tokenizer.eos_token_id, mask_id=tokenizer.mask_token_id)


def measure(name: str, length: int, passes: Sequence[Any], tokenizer: Any, task: Any) -> dict[str, Any]:
    """Returns a system's row of the table.

    Args:
      name: of the system.
      length: longest answer, tokens.
      passes: what each pass over the questions gave; they differ in their times alone.
      tokenizer: of the model.
      task: the questions and their judge.
    """
    from dlm_jax.decode import asynclane

    out = passes[0]
    ledger, tokens = out.ledger, int(out.ledger.committed.sum())
    right = [task.judge(tokenizer.decode(ids, skip_special_tokens=True), row)[0]
             for ids, row in zip(out.tokens, task.rows)]
    every = sum(int(x.sum()) for x in ledger.forwards.values())
    each = lambda count: count / tokens if tokens else None  # answers may be empty
    rates = [made.tokens_per_second for made in passes]
    row = {"length": length, "system": name, "accuracy": 100 * sum(right) / len(right), "tokens": tokens,
           "tokens_per_second": statistics.median(rates), "range": f"{min(rates):.3g}-{max(rates):.3g}",
           "forwards": each(every), "positions": each(sum(int(x.sum()) for x in ledger.positions.values()))}
    if not out.record:
        return row | {"calls": each(every)}
    found = asynclane.diagnose(out.record)
    measured = {} if not found.pairs_measured else {
        field: getattr(found, field) for field in ("average_lead", "positive_lead_ratio", "overlap_ratio")}
    return row | measured | {
        "calls": each(int(asynclane.model_calls(ledger).sum())), "fork_pairs": found.fork_pairs,
        "refused": int(ledger.tallies["forks_refused"].sum()),
        "quartiles": " ".join(f"{q:g}" for q in found.split_quartiles)}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the table."""
    table = Table()
    used = [name for name in COLUMNS if any(name in row for row in rows)]
    for name in used:
        table.add_column(COLUMNS[name], justify="left" if name == "system" else "right", no_wrap=name == "system")
    cell = lambda v: "" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v)
    for row in rows:
        table.add_row(*(cell(row.get(name)) for name in used))
    console.print(table)


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.benchmark lanes", __doc__)
    p.add_argument("--model", metavar="PATH", required=True, help="a masked-diffusion model with its tokenizer")
    p.add_argument("--data", type=Path, metavar="FILE", help="rows with questions and answers (default: word problems)")
    p.add_argument("--questions", type=int, default=64, help="questions asked (default: %(default)s)")
    p.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512], metavar="N",
                   help="longest answers, tokens (default: 128 256 512)")
    p.add_argument("--batch", type=int, default=1, help="questions answered at once (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3,
                   help="passes over the questions, of whose times the median is told (default: %(default)s)")
    p.add_argument("--block", type=int, default=16, help="tokens of a block or lane (default: %(default)s)")
    p.add_argument("--threshold", type=float, default=0.9,
                   help="probability of commits and drafts ahead, but for several blocks (default: %(default)s)")
    p.add_argument("--top-n", type=int, default=0, metavar="N",
                   help="commit the N likeliest tokens of a lane a forward, instead of those above --threshold")
    p.add_argument("--entropy", type=float, default=0.3,
                   help="nats up to which several blocks, as d3LLM, commits (default: %(default)s)")
    p.add_argument("--refresh-interval", type=int, default=12, help="iterations (default: %(default)s)")
    p.add_argument("--boundary", choices=("code", "math", "punctuation"), default="math",
                   help="where lanes are split (default: %(default)s)")
    p.add_argument("--ablations", action="store_true", help="AsyncLane without each of its parts, and other boundaries")
    p.add_argument("--sweep", action="append", default=[], metavar="FIELD=A,B,C",
                   help="values of a field of AsyncLane; may be repeated, every combination is run")
    p.add_argument("--seed", type=int, default=0, help="of the word problems (default: %(default)s)")
    p.add_argument("--output", metavar="FILE", help="write the table as JSON")
    return p


def run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Does what the command line says; `arguments` is what was typed."""
    cli.check_counts(options, "questions", "batch", "block", "repeats")
    if min(options.lengths) < 1:
        raise ValueError(f"--lengths {min(options.lengths)}: at least 1")
    chosen = systems(options)

    import jax.numpy as jnp

    import dlm_jax
    from dlm_jax.data import sources, word_problems
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.evals import tasks
    from dlm_jax.io import folders

    rows = sources.read_rows(options.data)[: options.questions] if options.data else [
        sources.parse_row(raw) for raw in word_problems.generate(options.questions, seed=options.seed, split="test")]
    task = tasks.task_of(options.data.name if options.data else "word problems", rows)
    folder = folders.resolve(options.model)
    subject = (*dlm_jax.load(folder, dtype=jnp.float32), tokenizers.load(folder))
    result, console = {**results.begin("lanes", arguments), "rows": []}, Console(
        width=None if sys.stdout.isatty() else 160)
    prompts = [tokenizers.encode_prompt(subject[2], row.prompt_messages) for row in task.rows]
    for length in options.lengths:
        asked = {name: generator(decoder, length, subject, prompts, options) for name, decoder in chosen.items()}
        # the first pass compiles every shape; then systems take turns, for a machine is not as fast all the time
        passes = [{name: generate() for name, generate in asked.items()} for _ in range(1 + options.repeats)][1:]
        result["rows"] += [measure(name, length, [made[name] for made in passes], subject[2], task) for name in asked]
    show(result["rows"], console)
    results.write(options.output, result)


def main(arguments: list[str]) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    return cli.main(parser().parse_args, lambda options: run(options, arguments), arguments)
