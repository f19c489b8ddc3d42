"""Lists released diffusion checkpoints: family, size, conventions, memory, default decoding, and how it was tested.

    python -m launch.models
    python -m launch.models sdar --sources
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch import cli

_HEADINGS = ("family", "parameters", "bf16", "int8", "prompt", "logits", "grid", "seed", "commit", "block", "tested by")
_GIB = 2**30


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    p = cli.parser("python -m launch.models", __doc__)
    p.add_argument("find", nargs="?", default="", metavar="TEXT", help="only families and hub ids with it in them")
    p.add_argument("--sources", action="store_true", help="name the decoder, and where its settings stand")
    return p.parse_args(arguments)


def rows(find: str) -> list:
    """Returns the checkpoints whose family or hub ids have a text in them.

    Raises:
      ValueError: there is none.
    """
    from configs.checkpoints import CHECKPOINTS

    found = [c for c in CHECKPOINTS if any(find.lower() in name.lower() for name in (c.model.family, *c.ids))]
    if not found:
        raise ValueError(f"no checkpoint has {find!r} in its family or hub id; families: "
                         f"{sorted({c.model.family for c in CHECKPOINTS})}")
    return found


def facts(checkpoint) -> tuple[str, ...]:
    """Returns what the table says of a checkpoint."""
    from dlm_jax.models import build

    config = checkpoint.model
    told, count = config.convention, build.parameter_shares(build.build(config))["total"]
    sizes = (f"{count / 1e9:.2f} B", f"{2 * count / _GIB:.1f} GiB", f"{count / _GIB:.1f} GiB")
    conventions = (told.prompt, told.logits, told.grid, told.seed, told.commit, str(config.block_size or "-"))
    return (config.family, *sizes, *conventions, checkpoint.tested)


def work(options: argparse.Namespace) -> int:
    """Prints the table."""
    found = rows(options.find)
    table = [_HEADINGS, *map(facts, found)]
    widths = [max(map(len, column)) for column in zip(*table)]
    line = lambda cells: "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
    print(line(table[0]))
    for checkpoint, cells in zip(found, table[1:]):
        print(line(cells))
        print("    " + ", ".join(checkpoint.ids))
        if checkpoint.note:
            print(f"    {checkpoint.note}")
        if options.sources:
            print(f"    {checkpoint.decoding.decoder}\n    {checkpoint.decoding.source}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    return cli.main(parse, work, arguments)


if __name__ == "__main__":
    main()
