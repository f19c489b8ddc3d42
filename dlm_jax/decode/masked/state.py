"""What a row of masked-diffusion decoding carries from forward to forward.

Letters: B batch, G canvas length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import Array

from dlm_jax.decode.ledger import Counts
from dlm_jax.decode.state import Canvas


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Loop carry.

    Attributes:
      draft: (B, G) int32 newest draft of each token that is not committed, -1 for none.
      late: (B, G) bool tokens that an EOS filled and that the next forward may still overwrite ("late_fill").
      opened: (B,) int32 blocks open, the finished ones included.
      step: (B,) int32 steps taken in the block.
      age: (B,) int32 forwards since the last full pass, it included.
      due: (B,) bool rows whose next forward refreshes the cache.
      done: (B,) bool.
      cache: of 2B rows with classifier-free guidance; None without a cache.
    """

    canvas: Canvas
    draft: Array
    late: Array
    opened: Array
    step: Array
    age: Array
    due: Array
    done: Array
    cache: Any
    counts: Counts
