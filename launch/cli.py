"""How a program is started, what it says while it works, and how it ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from absl.flags import argparse_flags

log = logging.get_absl_logger().getChild("launch")  # what a program says of its work, on standard error


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Returns an empty command line that takes absl's flags (`--verbosity`, `--flagfile`, ...) too.

    Args:
      program: what is typed, "python -m launch.decode".
      description: shown by `--help` as it is.
    """
    return argparse_flags.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for an option, by its field, that is given and less than 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: at least 1")


def main(parse: Callable[[Sequence[str]], argparse.Namespace], work: Callable[[argparse.Namespace], int | None],
         arguments: Sequence[str] | None) -> int:
    """Parses a command line and does its work, under `absl.app` where it is the process's own.

    Args:
      parse: what was typed, without the program's name -> options.
      work: see `exit_code`.
      arguments: what was typed; None takes it from the process, which then ends here.

    Returns:
      The exit code.
    """

    def options(typed: Sequence[str]) -> argparse.Namespace:
        found = parse(typed)
        if flags.FLAGS["verbosity"].using_default_value:  # a program's own progress, of libraries the warnings
            flags.FLAGS.verbosity = logging.WARNING
            log.setLevel("INFO")
        return found

    if arguments is None:
        app.run(lambda found: exit_code(lambda: work(found)), flags_parser=lambda argv: options(argv[1:]))
    found = options(arguments)
    return exit_code(lambda: work(found))


def exit_code(work: Callable[[], int | None]) -> int:
    """Does a program's work; bad input ends it with a line on standard error.

    Args:
      work: raises ValueError for bad input, FloatingPointError for a loss that is none; returns the exit code, None
        for 0.

    Returns:
      The exit code, 2 for bad input, 1 for a loss that is not finite.
    """
    try:
        return work() or 0
    except (ValueError, FloatingPointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2 if isinstance(problem, ValueError) else 1
