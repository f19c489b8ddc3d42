"""One table of forms by block size on whatever device is there: `python -m pallas_kernels.benchmark`.

Times are forward plus backward, compile excluded, best and median of calls made in turn. Memory is what the compiler reserves for
temporaries. Ratios compare with the single-stream (autoregressive) chunkwise kernel on the clean tokens.
"""
from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp

from pallas_kernels.attention import arg_specs as attention_specs
from pallas_kernels.attention.api import block_mask_attention
from pallas_kernels.gated_delta import arg_specs as delta_specs
from pallas_kernels.gated_delta.api import two_stream_gated_delta


def _compile(label: dict, function, args) -> dict:
    """A labelled entry: the compiled program, its arguments, and what the compiler says it needs."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    memory = compiled.memory_analysis()
    return {**label, "compile_s": time.perf_counter() - start, "run": functools.partial(compiled, *args),
            "temporary_mib": None if memory is None else memory.temp_size_in_bytes / 2 ** 20}


def _time(entries: list[dict], rounds: int) -> list[dict]:
    """Times entries in turn, round after round, so that a busy spell of the machine falls on all of them; milliseconds."""
    times = [[] for _ in entries]
    for turn in range(rounds + 1):
        for entry, record in zip(entries, times):
            if "failed" in entry:
                continue
            start = time.perf_counter()
            try:
                jax.block_until_ready(entry["run"]())
            except jax.errors.JaxRuntimeError as error:  # a form may not fit the device; the others still count
                entry["failed"] = str(error).splitlines()[0][:200]
            if turn:  # the first call warms up
                record.append(1e3 * (time.perf_counter() - start))
    for entry, record in zip(entries, times):
        entry.pop("run", None)
        if "failed" not in entry:
            entry.update(best_ms=min(record), median_ms=statistics.median(record))
    return entries


def _delta_training(form, block_size, backend, views):
    """Outputs and input gradients for fixed cotangents."""
    def step(clean, noisy):
        def run(clean, noisy):
            result = two_stream_gated_delta(clean, noisy if views else None, block_size=block_size, form=form, backend=backend)
            return (result.out, result.noisy_out) if views else result.out
        outputs, pullback = jax.vjp(run, clean, noisy)
        return outputs, pullback(jax.tree.map(jnp.ones_like, outputs))
    return step


def gated_delta_rows(shape_name: str, block_sizes, forms, rounds: int, backend: str | None = None) -> list[dict]:
    """Measures every form at every block size.

    Args:
      shape_name: a key of `gated_delta.arg_specs.SHAPES`.
      block_sizes: diffusion block sizes.
      forms: names from `gated_delta.api.FORMS`.
      rounds: timed calls per entry.
      backend: passed to the folded form; None picks by platform.
    Returns:
      One dict per entry; the first is the single-stream kernel.
    """
    shape = delta_specs.SHAPES[shape_name]
    streams = delta_specs.random_streams(shape)
    label = lambda form, block_size: {"operation": "gated_delta", "form": form, "block_size": block_size}
    entries = [_compile(label("single-stream", None), _delta_training("folded", 1, backend, 0), streams)]
    for block_size in block_sizes:
        for form in forms:
            step = _delta_training(form, block_size, backend if form == "folded" else None, shape.views)
            try:
                entries.append(_compile(label(form, block_size), step, streams))
            except jax.errors.JaxRuntimeError as error:
                entries.append({**label(form, block_size), "failed": str(error).splitlines()[0][:200]})
    rows = _time(entries, rounds)
    for row in rows:
        if "best_ms" in row:
            row["ratio"] = row["best_ms"] / rows[0]["best_ms"]
    return rows


def attention_rows(shape_names, rounds: int, backend: str | None = None) -> list[dict]:
    """Measures block-mask attention on named shapes, and jax's own causal attention beside causal ones (ratio: ours to it)."""
    def training(attend):
        def step(q, k, v, mask):
            out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
            return out, pullback(jnp.ones_like(out))
        return step
    entries = []
    for name in shape_names:
        shape = attention_specs.SHAPES[name]
        inputs = attention_specs.random_inputs(shape)
        label = lambda form: {"operation": "attention", "form": f"{form} {name}", "block_size": None}
        ours = training(lambda q, k, v, mask: block_mask_attention(q, k, v, mask, backend=backend))
        entries.append(_compile(label("block_mask"), ours, inputs))
        if shape.layout == "causal":
            native = training(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, is_causal=True))
            entries.append(_compile(label("jax.nn"), native, inputs))
    rows = _time(entries, rounds)
    for ours, native in zip(rows, rows[1:]):
        if native["form"].startswith("jax.nn") and "best_ms" in ours and "best_ms" in native:
            ours["ratio"] = ours["best_ms"] / native["best_ms"]
    return rows


def environment() -> dict:
    """Versions and device of this run."""
    device = jax.devices()[0]
    return {"jax": jax.__version__, "python": platform.python_version(), "platform": device.platform, "device": device.device_kind,
            "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}


def format_table(rows: list[dict]) -> str:
    """A Markdown table of measured rows."""
    lines = ["| operation | form | B | best ms | median ms | temporaries MiB | ratio |", "|---|---|---|---|---|---|---|"]
    show = lambda value, digits: "" if value is None else f"{value:.{digits}f}"
    for row in rows:
        cells = (row["operation"], row["form"], row["block_size"] or "", row.get("failed") or show(row.get("best_ms"), 1),
                 show(row.get("median_ms"), 1), show(row.get("temporary_mib"), 1), show(row.get("ratio"), 2))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict]:
    """Parses options, prints the table, and optionally writes it with versions and command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "reduced" if jax.default_backend() == "cpu" else "paper"
    parser.add_argument("--shape", default=default, choices=sorted(delta_specs.SHAPES))
    parser.add_argument("--blocks", type=int, nargs="*", default=list(delta_specs.BLOCK_SIZES))
    parser.add_argument("--forms", nargs="*", default=["folded", "route_i", "route_ii"])
    parser.add_argument("--attention", nargs="*", default=["reduced", "reduced_causal"] if default == "reduced"
                        else ["two_stream_128", "causal_128"], choices=sorted(attention_specs.SHAPES))
    parser.add_argument("--backend", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default=None, help="write the table (.md) or the rows (.json) here")
    options = parser.parse_args(argv)
    rows = gated_delta_rows(options.shape, options.blocks, options.forms, options.rounds, options.backend)
    rows += attention_rows(options.attention, options.rounds, options.backend)
    table = format_table(rows)
    header = json.dumps({**environment(), "shape": options.shape, "dimensions": delta_specs.SHAPES[options.shape]._asdict()})
    print(header, table, sep="\n")
    if options.output:
        command = "python -m pallas_kernels.benchmark " + " ".join(f"--{k} {' '.join(map(str, v)) if isinstance(v, list) else v}"
                                                                   for k, v in vars(options).items() if v not in (None, []))
        with open(options.output, "w") as file:
            if options.output.endswith(".json"):
                json.dump({"environment": environment(), "command": command, "rows": rows}, file, indent=1)
            else:
                file.write(f"Command: `{command}`\n\nEnvironment: `{header}`\n\n{table}\n")
    return rows


if __name__ == "__main__":
    main()
