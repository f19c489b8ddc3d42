"""The main job: from rows of text to answered questions, by every system that decodes the same task.

rows -> tokenizer -> autoregressive seed -> ReFusion -> held-out questions -> results.json and report.html
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import dlm_jax
from dlm_jax import decode
from dlm_jax.data import sources, word_problems
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.data.pipeline import Pipeline
from dlm_jax.evals import report, runner, tasks
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.objectives import autoregressive, refusion
from dlm_jax.train.config import TrainConfig, plain
from dlm_jax.train.loop import fit

_HELP = """\
Trains a tiny autoregressive Qwen3 on worked word problems, converts it to ReFusion, answers held-out questions
with both, and writes results.json and report.html.

examples:
  python -m launch.quickstart                     the whole job: 15 minutes or less on 2 idle cores
  python -m launch.quickstart --budget smoke      the same road in a minute, to poor models
  python -m launch.quickstart --data rows.jsonl   your rows; a tenth of them (256 at most) is held out

Rows are {"question", "answer"}, {"query", "response"} or {"messages": [...]}, one JSON object a line. Where all
answers end in "#### x" they are scored by x, otherwise by their whole text. The same command again continues
where the last one stopped.
"""

console = Console(highlight=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How large the job is.

    Attributes:
      rows: training rows generated. questions: held-out rows answered, at most.
      layers, width, intermediate, heads, kv_heads: shape of the model.
      vocabulary: largest number of token ids.
      batch_tokens: tokens a training step sees, padding included; longer rows make smaller batches.
      longest: tokens a row is cut to.
      learning_rates, steps: peak rate and optimiser steps by training.
    """

    rows: int = 40_000
    questions: int = 256
    layers: int = 4
    width: int = 128
    intermediate: int = 384
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 2048
    batch_tokens: int = 2304
    longest: int = 320
    learning_rates: dict[str, float] = dataclasses.field(default_factory=lambda: {"seed": 3e-3, "refusion": 3e-3})
    steps: dict[str, int] = dataclasses.field(default_factory=lambda: {"seed": 800, "refusion": 3200})


BUDGETS = {
    "standard": Budget(),
    "smoke": Budget(rows=400, questions=8, layers=2, width=32, intermediate=64, heads=2, kv_heads=1, vocabulary=400,
                    batch_tokens=640, longest=160, steps={"seed": 20, "refusion": 20}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One training of the list below.

    Attributes:
      name: of its folders, and in the budget. title, family: in the report; a family shares a colour.
      start: the training it continues; None starts from fresh parameters.
      objective: what it minimises.
    """

    name: str
    title: str
    family: str
    start: str | None
    objective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """One line of the table: a trained model and how it is decoded.

    Attributes:
      name: in the table. label: beside its point in the chart. family: whose colour and line it has.
      training: whose model it is.
      decoder: how it decodes.
      headline: named in the summary, the examples and the replay; the first one is the baseline.
    """

    name: str
    label: str
    family: str
    training: str
    decoder: Any
    headline: bool = False


MASK_ID = tokenizers.SPECIAL.index(tokenizers.MASK)

# A further system is one more entry in these two lists.
TRAININGS = (
    Training(name="seed", title="AR seed", family="AR", start=None, objective=autoregressive.Config()),
    # these answers are a few slots long: floor(tK) of them would never mask all, which is how decoding begins
    Training(name="refusion", title="ReFusion", family="ReFusion", start="seed",
             objective=refusion.Config(mask_id=MASK_ID, slot_sizes=(8,), masking="released")),
)


def _refusion(tau: float, headline: bool = False) -> System:
    decoder = decode.ReFusion(slot_size=8, block_length=16, slot_threshold=tau, token_threshold=tau)
    return System(name=f"ReFusion τ {tau}", label=f"τ {tau}", family="ReFusion", training="refusion", decoder=decoder,
                  headline=headline)


SYSTEMS = (
    System(name="AR", label="AR", family="AR", training="seed", decoder=decode.Autoregressive(), headline=True),
    _refusion(0.3), _refusion(0.6, headline=True), _refusion(0.8), _refusion(0.95),
)


# ---- what survives a stop: every result is a file that appears whole, under the key it was made for ----------


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def kept(path: Path, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the value kept in a file for this key, or makes and keeps it.

    Args:
      path: JSON file.
      key: plain values that decide the result.
      make: returns plain values.
    """
    key = plain(key)
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == key:
            return found["value"]
    value = plain(make())
    _write(path, json.dumps({"key": key, "value": value}, ensure_ascii=False, indent=1) + "\n")
    return value


def claim(out: Path, identity: dict[str, Any]) -> None:
    """Makes a directory the one of this run.

    Args:
      out: the directory; new, empty, or of the same run.
      identity: the options that decide the results.

    Raises:
      ValueError: it holds something else, or another run.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose another --out")
    path, identity = out / "run.json", plain(identity)
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        other = [f"{name}: {saved.get(name)!r} there, {identity[name]!r} here" for name in identity
                 if saved.get(name) != identity[name]]
        if other:
            raise ValueError(f"{out} holds another run ({'; '.join(other)}); choose another --out, or remove it")
    elif out.exists() and any(path.suffix != ".part" for path in out.iterdir()):
        raise ValueError(f"{out} holds files that are no quickstart run; choose another --out")
    else:
        _write(path, json.dumps(identity, indent=2) + "\n")


# ---- the stages ----------------------------------------------------------------------------------------------


def default_out(data: Path | None) -> Path:
    """Returns where a run goes that names no directory: rows of one's own are a run of their own."""
    return Path("runs") / ("quickstart" if data is None else data.stem)


def weights_of(out: Path, training: str) -> Path:
    """Returns where a run keeps a training's model."""
    return out / "models" / training


def make_rows(data: Path | None, seed: int, budget: Budget) -> tuple[list[sources.Row], list[sources.Row]]:
    """Returns training rows and held-out rows; no held-out question occurs in training.

    Args:
      data: the user's rows, None for generated word problems.
      seed: of the generator, or of the choice of held-out rows.
      budget: numbers of rows.

    Raises:
      ValueError: unreadable rows, or too few different questions to hold one back.
    """
    if data is None:
        return tuple([sources.parse_row(raw) for raw in word_problems.generate(count, seed=seed, split=split)]
                     for split, count in (("train", budget.rows), ("test", budget.questions)))
    rows = sources.read_rows(data)
    asked = [json.dumps(row.prompt_messages) for row in rows]
    questions = sorted(set(asked))
    if len(questions) < 2:
        raise ValueError(f"{data}: all rows ask the same; give at least 2 different questions, one of them to hold out")
    random.Random(seed).shuffle(questions)
    held = set(questions[:min(budget.questions, max(1, len(questions) // 10))])
    train, test = [], {}
    for question, row in zip(asked, rows):
        if question in held:
            test.setdefault(question, row)
        else:
            train.append(row)
    return train, list(test.values())


def _as_jsonl(rows: Sequence[sources.Row]) -> str:
    turns = lambda row: [*row.prompt_messages, {"role": "assistant", "content": row.response}]
    return "".join(json.dumps({"messages": turns(row)}, ensure_ascii=False) + "\n" for row in rows)


def make_tokenizer(out: Path, rows: Sequence[sources.Row], budget: Budget) -> Any:
    """Returns the run's tokenizer, trained on its training rows the first time."""
    folder = out / "tokenizer"
    if not (folder / "done").exists():
        tokenizers.save(tokenizers.train(tokenizers.texts_of(rows), budget.vocabulary), folder)
        (folder / "done").touch()
    return tokenizers.load(folder)


def make_model(tokenizer: Any, budget: Budget) -> Any:
    """Returns the module of the budget's shape."""
    return build.build(TransformerConfig(
        family="qwen3", vocab_size=len(tokenizer), hidden_size=budget.width, intermediate_size=budget.intermediate,
        num_layers=budget.layers, num_heads=budget.heads, num_kv_heads=budget.kv_heads,
        head_dim=budget.width // budget.heads, rope_theta=1e4, tie_word_embeddings=True, initializer_range=0.05,
        max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id))


def answerable(rows: Sequence[sources.Row], tokenizer: Any, most: int) -> list[sources.Row]:
    """Returns the rows whose prompt leaves the model room for an answer.

    Args:
      rows: held-out rows.
      tokenizer: of the run.
      most: longest prompt, tokens.

    Raises:
      ValueError: none does.
    """
    lengths = [len(tokenizers.encode_prompt(tokenizer, row.prompt_messages)) for row in rows]
    if min(lengths) > most:
        raise ValueError(f"every held-out question is too long: the shortest has {min(lengths)} tokens, the model "
                         f"answers prompts of {most} at most; shorten the questions")
    return [row for row, length in zip(rows, lengths) if length <= most]


class Stopped(Exception):
    """A signal ended a training early; what it had is saved."""


def train(training: Training, out: Path, model: Any, rows: Sequence[sources.Row], tokenizer: Any, length: int,
          seed: int, budget: Budget) -> tuple[Any, dict[str, Any]]:
    """Trains one model, or continues or reads it where it exists.

    Args:
      training: what to train.
      out: the run's directory.
      model: the module.
      rows: training rows.
      tokenizer: of the run.
      length: T, tokens.
      seed: of parameters, shuffles and corruption.
      budget: steps and rates.

    Returns:
      The parameters, and plain values: steps, batch_size, seconds, curve, data (see `Pipeline.report`).

    Raises:
      Stopped: by a signal.
    """
    weights = weights_of(out, training.name)
    steps = budget.steps[training.name]

    def run() -> dict[str, Any]:
        start = time.perf_counter()
        if training.start is None:
            params = build.init_params(model, jax.random.key(seed))
        else:
            params = dlm_jax.load(weights_of(out, training.start))[1]
        devices = jax.device_count()
        batch_size = max(1, budget.batch_tokens // length // devices) * devices
        pipeline = Pipeline(rows, tokenizer, batch_size=batch_size, length=length, seed=seed)
        result = fit(
            model, params, pipeline,
            TrainConfig(objective=training.objective, steps=steps, batch_size=batch_size,
                        learning_rate=budget.learning_rates[training.name], warmup_steps=min(50, steps), beta2=0.98,
                        weight_decay=0.05, seed=seed, checkpoint_every=200, keep=2, log_every=10),
            out / "training" / training.name, resume=True)
        if not result.finished:
            raise Stopped(f"{training.title} stopped at step {result.step}; the same command continues from there")
        dlm_jax.save(weights, model, result.params, tokenizer_from=tokenizer, overwrite=True)
        parts = sorted({name for line in result.history for name in line if name.startswith("loss_")})
        names = ["loss", *(parts if len(parts) > 1 else [])]
        return {"steps": steps, "batch_size": batch_size, "seconds": time.perf_counter() - start,
                "curve": {name: [[line["step"], line[name]] for line in result.history] for name in names},
                "data": pipeline.report()}

    summary = kept(out / "training" / f"{training.name}.json", {"training": repr(training), "steps": steps}, run)
    return dlm_jax.load(weights)[1], summary


def answer(system: System, out: Path, model: Any, params: Any, tokenizer: Any, task: tasks.Task, room: int,
           seed: int) -> dict[str, Any]:
    """Answers the held-out questions with one system.

    Returns:
      Plain values: row (see `runner.evaluate`), answers, and for headline systems a replay of the first questions.
    """

    def run() -> dict[str, Any]:
        row, answers = runner.evaluate(system.name, system.decoder, model, params, tokenizer, task,
                                       max_new_tokens=room, seed=seed)
        tracks = [runner.replay(system.name, system.decoder, model, params, tokenizer, question, max_new_tokens=room,
                                seed=seed) for question in task.rows[:3 if system.headline else 0]]
        return {"row": {**row, "family": system.family, "label": system.label, "headline": system.headline},
                "answers": [dataclasses.asdict(each) for each in answers],
                "tracks": [{**track, "family": system.family} for track in tracks]}

    file = "".join(c if c.isalnum() or c in "._" else "-" for c in system.name)
    return kept(out / "systems" / f"{file}.json", {"system": repr(system), "room": room}, run)


def summarise(title: str, task: tasks.Task, trained: dict[str, Any], answered: dict[str, Any],
              facts: list[list[str]], dropped: int) -> dict[str, Any]:
    """Joins the stages' results into what results.json holds and the report shows."""
    heads = [system.name for system in SYSTEMS if system.headline]
    series = {"loss": "whole", "loss_ar": "autoregressive part", "loss_mdm": "denoising part"}
    wrong = [i for i in range(len(task.rows)) if not all(answered[name]["answers"][i]["right"] for name in heads)]
    shown = [*wrong[:2], *(i for i in range(len(task.rows)) if i not in wrong)][:4]
    question = lambda i: {"question": task.rows[i].prompt_messages[-1]["content"], "expected": task.rows[i].response}
    return {
        "title": title,
        "task": {"name": task.name, "metric": task.metric, "questions": len(task.rows), "dropped": dropped},
        "systems": [answered[system.name]["row"] for system in SYSTEMS],
        "trainings": [{"name": t.name, **trained[t.name]} for t in TRAININGS],
        "curves": [{"name": t.title, "family": t.family,
                    "series": {series.get(name, name): points for name, points in trained[t.name]["curve"].items()}}
                   for t in TRAININGS],
        "replays": [{**question(i), "tracks": [answered[name]["tracks"][i] for name in reversed(heads)]}
                    for i in range(len(answered[heads[0]]["tracks"]))],
        "examples": [{**question(i), "answers": [
            {"system": name, **{k: answered[name]["answers"][i][k] for k in ("text", "right")}} for name in heads]}
            for i in shown],
        "facts": facts,
    }


def describe(model: Any, tokenizer: Any, trained: dict[str, Any], seed: int, source: str, questions: str,
             ) -> list[list[str]]:
    """Returns the facts at the foot of the report."""
    c, data = model.config, trained[TRAININGS[0].name]["data"]
    size = sum(x.size for x in jax.tree.leaves(build.abstract_params(model)))
    spaced = lambda n: f"{n:,}".replace(",", "\u202f")
    cut = f"{spaced(data['truncated'])} cut short" if data["truncated"] else "none cut short"
    return [
        ["Model", f"{c.family}, {c.num_layers} layers, width {c.hidden_size}, {size / 1e6:.2f} M parameters"],
        ["Rows", f"{source}; {spaced(data['rows'])} to train on"],
        ["Held-out questions", questions],
        ["Padding and truncation",
         f"{100 * data['padding_share']:.0f} % padding, {cut}, {data['empty']} left without an answer"],
        ["Tokenizer", f"byte-level BPE, {spaced(len(tokenizer))} ids, every digit alone"],
        *([t.title, f"{spaced(trained[t.name]['steps'])} steps of {trained[t.name]['batch_size']} rows, "
           f"{trained[t.name]['seconds']:.0f} s"] for t in TRAININGS),
        ["Software", f"jax {jax.__version__} on {os.cpu_count()} × {jax.default_backend()}, "
                     f"Python {platform.python_version()}"],
        ["Seed", str(seed)],
    ]


def show(results: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("system")
    for name in ("accuracy", "tokens / forward", "tokens / s", "in batches"):
        table.add_column(name, justify="right")
    for row in results["systems"]:
        rate = row["tokens_per_forward"]
        table.add_row(row["name"], f"{100 * row['accuracy']:.1f} %", f"{rate:.2f}" if rate else "-",
                      f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second_batched']:,.0f}")
    console.print(table)


def run(data: Path | None, out: Path, seed: int, budget: Budget) -> dict[str, Any]:
    """Does the whole job, or what is left of it.

    Args:
      data: the user's rows, None for generated word problems.
      out: directory of this run.
      seed: of everything random.
      budget: how large.

    Returns:
      What results.json holds.

    Raises:
      ValueError: bad rows, or a directory that holds something else.
      Stopped: by a signal, with everything so far saved.
    """
    began = time.perf_counter()
    train_rows, test_rows = make_rows(data, seed, budget)
    digest = hashlib.sha256((_as_jsonl(train_rows) + _as_jsonl(test_rows)).encode()).hexdigest()[:16]
    claim(out, {"data": "word problems" if data is None else data.name, "rows": digest, "seed": seed,
                "budget": dataclasses.asdict(budget)})
    stages, stage = len(TRAININGS) + 2, iter(range(1, 99))
    head = lambda text: console.print(f"[bold]\\[{next(stage)}/{stages}][/bold] {text}")

    head(f"rows and tokenizer: {len(train_rows)} rows to train on, {len(test_rows)} questions held out")
    for name, rows in (("train", train_rows), ("test", test_rows)):
        if not (out / "data" / f"{name}.jsonl").exists():
            _write(out / "data" / f"{name}.jsonl", _as_jsonl(rows))
    tokenizer = make_tokenizer(out, train_rows, budget)
    model = make_model(tokenizer, budget)
    sizes = [(len(p), len(r)) for p, r in tokenizers.encode_rows(tokenizer, train_rows)]
    round_up = lambda n: -(-n // 8) * 8
    length = min(round_up(max(p + r for p, r in sizes)), budget.longest)
    room = min(round_up(max(r for _, r in sizes)), budget.longest)
    most, held = model.config.max_position_embeddings - room, len(test_rows)
    test_rows = answerable(test_rows, tokenizer, most)
    dropped = held - len(test_rows)
    questions = f"{len(test_rows)} answered, {dropped or 'none'} dropped for a prompt of over {most} tokens"
    if dropped:
        console.print(f"held-out questions: {questions}")

    trained, params = {}, {}
    for training in TRAININGS:
        head(f"train {training.title}: {budget.steps[training.name]} steps of rows of {length} tokens")
        params[training.name], trained[training.name] = train(
            training, out, model, train_rows, tokenizer, length, seed, budget)

    head(f"answer {len(test_rows)} questions with {len(SYSTEMS)} systems, up to {room} tokens each")
    task = tasks.task_of("worked word problems" if data is None else data.name, test_rows)
    answered = {}
    for system in SYSTEMS:
        with console.status(f"{system.name} (compiling first)"):
            answered[system.name] = answer(
                system, out, model, params[system.training], tokenizer, task, room, seed)

    source = "generated word problems" if data is None else data.name
    facts = describe(model, tokenizer, trained, seed, source, questions)
    results = summarise("dlm_jax quickstart", task, trained, answered, facts, dropped)
    results["wall_seconds"] = time.perf_counter() - began
    _write(out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
    report.write(out / "report.html", results)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Parses flags, runs, and returns the exit code: 0 done, 2 bad input, 130 stopped by a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.quickstart", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL or JSON file of rows (default: generated word problems)")
    parser.add_argument("--out", type=Path,
                        help="directory of this run (default: runs/quickstart; with --data runs/<name of the file>)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--budget", choices=sorted(BUDGETS), default="standard",
                        help="how large the job is (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed}: must be 0 or more")
        out = options.out or default_out(options.data)
        results = run(options.data, out, options.seed, BUDGETS[options.budget])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stop:
        print(stop or "stopped; the same command continues", file=sys.stderr)
        return 130
    show(results)
    console.print(f"results: {out / 'results.json'}\nreport:  {out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
