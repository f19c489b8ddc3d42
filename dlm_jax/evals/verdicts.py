"""What a judge says."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """A judge's word; true where the answer is right.

    Attributes:
      right: whether it is.
      by: the extractor that found the answer's final result, None where none did.
    """

    right: bool
    by: str | None

    def __bool__(self) -> bool:
        return self.right
