"""AR and ReFusion on a random model, beside what bounds them from below.

Columns: `ms/forward` is the loop's wall time over its forwards; `bare` the same model call without the decoder
around it, in a loop of its own; `floor` only that call's matrix products, on the same weights; `eager` the same
call in eager PyTorch (transformers) on the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import dlm_jax
from dlm_jax.decode import Autoregressive, ReFusion
from dlm_jax.decode.request import bucket
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from launch import cli
from launch.benchmark import loops, results
from pallas_kernels import timing

SLOT, BLOCK = 8, 32  # of ReFusion
EAGER_CALLS = 16  # at most, of one timing
COLUMNS = ("system", "batch", "tokens_per_second", "tokens_per_forward", "ms_per_forward", "bare_ms", "floor_ms",
           "eager_ms", "compile_seconds")


def model_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns a random model of the size asked for."""
    heads = max(2, options.width // 64)
    config = TransformerConfig(
        vocab_size=options.vocab, hidden_size=options.width, intermediate_size=3 * options.width,
        num_layers=options.layers, num_heads=heads, num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=64, tie_word_embeddings=True, eos_token_id=0, mask_token_id=options.vocab - 1)
    model = build.build(config)
    return model, jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(0))


def systems() -> dict[str, tuple[Any, int | None]]:
    """Returns each system's decoder, and the queries of one of its forwards where they are always as many."""
    refusion = lambda tau: ReFusion(slot_size=SLOT, block_length=BLOCK, slot_threshold=0.0, token_threshold=tau)
    return {"AR": (Autoregressive(), 1), "ReFusion all accepted": (refusion(0.0), BLOCK + BLOCK // SLOT),
            "ReFusion none accepted": (refusion(1.0), None)}


def measure(options: argparse.Namespace, stacked: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Times every decoder at every batch size; returns the rows of the table as plain values."""
    model, params = build.unroll(*stacked)
    draw, rows = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        dlm_jax.save(folder + "/model", *stacked)
        for batch in options.batch:
            prompts = [draw.integers(1, options.vocab - 1, options.prompt).tolist() for _ in range(batch)]
            for name, (decoder, queries) in systems().items():
                answer = lambda: dlm_jax.generate(
                    model, params, prompts, decoder, max_new_tokens=options.new_tokens, eos_id=-1)
                cold, warm = answer(), []
                steps = int(cold.ledger.after_prefill().max())
                calls = {"loop": lambda: warm.append(answer())}
                if queries:
                    capacity = bucket(options.prompt) + decoder.capacity(bucket(options.new_tokens))
                    calls |= bounds(model, params, folder + "/model", (batch, queries, capacity), steps)
                taken = timing.seconds(calls, options.repeats)
                median = lambda of: float(statistics.median(of(each) for each in warm[1:]))
                rows.append({
                    "system": name, "batch": batch, "tokens_per_forward": cold.ledger.tokens_per_forward(),
                    "forwards": steps, "compile_seconds": cold.seconds["compile"],
                    "tokens_per_second": median(lambda out: out.tokens_per_second),
                    "ms_per_forward": 1e3 * median(lambda out: out.seconds["decode"]) / steps,
                    **{f"{key}_ms": 1e3 * taken[key] / (min(steps, EAGER_CALLS) if key == "eager" else steps)
                       for key in calls if key != "loop"}})
    return rows


def bounds(model: Any, params: Any, folder: str, shape: tuple[int, int, int], steps: int) -> dict[str, Any]:
    """Returns the calls that a decoder's loop is compared with, by name.

    Args:
      model, params: the model, its layers unrolled.
      folder: where it is saved, for PyTorch.
      shape: batch, queries of a forward, entries of the cache.
      steps: forwards of the decoder's loop.
    """
    bare, least = loops.bare_loop(model, *shape, steps), loops.floor_loop(model.config, *shape, steps)
    eager = loops.eager_call(folder, *shape)
    calls = {"bare": lambda: bare(params), "floor": lambda: least(params)}
    return calls | ({"eager": lambda: [eager() for _ in range(min(steps, EAGER_CALLS))]} if eager else {})


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a result as a table."""
    table = Table(title=f"{result['parameters'] / 1e6:.0f} M parameters on {result['environment']['device']}")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="left" if name == "system" else "right",
                         no_wrap=name == "system")
    cell = lambda v: "" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v)
    for row in result["rows"]:
        table.add_row(*(cell(row.get(name)) for name in COLUMNS))
    console.print(table)


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.benchmark decode", __doc__)
    p.add_argument("--width", type=int, default=512, help="hidden size, a multiple of 64 (default: %(default)s)")
    p.add_argument("--layers", type=int, default=16, help="layers (default: %(default)s)")
    p.add_argument("--vocab", type=int, default=16384, help="vocabulary (default: %(default)s)")
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    p.add_argument("--prompt", type=int, default=96, help="prompt length, tokens (default: %(default)s)")
    p.add_argument("--new-tokens", type=int, default=96, help="answer length, tokens (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=5, help="timed repeats of each number (default: %(default)s)")
    p.add_argument("--output", metavar="FILE", help="write the table as JSON")
    return p


def run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Does what the command line says; `arguments` is what was typed."""
    cli.check_counts(options, "layers", "vocab", "prompt", "new_tokens", "repeats")
    if options.width % 64 or options.width < 64:
        raise ValueError(f"--width {options.width}: a positive multiple of 64")
    stacked = model_of(options)
    result = {**results.begin("decode", arguments), "parameters": sum(x.size for x in jax.tree.leaves(stacked[1])),
              "rows": measure(options, stacked)}
    show(result, Console())
    results.write(options.output, result)


def main(arguments: list[str]) -> int:
    """Runs the benchmark; returns the exit status, 2 for bad input."""
    return cli.main(parser().parse_args, lambda options: run(options, arguments), arguments)
