"""What a ReFusion row carries from forward to forward.

Names tell layouts apart: `slot_…` is (B, n), `window_…` (B, W), `canvas_…` (B, G); the tokens of a block are (B, n, k)
and bare, so are the single values of a row, (B,).

Letters: B batch, n slots of a block, k slot size, W = n * k block length, G generation capacity.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.ledger import DECODE, DENOISE, DRAFT, REFRESH, VERIFY, Counts
from dlm_jax.decode.request import Request
from dlm_jax.scoring import Cache

# What the next forward of a row does.
PLAN = 0  # draft every open slot of the block from masks
JUDGE = 1  # score the chosen drafts jointly, as one causal sequence
INFILL_MANY = 2  # feed the verified part of each chosen slot, predict one token a slot
INFILL_ONE = 3  # feed the newest token of each chosen slot, predict one token a slot
REDRAFT = 4  # released code: draft the rejected tails again from masks
REJUDGE = 5  # released code: score each slot on its own
RECOMPUTE = 6  # give slots refined together keys and values that see each other (Table 4)
KIND = (DENOISE, VERIFY, DECODE, DECODE, DRAFT, VERIFY, REFRESH)

COMMITTED, FRESH = 0, 1  # ranks; FRESH tokens wait for the key and value of their slot's last token


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: committed tokens.
      block: (B,) int32 block that is being decoded. phase: (B,) int32 what its next forward does.
      draft: (B, n, k) int32 provisional tokens of the block. origin: (B, n, k) int32 where each came from.
      tagged: (B, n, k) bool verified or infilled, not yet committed.
      slot_open: (B, n) bool still masked. slot_chosen: (B, n) bool being infilled.
      slot_first_accepted: (B, n) bool verdict on each draft's first token.
      slot_pending: (B, n) int32 number of a committed token whose key and value the next forward writes; -1 for none.
      canvas_rank: (B, G) int32 `COMMITTED`, `FRESH` or -1.
      eos_seen: (B,) bool. done: (B,) bool.
    """

    canvas: Canvas
    block: Array
    phase: Array
    draft: Array
    origin: Array
    tagged: Array
    slot_open: Array
    slot_chosen: Array
    slot_first_accepted: Array
    slot_pending: Array
    canvas_rank: Array
    eos_seen: Array
    done: Array
    cache: Cache
    counts: Counts

    def at(self, *phases: int) -> Array:
        """Returns (B,) bool, the rows in one of these phases, those that are done excepted."""
        return jnp.isin(self.phase, jnp.array(phases)) & ~self.done

    def number(self) -> Array:
        """Returns the (B, n, k) numbers of the block's tokens."""
        n, k = self.draft.shape[1:]
        return self.block[:, None, None] * (n * k) + jnp.arange(n * k, dtype=jnp.int32).reshape(n, k)

    def window_number(self) -> Array:
        """Returns the (B, W) numbers of the block's tokens."""
        return window(self.number())


def window(tokens: Array) -> Array:
    """Returns (B, n, k) values of a block as (B, W)."""
    return tokens.reshape(tokens.shape[0], -1)


def open_slots(request: Request, block: Array, n: int, k: int) -> Array:
    """Returns (B, n) bool: the slots of (B,) blocks that begin before the row's end."""
    start = block[:, None] * (n * k) + jnp.arange(n, dtype=jnp.int32) * k
    return start < request.max_new_tokens[:, None]
