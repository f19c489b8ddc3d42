"""Tables of both operations on whatever device is there: `python -m pallas_kernels.benchmark`.

Attention first, then the gated delta rule, one group per diffusion block size; a group's rows are printed, and the
output file written anew, as soon as it is measured, so that a run that is cut short keeps what it has. Inside a group
the entries take turns.

Columns: best and median milliseconds of a call, forward plus backward (decode shapes: forward), device-synchronised,
compile apart; temporaries the compiler reserves; `x single`: best time over that of the fastest single-stream form here
on the clean tokens alone; `TFLOP/s`: products on visible pairs only, 4 N H a pair forward and 10 backward; `of causal`:
that rate over the fastest causal attention of jax itself at the same head width.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, timing
from pallas_kernels.attention import arg_specs as attention_specs
from pallas_kernels.attention.api import block_mask_attention
from pallas_kernels.gated_delta import arg_specs as delta_specs
from pallas_kernels.gated_delta.api import FORMS, two_stream_gated_delta
from pallas_kernels.gated_delta.streams import Stream, check_blocks
from pallas_kernels.timing import Entry, compile_entry, fastest, measure, reason

CHUNK = 64
# tile edges worth a try where no measurement has picked one yet
GPU_EDGES = ((64, 64), (128, 64), (64, 128))


# a single-stream kernel from elsewhere: clean stream -> (run, wait); raises if it is not installed or cannot run here
Peer = Callable[[Stream], tuple[Callable[[], Any], Callable[[Any], Any]]]


def _delta_training(form, backend, block_size, views):
    """Outputs and input gradients for cotangents of ones."""
    def step(clean, noisy):
        def run(clean, noisy):
            result = two_stream_gated_delta(clean, noisy if views else None, block_size=block_size, chunk_size=CHUNK,
                                            form=form, backend=backend)
            return (result.out, result.noisy_out) if views else result.out
        outputs, pullback = jax.vjp(run, clean, noisy)
        return outputs, pullback(jax.tree.map(jnp.ones_like, outputs))
    return step


def gated_delta_groups(shape_name: str, block_sizes, forms, singles, rounds: int, calls: int, peers: dict[str, Peer]):
    """Measures every form at every block size, and the single stream alone.

    Args:
      shape_name: a key of `gated_delta.arg_specs.SHAPES`.
      block_sizes: diffusion block sizes.
      forms: names from FORMS; a folded form may name its backend, "folded:gpu".
      singles: the forms to measure on the clean stream alone.
      rounds, calls: as for `measure`.
      peers: single-stream kernels from elsewhere by name.
    Yields:
      Lists of rows: the single-stream kernels, then one list per block size.
    """
    shape = delta_specs.SHAPES[shape_name]
    clean, noisy = delta_specs.random_streams(shape)
    split = lambda form: (form.partition(":")[0], form.partition(":")[2] or None)
    note = lambda form: " (XLA backward)" if form.endswith(":gpu") else ""
    label = lambda form, block: {"operation": "gated_delta", "form": form + note(form), "block_size": block}
    alone = [compile_entry(label(f"single {form}", None), _delta_training(*split(form), 1, 0), (clean, noisy))
             for form in singles]
    others = []
    for name, peer in peers.items():
        try:
            others.append(Entry(label(f"single {name}", None), *peer(clean)))
        except Exception as error:
            others.append(Entry({**label(f"single {name}", None), "failed": reason(error)}, None))

    def with_ratios(rows, single):
        for row in rows:
            if single and "best_ms" in row:
                row["ratio"] = row["best_ms"] / single
        return rows
    rows = measure(alone + others, rounds, calls)
    yield with_ratios(rows, fastest(rows[:len(alone)]))
    for block in block_sizes:
        entries = [compile_entry(label(form, block), _delta_training(*split(form), block, shape.views), (clean, noisy))
                   for form in forms]
        rows = measure(alone + entries, rounds, calls)
        yield with_ratios(rows[len(alone):], fastest(rows[:len(alone)]))


def visible_pairs(mask) -> int:
    """Pairs of a query and a key it sees, over all batch rows."""
    return int(np.asarray(jax.jit(lambda m: jnp.sum(m.dense(), -1, dtype=jnp.int32))(mask)).sum(dtype=np.int64))


def attention_rows(shape_names, rounds: int, calls: int) -> list[dict]:
    """Measures block-mask attention on named shapes, and jax's own causal attention at causal ones.

    Args:
      shape_names: keys of `attention.arg_specs.SHAPES`.
      rounds, calls: as for `measure`.
    Returns:
      One dict per form and shape.
    """
    on_gpu = jax.default_backend() == "gpu"

    def step(attend, decode):
        if decode:
            return attend

        def training(q, k, v, mask):
            out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
            return out, pullback(jnp.ones_like(out))
        return training
    entries = []
    for name in shape_names:
        shape = attention_specs.SHAPES[name]
        inputs, decode = attention_specs.random_inputs(shape), shape.layout == "decode"
        work = (4 if decode else 14) * visible_pairs(inputs[3]) * shape.query_heads * shape.width
        forms = {"block_mask": functools.partial(block_mask_attention)}
        if on_gpu:
            forms = {"block_mask:xla": functools.partial(block_mask_attention, backend="xla")} | {
                f"block_mask:gpu {q}x{k}": functools.partial(block_mask_attention, backend="gpu", block_q=q, block_k=k)
                for q, k in GPU_EDGES}
        if shape.layout == "causal":
            native = lambda q, k, v, _, which: jax.nn.dot_product_attention(q, k, v, is_causal=True,
                                                                            implementation=which)
            forms |= {f"jax.nn:{which}": functools.partial(native, which=which)
                      for which in ("xla", *["cudnn"] * on_gpu)}
        for form, attend in forms.items():
            row = {"operation": "attention", "form": f"{form} {name}", "block_size": None, "work": work,
                   "width": shape.width}
            entries.append(compile_entry(row, step(attend, decode), inputs))
    rows = measure(entries, rounds, calls)
    for row in rows:
        if "best_ms" in row:
            row["tflops"] = row["work"] / row["best_ms"] / 1e9
    for row in rows:
        best = max((r["tflops"] for r in rows
                    if r["form"].startswith("jax.nn") and r["width"] == row["width"] and "tflops" in r), default=None)
        if best and "tflops" in row:
            row["share"] = row["tflops"] / best
    return rows


def format_table(rows: list[dict]) -> str:
    """A Markdown table of measured rows."""
    lines = ["| operation | form | B | best ms | median ms | temporaries MiB | x single | TFLOP/s | of causal |",
             "|---" * 9 + "|"]
    show = lambda value, digits: "" if value is None else f"{value:.{digits}f}"
    for row in rows:
        get = row.get
        cells = (row["operation"], row["form"], row["block_size"] or "", get("failed") or show(get("best_ms"), 2),
                 show(get("median_ms"), 2), show(get("temporary_mib"), 1), show(get("ratio"), 2),
                 show(get("tflops"), 2), show(get("share"), 2))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _defaults() -> dict[str, Any]:
    """What to measure on this platform: the paper's shape on an accelerator, by every backend that runs there."""
    platform_name = jax.default_backend()
    if platform_name == "cpu":
        return {"shape": "reduced", "forms": ["folded", "route_i", "route_ii"],
                "attention": ["reduced_causal", "reduced"], "rounds": 5, "calls": 1}
    kernel = [f"folded:{platform_name}"] if platform_name in dispatch.BACKENDS else []
    return {"shape": "paper", "forms": ["folded:xla", *kernel, "route_i", "route_ii"],
            "attention": ["causal_128", "two_stream_128", "causal_256", "two_stream_256", "decode_128"],
            "rounds": 10, "calls": 10}


def _parser(program: str) -> argparse.ArgumentParser:
    default = _defaults()
    p = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default=default["shape"], choices=sorted(delta_specs.SHAPES),
                   help="default here: %(default)s")
    p.add_argument("--blocks", type=int, nargs="*", default=list(delta_specs.BLOCK_SIZES), help="diffusion block sizes")
    p.add_argument("--forms", nargs="*", default=default["forms"],
                   help=f"of {', '.join(FORMS)}; folded:BACKEND insists on {', '.join(dispatch.BACKENDS)} "
                        "(default here: %(default)s)")
    p.add_argument("--attention", nargs="*", default=default["attention"], choices=sorted(attention_specs.SHAPES),
                   metavar="SHAPE", help=f"of {', '.join(attention_specs.SHAPES)} (default here: %(default)s)")
    p.add_argument("--rounds", type=int, default=default["rounds"],
                   help="timed samples of each entry (default: %(default)s)")
    p.add_argument("--calls", type=int, default=default["calls"], help="calls per sample (default here: %(default)s)")
    p.add_argument("--output", default=None, help="write the table (.md) or the rows (.json) here")
    return p


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, found before anything is measured."""
    for block in options.blocks:
        try:
            check_blocks(block, CHUNK)
        except ValueError as error:
            return f"--blocks: {error}"
    for form in options.forms:
        name, colon, backend = form.partition(":")
        if name not in FORMS or colon and (name != "folded" or backend not in dispatch.BACKENDS):
            return (f"--forms {form}: accepted are {', '.join(FORMS)}, and folded:BACKEND with "
                    f"{', '.join(dispatch.BACKENDS)}")
    for name in ("rounds", "calls"):
        if getattr(options, name) < 1:
            return f"--{name} {getattr(options, name)}: at least 1"
    if options.output:
        folder = os.path.dirname(os.path.abspath(options.output))
        if os.path.isdir(options.output) or not os.access(folder, os.W_OK):
            return f"--output {options.output}: no file can be written there"
    return None


def main(argv: list[str] | None = None, program: str = "python -m pallas_kernels.benchmark",
         peers: dict[str, Peer] | None = None) -> list[dict]:
    """Parses options, prints the table group by group, and writes it with versions and command if asked to.

    Args:
      argv: arguments, the process's when None.
      program: how this was called, for the record.
      peers: single-stream kernels from elsewhere to time beside ours, by name.
    Returns:
      The rows.
    Raises:
      SystemExit: code 2 for bad options.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(program)
    options = parser.parse_args(argv)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    record = {**timing.record(" ".join([program, *argv])), "shape": options.shape,
              "dimensions": delta_specs.SHAPES[options.shape]._asdict(), "rounds": options.rounds,
              "calls": options.calls}
    print(json.dumps(record), format_table([]), sep="\n", flush=True)
    rows: list[dict] = []

    def add(group):
        rows.extend(group)
        for line in format_table(group).splitlines()[2:]:
            print(line, flush=True)
        if options.output:
            with open(options.output, "w") as file:
                if options.output.endswith(".json"):
                    json.dump({**record, "rows": rows}, file, indent=1)
                else:
                    file.write(f"Command: `{record['command']}`\n\nRun: `{json.dumps(record)}`\n\n"
                               f"{format_table(rows)}\n")
    if options.attention:
        add(attention_rows(options.attention, options.rounds, options.calls))
    # Triton may take minutes over a kernel of this size: everything else is measured first
    late = [form for form in options.forms if form == "folded:gpu"]
    early = [form for form in options.forms if form not in late]
    for forms in filter(None, (early, late)):
        singles = [form for form in early + (late if forms is late else []) if form.startswith("folded")] or ["folded"]
        for group in gated_delta_groups(options.shape, options.blocks, forms, singles, options.rounds, options.calls,
                                        peers or {}):
            add(group)
    return rows


if __name__ == "__main__":
    main()
