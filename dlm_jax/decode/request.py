"""What is asked of a decoder, and where the tokens of each row stand.

A token has four numbers, which mean the same everywhere:

* its *number* counts from the first generated token, 0; the prompt's tokens have -prompt_length ... -1;
* its *position* is logical, prompt_length + number, and the only thing RoPE sees;
* its *entry* is its place in buffers and caches of P + G: prompts begin at 0, generated tokens at P;
* its *rank* is what the visibility rule compares. It is the position, unless a decoder says otherwise.

What must not be written goes to the entry S, which no buffer has. Nothing of a row depends on its neighbours.

Letters: B batch, W tokens, P prompt capacity, G generation capacity, S = P + G.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.nn import visibility as vis
from dlm_jax.types import ROWS, Params


@struct.dataclass
class Request:
    """A batch of prompts and its limits; every value is traced, only `capacity` fixes a shape.

    Attributes:
      prompt: (B, P) int32, right-padded.
      prompt_length: (B,) int32, at least 1.
      max_new_tokens: (B,) int32, at most G; 0 for rows that only fill up the batch.
      eos_id: () int32; -1 for none.
      mask_id: () int32; -1 for none.
      keys: (B,) PRNG keys.
      capacity: G, static.
      guide_prompt: (B, P') int32 the prompts as a guide reads them, right-padded; None where it reads these.
      guide_length: (B,) int32, at least 1; None without them.
    """

    prompt: Array
    prompt_length: Array
    max_new_tokens: Array
    eos_id: Array
    mask_id: Array
    keys: Array
    capacity: int = struct.field(pytree_node=False)
    guide_prompt: Array | None = None
    guide_length: Array | None = None

    @property
    def batch(self) -> int:
        """B."""
        return self.prompt.shape[0]

    @property
    def prompt_capacity(self) -> int:
        """P."""
        return self.prompt.shape[1]

    @property
    def entries(self) -> int:
        """S = P + G; as an entry, the one where things are discarded."""
        return self.prompt_capacity + self.capacity

    def position(self, number: Array) -> Array:
        """Returns the (B, W) positions of (B, W) numbers."""
        return self.prompt_length[:, None] + number

    def entry(self, number: Array) -> Array:
        """Returns the (B, W) entries of (B, W) numbers, within the buffer."""
        at = jnp.where(number < 0, self.position(number), self.prompt_capacity + number)
        return jnp.clip(at, 0, self.entries - 1)

    def numbers(self) -> Array:
        """Returns (B, S) int32 number of each entry, G on the prompt's padding."""
        entry = jnp.arange(self.entries, dtype=jnp.int32)
        prompt = jnp.where(entry < self.prompt_length[:, None], entry - self.prompt_length[:, None], self.capacity)
        return jnp.where(entry < self.prompt_capacity, prompt, entry - self.prompt_capacity)

    def ranks(self) -> Array:
        """Returns (B, S) int32 rank of each entry: its position, -1 on padding and beyond the row's limit."""
        number = self.numbers()
        return jnp.where(number < self.max_new_tokens[:, None], self.position(number), vis.NONE)

    def buffer(self, tokens: Array) -> Array:
        """Returns the (B, S) tokens of prompt and canvas; `tokens` are the canvas', (B, G)."""
        return jnp.concatenate([self.prompt, tokens], axis=1)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt for a drafter and its guide that were taught by different chat templates.

    Attributes:
      prompt: token ids that the drafter continues.
      guide: the same as the guide reads it, in ids of its own vocabulary.
    """

    prompt: Sequence[int]
    guide: Sequence[int]


def halves(prompts: Sequence[Sequence[int] | Pair]) -> tuple[list[Sequence[int]], list[Sequence[int]] | None]:
    """Returns the prompts and what a guide reads in their place, None where it reads the same.

    Raises:
      ValueError: pairs among plain prompts.
    """
    pairs = [isinstance(p, Pair) for p in prompts]
    if not any(pairs):
        return list(prompts), None
    if not all(pairs):
        raise ValueError(f"prompt {pairs.index(False)} is a plain list and prompt {pairs.index(True)} a Pair: pass one "
                         "kind, Pair(prompt, guide) where the guide reads another prompt")
    return [p.prompt for p in prompts], [p.guide for p in prompts]


def make(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    capacity: int,
    eos_id: int | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    first_row: int = 0,
    batch: int = 1,
    prompt_capacity: int = 1,
    guide_prompts: Sequence[Sequence[int]] | None = None,
    guide_capacity: int = 1,
    over: NamedSharding | None = None,
) -> Request:
    """Lays prompts out in a bucketed batch.

    Args:
      prompts: ragged lists of token ids, checked.
      max_new_tokens: tokens to generate, one number or one a prompt.
      capacity: G, canvas length.
      eos_id: id that ends a row, or None.
      mask_id: id of the mask token, or None.
      seed: of sampling; row i draws from (seed, first_row + i), whatever batch it is in.
      first_row: number of the first prompt.
      batch, prompt_capacity: least B and P, so that several batches share a shape.
      guide_prompts: checked token ids that a guide reads in place of the prompts, or None.
      guide_capacity: least P'.
      over: how rows lie on several devices, see `rows_over`; empty rows fill a batch that these do not divide.

    Returns:
      The request.
    """
    ways = 1 if over is None else over.num_devices // over.shard_shape((over.num_devices,))[0]
    B = -(-bucket(max(len(prompts), batch), least=1) // ways) * ways
    limits = np.zeros(B, np.int32)
    limits[: len(prompts)] = max_new_tokens
    no = lambda x: np.int32(-1 if x is None else x)
    theirs = (None, None) if guide_prompts is None else _padded(guide_prompts, B, guide_capacity)
    keys = _row_keys(jax.random.key(seed), first_row + np.arange(B, dtype=np.uint32))
    request = Request(*_padded(prompts, B, prompt_capacity), limits, no(eos_id), no(mask_id), keys, capacity, *theirs)
    if over is None:
        return jax.device_put(request)
    whole = NamedSharding(over.mesh, PartitionSpec())
    return jax.device_put(request, jax.tree.map(lambda x: over if x.ndim else whole, request))


def _padded(prompts: Sequence[Sequence[int]], batch: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (B, P) ids of at least so many columns, and (B,) lengths, 1 for rows that only fill up the batch."""
    lengths = np.ones(batch, np.int32)
    lengths[: len(prompts)] = [len(p) for p in prompts]
    tokens = np.zeros((batch, bucket(max(int(lengths.max()), least))), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    return tokens, lengths


def rows_over(params: Params) -> NamedSharding | None:
    """Returns how a batch lies on the mesh of sharded parameters: rows over `ROWS`; None on one device."""
    place = next((x.sharding for x in jax.tree.leaves(params) if isinstance(
        getattr(x, "sharding", None), NamedSharding)), None)
    if place is None or place.num_devices == 1:
        return None
    return NamedSharding(place.mesh, PartitionSpec(tuple(axis for axis in ROWS if axis in place.mesh.axis_names)))


def placed(part: Any, over: NamedSharding | None) -> Any:
    """Returns a part with its tables where a batch lies, so that no call sends them; numbers travel with each.

    Args:
      part: a decoder, see `parts.traced`.
      over: see `rows_over`.
    """
    whole = None if over is None else NamedSharding(over.mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, whole) if np.ndim(x) else x, part)


@jax.jit
def _row_keys(key, rows):
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def bucket(size: int, least: int = 16) -> int:
    """Returns the smallest of 16, 24, 32, 48, 64, 96, … that is at least `size`: few shapes, little padding."""
    power = least
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power
