"""Measure decoders and kernels on whatever device is here.

Examples:

    # AR and ReFusion on a random 60 M-parameter model, batch 1 and 8, beside eager PyTorch if torch is installed
    python -m launch.benchmark decode --output results.json

    # a smaller decoding benchmark, in seconds
    python -m launch.benchmark decode --width 128 --layers 2 --vocab 1024 --new-tokens 32

    # masked diffusion: vanilla, caches, thresholds, block diffusion and a guide, beside eager PyTorch's loops
    python -m launch.benchmark masked --output masked.json

    # AsyncLane beside block-wise, threshold, coupled and other samplers, on a trained model
    python -m launch.benchmark lanes --model runs/quickstart/models/masked --output lanes.json

    # the kernels: attention, and forms of the two-stream gated delta rule by block size; on an accelerator at the
    # paper's shape, beside cuDNN and, if it is installed, flash-linear-attention
    python -m launch.benchmark kernels --output kernels.md

Every number of a table comes from one run: medians over repeats, interleaved, device-synchronised, compile apart. A
file of results says when it was made, by which command and with which versions. `decode --help`, `masked --help`,
`lanes --help` and `kernels --help` list the options of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch import cli


def parse(typed: Sequence[str]) -> argparse.Namespace:
    """Returns what is to be measured, and the words behind it, which are options of its own."""
    parser = cli.parser("python -m launch.benchmark", __doc__)
    parser.add_argument("what", choices=("decode", "masked", "lanes", "kernels"), help="what to measure")
    return argparse.Namespace(**vars(parser.parse_args(typed[:1])), options=list(typed[1:]))


def run(asked: argparse.Namespace) -> int:
    """Runs a benchmark; returns the exit code."""
    if asked.what == "decode":
        from launch.benchmark import decode

        return decode.main(asked.options)
    if asked.what == "masked":
        from launch.benchmark import masked

        return masked.main(asked.options)
    if asked.what == "lanes":
        from launch.benchmark import lanes

        return lanes.main(asked.options)
    import jax

    from launch.benchmark.kernel_peers import PEERS
    from pallas_kernels import benchmark

    peers = PEERS if jax.default_backend() == "gpu" else None
    benchmark.main(asked.options, "python -m launch.benchmark kernels", peers)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code, 2 for bad input."""
    return cli.main(parse, run, arguments)
