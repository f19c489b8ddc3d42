"""Lists released diffusion checkpoints: family, size, conventions, memory, default decoding, and how it was tested.

    python -m launch.models
    python -m launch.models sdar --sources

A line says what all checkpoints of a family share, as `dlm_jax.conventions` has it: what a token of the prompt sees,
which output says what a mask stands for, where blocks are counted from, what they begin with, how a finished one is
run once more; then the tokens of a block. Below it, for every network: parameters, what they take in bfloat16 and
would at a byte each (quantised checkpoints are not read), the decoding that --preset takes, and whether a paper, a
card or code says so. Tested by "authors' code" means that tiny models of theirs give the same logits and answers
here, "their logits" that their decoding was compared over another body, "names, shapes" that those fit.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import textwrap
from collections.abc import Sequence

from launch import cli

_HEADINGS = ("parameters", "bf16 GiB", "int8 GiB", "decoding", "from", "tested by")
_GIB = 2**30


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    p = cli.parser("python -m launch.models", __doc__)
    p.add_argument("find", nargs="?", default="", metavar="TEXT", help="only families and hub ids with it in them")
    p.add_argument("--sources", action="store_true", help="name the decoder, and where its settings stand")
    return p.parse_args(arguments)


def rows(find: str) -> list:
    """Returns the checkpoints whose family or hub ids have a text in them, those of a family together.

    Raises:
      ValueError: there is none.
    """
    from configs.checkpoints import CHECKPOINTS

    families = list(dict.fromkeys(c.model.family for c in CHECKPOINTS))
    found = [c for c in CHECKPOINTS if any(find.lower() in name.lower() for name in (c.model.family, *c.ids))]
    if not found:
        raise ValueError(f"no checkpoint has {find!r} in its family or hub id; families: {sorted(families)}")
    return sorted(found, key=lambda c: families.index(c.model.family))


def shared(config) -> str:
    """Returns the line on what checkpoints of a family share."""
    told, block = config.convention, f"blocks of {config.block_size}" if config.block_size else ""
    said = () if told is None else (f"prompt {told.prompt}", f"logits {told.logits}", f"grid {told.grid}",
                                    f"seed {told.seed}", f"commit {told.commit}")
    return f"{config.family}: " + ", ".join(filter(None, (*said, block)))


def facts(checkpoint, presets: dict) -> tuple[str, ...]:
    """Returns what the table says of a checkpoint, given the settings by name."""
    from dlm_jax.models import build

    count = build.parameter_shares(build.build(checkpoint.model))["total"]
    preset = next(name for name, entry in presets.items() if entry is checkpoint.decoding)
    sizes = (f"{count / 1e9:.2f} B", f"{2 * count / _GIB:.1f}", f"{count / _GIB:.1f}")
    return (*sizes, preset, checkpoint.decoding.said_by, checkpoint.tested)


def work(options: argparse.Namespace) -> int:
    """Prints the table, as wide as the terminal."""
    from dlm_jax import text
    from launch import decoders

    found, presets = rows(options.find), decoders.presets()
    cells = {id(checkpoint): facts(checkpoint, presets) for checkpoint in found}
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *cells.values())]
    line = lambda row: "  " + "  ".join(
        cell.rjust(width) if place < 3 else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    wrapped = lambda text, depth: print(textwrap.fill(
        text, max(60, shutil.get_terminal_size().columns), initial_indent=" " * depth,
        subsequent_indent=" " * (depth or 4), break_on_hyphens=False, break_long_words=False))
    print(line(_HEADINGS))
    for said, group in itertools.groupby(found, key=lambda checkpoint: shared(checkpoint.model)):
        print()
        wrapped(said, 0)
        for checkpoint in group:
            print(line(cells[id(checkpoint)]))
            wrapped(", ".join(checkpoint.ids), 6)
            if checkpoint.note:
                wrapped(f"({checkpoint.note})", 6)
            if options.sources:
                wrapped(f"{checkpoint.decoding.source}: {text.brief(checkpoint.decoding.decoder)}", 6)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    return cli.main(parse, work, arguments)


if __name__ == "__main__":
    main()
