"""How a paper or a released script decodes: a decoder, the longest answer, and where the numbers stand."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """One entry of a file's `DECODING`.

    Attributes:
      decoder: a decoder of `dlm_jax.decode`.
      max_new_tokens: longest answer, tokens.
      source: paper table or released script that the numbers come from, and what they leave open.
      said_by: which of "paper", "card" (or README) and "code" that is; "" for numbers of ours.
    """

    decoder: Any
    max_new_tokens: int = 256
    source: str = ""
    said_by: str = ""
