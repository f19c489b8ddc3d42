"""Masked-diffusion decoders: what each policy computes, how fast it is, and eager PyTorch beside it.

Examples:

    # random models of about 1 M and 50 M parameters
    python -m launch.benchmark masked --output masked.json

    # one size and other lengths
    python -m launch.benchmark masked --size 50m --prompt 128 --new-tokens 256 --steps 64

    # a trained model; eager PyTorch beside it if its body is Qwen2 or Qwen3
    python -m launch.benchmark masked --model runs/mine/model

`forwards` and `positions` are of the diffusion model (query positions evaluated, a row), those of a guide stand beside
them. Times are of whole calls on one prompt or batch, from lists of ids to lists of ids: medians over repeats, the
systems in turn, compile apart, everything in one run. `eager` is the same policy in eager PyTorch (transformers) on the
same weights, `same ids` how many tokens of the answer it shares with ours. A random model is as sure of one draft
as of another: rows of "steps" fix the forwards, the threshold is one that a share of the first drafts reaches, and a
guide agrees with nothing or with everything.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import dlm_jax
from dlm_jax import decode
from dlm_jax.models import build
from launch import cli
from launch.benchmark import results
from launch.benchmark.masked_systems import SIZES, random_guide, random_model, share_threshold, systems
from pallas_kernels import timing

# what is decoded where the command line does not say: a model of a million parameters gives short answers
SHAPES = {"1m": dict(prompt=32, new_tokens=64, block=8, steps=32)}
SHAPE = dict(prompt=64, new_tokens=128, block=32, steps=32)


def eager_network(model: Any, params: Any) -> Any:
    """Returns the same network in eager PyTorch; None without PyTorch, or for a body that transformers lacks."""
    try:
        from launch.benchmark import eager
    except ImportError:
        return None
    if model.config.family not in eager.BODIES:
        return None
    body = model.config.replace(family=eager.BODIES[model.config.family], logit_shift=None)
    with tempfile.TemporaryDirectory() as folder:
        dlm_jax.save(folder + "/model", build.build(body), params)
        return eager.load(folder + "/model")


def first_calls(options: argparse.Namespace, stacked: tuple[Any, Any], guide: tuple[Any, Any],
                prompts: list[list[int]], threshold: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs every system once, and eager PyTorch's loop where there is one.

    Args:
      options: the command line.
      stacked, guide: the model and the guide, with their parameters.
      prompts: of one length.
      threshold: of the rows that commit by confidence.

    Returns:
      What each counted, as rows of plain values, and the calls to be timed, by the system's name.
    """
    config, network = stacked[0].config, eager_network(*stacked)
    plain = build.unroll(*stacked)
    pair = decode.join(*plain, *build.unroll(*guide))
    rows, calls = [], {}
    for system, (decoder, same) in systems(options, threshold).items():
        target = pair if system.startswith("guided") else plain
        calls[system] = functools.partial(
            dlm_jax.generate, *target, prompts, decoder, max_new_tokens=options.new_tokens, eos_id=-1)
        cold = calls[system]()
        ledger = cold.ledger
        row = {"system": system, "forwards": int(ledger.after_prefill().max()),
               "positions": _a_row(ledger.positions, without="guide"), "compile_seconds": cold.seconds["compile"]}
        if ledger.forwards["guide"].any():
            row |= {"guide_forwards": int(ledger.forwards["guide"].max()),
                    "guide_positions": float(ledger.positions["guide"].mean())}
        if network is not None and same is not None:
            from launch.benchmark import eager

            calls[system + " eager"] = functools.partial(
                eager.decode, network, prompts, new_tokens=options.new_tokens, mask_id=config.mask_token_id,
                shift=config.shift, **same)
            answers, row["eager_forwards"] = calls[system + " eager"]()
            agree = sum(int(np.sum(np.asarray(a) == b)) for a, b in zip(answers, cold.tokens))
            row["same_ids"] = f"{agree}/{options.new_tokens * len(prompts)}"
        rows.append(row)
    return rows, calls


def measure(options: argparse.Namespace, stacked: tuple[Any, Any], name: str) -> dict[str, Any]:
    """Times every system on one model; returns the table as plain values.

    Args:
      options: the command line.
      stacked: the model and its parameters.
      name: of the model.
    """
    config = stacked[0].config
    guide = random_guide(config)
    draw = np.random.default_rng(0)
    usable = [i for i in range(config.vocab_size) if i not in (config.mask_token_id, config.eos_token_id)]
    prompts = [draw.choice(usable, options.prompt).tolist() for _ in range(options.batch)]
    threshold = share_threshold(*stacked, prompts[0], options.block, options.block_share)
    rows, calls = first_calls(options, stacked, guide, prompts, threshold)
    taken = timing.seconds(calls, options.repeats, warm_up=False)  # each has run once
    tokens = options.new_tokens * len(prompts)
    for row in rows:
        wall, eager = taken[row["system"]], taken.get(row["system"] + " eager")
        row |= {"tokens_per_second": tokens / wall, "ms_per_forward": 1e3 * wall / row["forwards"],
                "times_vanilla": taken["vanilla"] / wall}
        if eager is not None:
            row |= {"eager_tokens_per_second": tokens / eager, "times_eager": eager / wall,
                    "eager_ms_per_forward": 1e3 * eager / row["eager_forwards"]}
    count = lambda params: sum(x.size for x in jax.tree.leaves(params))
    return {"model": name, "parameters": count(stacked[1]), "guide_parameters": count(guide[1]),
            "batch": len(prompts), "prompt": options.prompt, "new_tokens": options.new_tokens,
            "block_length": options.block, "steps": options.steps, "threshold": threshold, "rows": rows}


def _a_row(positions: dict[str, np.ndarray], without: str) -> float:
    return float(sum(value.mean() for kind, value in positions.items() if kind != without))


COLUMNS = {"system": "system", "forwards": "forwards", "positions": "positions", "tokens_per_second": "tokens / s",
           "ms_per_forward": "ms a forward", "eager_tokens_per_second": "eager tokens / s",
           "eager_ms_per_forward": "eager ms a forward", "times_eager": "times eager", "same_ids": "same ids"}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table of one model."""
    r = result
    millions = lambda name: f"{r[name] / 1e6:.1f} M parameters"
    table = Table(title=f"{r['model']}: {millions('parameters')}, guide of {millions('guide_parameters')}, "
                        f"prompt {r['prompt']}, answer {r['new_tokens']}, batch {r['batch']}")
    for name, title in COLUMNS.items():
        table.add_column(title, justify="left" if name == "system" else "right", no_wrap=name == "system")
    cell = lambda v: "" if v is None else f"{v:.3g}" if isinstance(v, float) and v < 100 else v if isinstance(
        v, str) else f"{v:.0f}"
    for row in r["rows"]:
        shown = dict(row)
        for name in ("forwards", "positions"):
            if f"guide_{name}" in row:
                shown[name] = f"{cell(row[name])} + {cell(row[f'guide_{name}'])}"
        table.add_row(*(cell(shown.get(name)) for name in COLUMNS))
    console.print(table)


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.benchmark masked", __doc__)
    p.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["1m", "50m"],
                   help="random models to measure (default: 1m 50m)")
    p.add_argument("--model", metavar="PATH", help="a bidirectional model to measure in place of random ones")
    p.add_argument("--batch", type=int, default=1, help="prompts decoded at once (default: %(default)s)")
    for name, what in (("prompt", "prompt length, tokens"), ("new-tokens", "answer length, tokens"),
                       ("block", "block length, tokens"), ("steps", "forwards of an answer, where fixed")):
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=int, help=f"{what} (default: {SHAPE[key]}; for 1m {SHAPES['1m'][key]})")
    p.add_argument("--block-share", type=float, default=0.9, metavar="SHARE",
                   help="share of a first block's drafts that reach the threshold (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="timed repeats of each number (default: %(default)s)")
    p.add_argument("--output", metavar="FILE", help="write the tables as JSON")
    return p


def shaped(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Returns the options with the shape that a model of this name has where they leave it open."""
    default = SHAPE | SHAPES.get(name, {})
    return argparse.Namespace(**vars(options) | {
        key: default[key] if getattr(options, key) is None else getattr(options, key) for key in default})


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that make no benchmark."""
    cli.check_counts(options, "batch", "prompt", "new_tokens", "block", "steps", "repeats")
    blocks, rest = divmod(options.new_tokens, options.block)
    if rest:
        raise ValueError(f"--new-tokens {options.new_tokens}: a multiple of --block {options.block}")
    if options.steps % blocks or options.steps > options.new_tokens:
        raise ValueError(f"--steps {options.steps}: a multiple of the {blocks} blocks, at most {options.new_tokens}")
    if not 0 < options.block_share < 1:
        raise ValueError(f"--block-share {options.block_share}: between 0 and 1")


def check_model(config: Any, options: argparse.Namespace) -> None:
    """Raises ValueError for a model that no masked-diffusion decoder takes."""
    if not config.bidirectional or config.mask_token_id is None:
        what = "has no mask token" if config.bidirectional else "is causal"
        raise ValueError(f"--model {options.model}: this {config.family} model {what}; expected a masked-diffusion one "
                         "(launch.convert_weights to-diffusion makes one)")
    if options.prompt + options.new_tokens > config.max_position_embeddings:
        raise ValueError(f"--prompt {options.prompt} and --new-tokens {options.new_tokens} exceed the model's "
                         f"{config.max_position_embeddings} positions")


def run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Does what the command line says; `arguments` is what was typed."""
    result = {**results.begin("masked", arguments), "models": []}
    names = [options.model] if options.model else options.size
    each = {name: shaped(options, name) for name in names}
    for name in names:
        check(each[name])
    for name in names:
        if options.model:
            stacked = dlm_jax.load(options.model, dtype=jnp.float32)
            check_model(stacked[0].config, each[name])
        else:
            stacked = random_model(name)
        result["models"].append(measure(each[name], stacked, Path(name).name))
        show(result["models"][-1], Console(width=None if sys.stdout.isatty() else 120))
    results.write(options.output, result)


def main(arguments: list[str]) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    return cli.main(parser().parse_args, lambda options: run(options, arguments), arguments)
