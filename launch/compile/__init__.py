"""What the TPU compiler thinks of a program, for TPUs that are not here: memory, time, and where the time goes.

Examples:

    # the paper's training step on 64 chips
    python -m launch.compile --config refusion:qwen3_8b --topology v5p:4x4x4 --mesh fsdp=16,tensor=4 \\
        --batch 64 --set train.grad_accumulation=4

    # a round of a decoder on one chip; eight rows whose caches hold 4,096 tokens
    python -m launch.compile --decode refusion --model qwen3_8b --batch 8 --cache 4096 --topology v6e:1x1

    # the same as JSON, with the compiler's own text and the schedule of every fusion kept
    python -m launch.compile --decode autoregressive --model qwen3_8b --topology v6e:2x4 --output ar.json --dump ar/

Nothing runs, and no TPU is needed, only its compiler (pip install '.[aot]'). Figures are a chip's and the compiler's
own, so they are the same on any machine and at any load. Decoders are compiled in bfloat16; runs start from bfloat16
and train float32. Kernels are compiled a second time, alone, for their schedules.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import cli
from launch.compile import environment


def parse(typed: Sequence[str]) -> argparse.Namespace:
    """Returns the options that were typed."""
    p = cli.parser("python -m launch.compile", __doc__)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="NAME", help="a training step of file:experiment of configs/")
    what.add_argument("--decode", metavar="NAME", help="a round of a decoder, e.g. refusion")
    p.add_argument("--model", metavar="NAME", help="shape in configs/, e.g. qwen3_8b; a wrong one lists them")
    p.add_argument("--topology", required=True, metavar="SLICE", help="e.g. v6e:2x4; a wrong one lists them")
    p.add_argument("--slices", type=int, default=1, help="so many such slices (default: %(default)s)")
    p.add_argument("--mesh", metavar="AXES", help="e.g. fsdp=16,tensor=4 (default: the experiment's, or heads)")
    p.add_argument("--batch", type=int, help="rows (default: the experiment's; 8)")
    p.add_argument("--length", type=int, help="tokens of a training row (default: the experiment's)")
    p.add_argument("--cache", type=int, help="entries a row of a decoder's cache, prompt and answer (default: 4096)")
    p.add_argument("--answer", type=int, help="tokens of them that are the answer's (default: 512)")
    p.add_argument("--layers", type=int, help="in place of the shape's")
    p.add_argument("--unroll", action="store_true", help="a decoder's layers one by one, see models.build.unroll")
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE",
                   help="field of the experiment or of the decoder; may be repeated")
    p.add_argument("--output", metavar="FILE", type=Path, help="write the report as JSON")
    p.add_argument("--dump", metavar="DIR", type=Path, help="keep the program and its schedules")
    p.add_argument("--kernels", metavar="FILE", type=Path, help="write the schedules of its kernels alone, as JSON")
    options = p.parse_args(typed)
    options.typed = list(typed)
    if options.decode and not options.model:
        p.error("--decode needs --model NAME, e.g. qwen3_8b")
    if options.unroll and options.config:
        p.error("--unroll goes with --decode")
    return options


def run(options: argparse.Namespace) -> int:
    """Compiles a program and reports it.

    Raises:
      ValueError: bad input, named, or a program that does not fit.
    """
    cli.check_counts(options, "slices", "batch", "length", "cache", "answer", "layers")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.dump or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        environment.prepare(folder if options.dump or options.kernels else None)
        from pallas_kernels import use_backend

        with use_backend("tpu"):
            found = _compile(options, folder)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found.get("fits", True) else 1


def _compile(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the report, and prints it; with --kernels only their schedules."""
    import jax

    from launch.compile import chips, kernels, programs, report

    jax.config.update("jax_enable_compilation_cache", False)
    chip, devices = chips.devices(options.topology, options.slices)
    job = (programs.training if options.config else programs.decoding)(options, devices)
    if options.kernels:
        found = kernels.compile_each(job.trace().jaxpr, options.topology, folder, job.rules)
        options.kernels.write_text(json.dumps(found))
        return found
    report.check_arguments(job, chip, len(devices))
    compiled, seconds = report.compile_it(job, chip)
    text = compiled.as_text()
    if options.dump:
        (folder / "program.hlo").write_text(text)
    own = {*kernels.of_text(text).values()} & {*kernels.of_jaxpr(job.trace().jaxpr)}  # XLA has some of its own
    schedules = kernels.ask(options.typed) if own else {}
    found = report.make(job, chip, len(devices), compiled, seconds, schedules)
    print(report.page(found, options.topology))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code: 0, 1 for a program that does not fit, 2 for bad input."""
    return cli.main(parse, run, arguments)
