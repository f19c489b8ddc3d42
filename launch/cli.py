"""How a command line program ends."""

from __future__ import annotations

import sys
from collections.abc import Callable


def exit_code(work: Callable[[], int | None]) -> int:
    """Does a program's work; bad input ends it with a line on standard error.

    Args:
      work: raises ValueError for bad input; returns the exit code, None for 0.

    Returns:
      The exit code, 2 for bad input.
    """
    try:
        return work() or 0
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
