"""What the forwards of block diffusion read and see under a model's conventions.

Letters: B batch, K block size, G canvas length, P prompt capacity, S = P + G.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.conventions import Conventions
from dlm_jax.decode.ledger import Counts
from dlm_jax.decode.queries import Keys, Queries, ask, prefill
from dlm_jax.decode.request import Request
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Scorer

_BEHIND = 1 << 29  # added to the rank of a mask that stands behind all known tokens


@struct.dataclass
class Grid:
    """Where the blocks of every row lie; numbers as of `request`.

    Attributes:
      conventions, size: of the model, K; static.
      first: (B,) int32 number of the first block's first token, negative where it is the prompt's.
      stop: (B,) int32 number behind the last block's last token.
    """

    conventions: Conventions = struct.field(pytree_node=False)
    size: int = struct.field(pytree_node=False)
    first: Array
    stop: Array

    @classmethod
    def of(cls, request: Request, conventions: Conventions, size: int, cut: bool) -> "Grid":
        """Returns the grid of a batch whose last blocks are whole, or cut where answers end."""
        first = -(request.prompt_length % size) if conventions.grid == "absolute" else 0 * request.prompt_length
        whole = first - (first - request.max_new_tokens) // size * size
        return cls(conventions, size, first, request.max_new_tokens if cut else whole)

    def numbers(self, start: Array) -> Array:
        """Returns (B, K) int32 numbers of the block that begins at `start`, (B,)."""
        return start[:, None] + jnp.arange(self.size, dtype=jnp.int32)

    def end(self, number: Array) -> Array:
        """Returns (B, W) int32 numbers of the last token of each one's block."""
        first = self.first[:, None]
        return (number - first) // self.size * self.size + first + self.size - 1

    def whole(self, request: Request) -> Request:
        """Returns the request with the whole of its last blocks in it."""
        return request.replace(max_new_tokens=jnp.where(request.max_new_tokens > 0, self.stop, 0))


@struct.dataclass
class Part:
    """A piece of a block that is run alone.

    Attributes:
      size: tokens, static.
      offset: (B,) int32 of its first token within the block.
      active: (B,) bool rows that run it; the others run their whole block.
    """

    size: int = struct.field(pytree_node=False)
    offset: Array
    active: Array


def run_prompts(score: Scorer, request: Request, grid: Grid) -> tuple[Array | None, Cache | None, Counts]:
    """Runs the prompts' whole blocks where something is kept of them; returns as `prefill`."""
    prompt = grid.conventions.prompt
    if grid.conventions.commit == "none":
        return None, None, Counts.zeros(request.batch)
    length, limit = request.prompt_length + grid.first, None
    if prompt == "full":
        limit = jnp.broadcast_to(length[:, None] - 1, request.prompt.shape)
    elif prompt == "block-causal":
        number = jnp.arange(request.prompt_capacity, dtype=jnp.int32) - request.prompt_length[:, None]
        limit = request.position(grid.end(number))
    return prefill(score, request, length=length, limit=limit)


def run_block(score: Scorer, request: Request, grid: Grid, start: Array, tokens: Array, active: Array, commit: Array,
              cache: Cache, alone: Part | None = None) -> tuple[Array, Cache]:
    """Runs one block of every row against what is kept.

    Args:
      score: the model.
      request: the batch, with whole blocks.
      grid: of the batch.
      start: (B,) int32 number of each block's first token.
      tokens: (B, G) int32 canvas.
      active: (B,) bool rows that are run.
      commit: (B,) bool rows whose block is committed; the others' is denoised.
      cache: of what precedes the blocks.
      alone: pieces that are run alone; their neighbours keep the keys that they have.

    Returns:
      (B, K, D) hidden states: those that predict each token of a denoised block; that of the last token, over and
      over, of a committed one. What a piece alone does not predict is anything. And the cache.
    """
    offset, inside, widths = jnp.arange(grid.size, dtype=jnp.int32)[None], True, None
    begin = 0
    if alone is not None:  # the piece first, so that a forward of pieces is as wide as they are
        begin = jnp.where(alone.active, alone.offset, 0)[:, None]
        inside = ~alone.active[:, None] | (offset < alone.size)
        widths = (alone.size, grid.size)
    number = start[:, None] + (offset + begin) % grid.size
    limit = request.position(grid.end(number))
    if grid.conventions.commit == "causal":
        limit = jnp.where(commit[:, None], request.position(number), limit)
    read = jnp.take_along_axis(request.buffer(tokens), request.entry(number), axis=1)
    queries = Queries(read, number, active[:, None] & inside & (number < grid.stop[:, None]),
                      limit)
    last = jnp.minimum(start + grid.size, grid.stop) - start - 1
    wanted = jnp.where(commit[:, None], last[:, None], jnp.maximum(offset - grid.conventions.shift - begin, 0))
    return ask(score, request, queries, cache, wanted, widths=widths)


def run_row(score: Scorer, request: Request, grid: Grid, start: Array, tokens: Array, masked: Array, active: Array
            ) -> Array:
    """Runs every row up to the end of its block and keeps nothing.

    Args:
      masked: (B, G) bool tokens still to come.
      score, request, grid, start, tokens, active: as of `run_block`.

    Returns:
      (B, K, D) hidden states that predict each token of the block.
    """
    S = request.entries
    number = jnp.arange(S, dtype=jnp.int32) - request.prompt_length[:, None]
    entry, block = request.entry(number), grid.numbers(start)
    read = jnp.take_along_axis(request.buffer(tokens), entry, axis=1)
    live = active[:, None] & (number < jnp.minimum(start + grid.size, grid.stop)[:, None])
    keys, limit = None, request.position(grid.end(number))
    if grid.conventions.prompt == "causal":  # known tokens first, each seeing those before it; then the masks
        open_ = jnp.concatenate([jnp.zeros_like(request.prompt, bool), masked], axis=1)
        ranks = request.ranks()
        ranks = jnp.where(open_ & (ranks >= 0), ranks + _BEHIND, ranks)
        keys, limit = Keys(ranks), jnp.take_along_axis(ranks, entry, axis=1)
    wanted = jnp.maximum(block + request.prompt_length[:, None] - grid.conventions.shift, 0)
    return ask(score, request, Queries(read, number, live, jnp.where(live, limit, vis.NONE)), None, wanted,
               keys=keys)[0]
