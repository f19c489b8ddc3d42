"""Measure decoders and kernels on whatever device is here.

Examples:

    # AR and ReFusion on a random 60 M-parameter model, batch 1 and 8, beside eager PyTorch if torch is installed
    python -m launch.benchmark decode --output results.json

    # a smaller decoding benchmark, in seconds
    python -m launch.benchmark decode --width 128 --layers 2 --vocab 1024 --new-tokens 32

    # masked diffusion: vanilla, caches, thresholds, block diffusion and a guide, beside eager PyTorch's loops
    python -m launch.benchmark masked --output masked.json

    # the kernels: attention, and forms of the two-stream gated delta rule by block size; on an accelerator at the
    # paper's shape, beside cuDNN and, if it is installed, flash-linear-attention
    python -m launch.benchmark kernels --output kernels.md

Every number of a table comes from one run: medians over repeats, interleaved, device-synchronised, compile apart. A
file of results says when it was made, by which command and with which versions. `decode --help`, `masked --help` and
`kernels --help` list the options of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m launch.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "masked", "kernels"), help="what to measure")
    options = arguments[1:]
    what = parser.parse_args(arguments[:1]).what
    if what == "decode":
        from launch.benchmark import decode

        return decode.main(options)
    if what == "masked":
        from launch.benchmark import masked

        return masked.main(options)
    import jax

    from launch.benchmark.kernel_peers import PEERS
    from pallas_kernels import benchmark

    benchmark.main(options, "python -m launch.benchmark kernels", PEERS if jax.default_backend() == "gpu" else None)
    return 0
