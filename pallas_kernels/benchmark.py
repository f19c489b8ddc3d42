"""One table of forms by block size on whatever device is there: `python -m pallas_kernels.benchmark`.

Times are forward plus backward, compile excluded, best and median of repeated calls. Memory is what the compiler reserves for
temporaries. Ratios compare with the single-stream (autoregressive) chunkwise kernel on the clean tokens.
"""
from __future__ import annotations

import argparse
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


def _measure(function, args, repeats: int) -> dict:
    """Compiles, warms up and times a function of arrays; milliseconds and MiB."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_s = time.perf_counter() - start
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - start))
    memory = compiled.memory_analysis()
    return {"best_ms": min(times), "median_ms": statistics.median(times), "compile_s": compile_s,
            "temporary_mib": None if memory is None else memory.temp_size_in_bytes / 2 ** 20}


def _delta_training(form, block_size, backend, views):
    """Outputs and input gradients for fixed cotangents."""
    def step(clean, noisy):
        def run(clean, noisy):
            result = two_stream_gated_delta(clean, noisy if views else None, block_size=block_size, form=form, backend=backend)
            return (result.out, result.noisy_out) if views else result.out
        outputs, pullback = jax.vjp(run, clean, noisy)
        return outputs, pullback(jax.tree.map(jnp.ones_like, outputs))
    return step


def gated_delta_rows(shape_name: str, block_sizes, forms, repeats: int, backend: str | None = None) -> list[dict]:
    """Measures every form at every block size.

    Args:
      shape_name: a key of `gated_delta.arg_specs.SHAPES`.
      block_sizes: diffusion block sizes.
      forms: names from `gated_delta.api.FORMS`.
      repeats: timed calls per entry.
      backend: passed to the folded form; None picks by platform.
    Returns:
      One dict per entry; the first is the single-stream kernel.
    """
    shape = delta_specs.SHAPES[shape_name]
    clean, noisy = delta_specs.random_streams(shape)
    base = _measure(_delta_training("folded", 1, backend, 0), (clean, noisy), repeats)
    rows = [{"operation": "gated_delta", "form": "single-stream", "block_size": None, **base, "ratio": 1.0}]
    for block_size in block_sizes:
        for form in forms:
            try:
                row = _measure(_delta_training(form, block_size, backend if form == "folded" else None, shape.views),
                               (clean, noisy), repeats)
                row["ratio"] = row["best_ms"] / base["best_ms"]
            except jax.errors.JaxRuntimeError as error:  # a form may not fit the device; the others still count
                row = {"failed": str(error).splitlines()[0][:200]}
            rows.append({"operation": "gated_delta", "form": form, "block_size": block_size, **row})
    return rows


def attention_rows(shape_names, repeats: int, backend: str | None = None) -> list[dict]:
    """Measures block-mask attention on named shapes, and jax's own causal attention beside causal ones."""
    def training(attend):
        def step(q, k, v, mask):
            out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
            return out, pullback(jnp.ones_like(out))
        return step
    rows = []
    for name in shape_names:
        shape = attention_specs.SHAPES[name]
        inputs = attention_specs.random_inputs(shape)
        ours = training(lambda q, k, v, mask: block_mask_attention(q, k, v, mask, backend=backend))
        rows.append({"operation": "attention", "form": f"block_mask {name}", "block_size": None, **_measure(ours, inputs, repeats)})
        if shape.layout == "causal":
            native = training(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, is_causal=True))
            row = _measure(native, inputs, repeats)
            rows.append({"operation": "attention", "form": f"jax.nn {name}", "block_size": None, **row})
            rows[-2]["ratio"] = rows[-2]["best_ms"] / row["best_ms"]
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default=None, help="write the table (.md) or the rows (.json) here")
    options = parser.parse_args(argv)
    rows = gated_delta_rows(options.shape, options.blocks, options.forms, options.repeats, options.backend)
    rows += attention_rows(options.attention, options.repeats, options.backend)
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
