"""What a ReFusion row carries from forward to forward, and what one forward is asked.

Letters: B batch, n slots of a block, k slot size, W = n * k block length, Q = W + n queries of a forward, G canvas
length.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

from dlm_jax.decode.ledger import DECODE, DENOISE, DRAFT, REFRESH, VERIFY, Counts
from dlm_jax.decode.state import Canvas
from dlm_jax.nn.cache import KVCache

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Loop carry.

    Attributes:
      draft: (B, n, k) int32 provisional tokens of the current block.
      origin: (B, n, k) int32 where each came from.
      tagged: (B, n, k) bool verified or infilled, not yet committed.
      first_accepted: (B, n) bool verdict on each draft's first token.
      open_slots: (B, n) bool slots of the block that are still masked.
      chosen: (B, n) bool slots being infilled.
      pending: (B, n) int32 committed tokens whose key and value the next forward writes; -1 for none.
      rank: (B, G) int32 `COMMITTED`, `FRESH` or -1.
      block: (B,) int32. phase: (B,) int32. eos_seen: (B,) bool. done: (B,) bool.
    """

    canvas: Canvas
    draft: Array
    origin: Array
    tagged: Array
    first_accepted: Array
    open_slots: Array
    chosen: Array
    pending: Array
    rank: Array
    block: Array
    phase: Array
    eos_seen: Array
    done: Array
    cache: KVCache
    counts: Counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """One forward's inputs, each (B, Q); `index` is the generated-token index, `following` the next draft."""

    tokens: Array
    index: Array
    active: Array
    group: Array
    limit: Array
    following: Array
