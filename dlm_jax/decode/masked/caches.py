"""Which tokens a forward of a masked-diffusion decoder recomputes; all others keep their cached keys and values.

none: every token, every time, and no cache. prefix, dual (Fast-dLLM): a full pass opens each block, then the block
and what follows it, or the block alone. free (FreeCache): one full pass, then the block and what follows; what lies
before keeps the values of the last forward that held it, perhaps computed while it was masked. delayed: free, but the
window reaches back to the block of what the last forward committed, so that a block is frozen as it is when finished.
prompt: one full pass, then the answer. block (block diffusion): the block alone, which sees no later one; a finished
block is run once more, clean, before the next.

Where the model's outputs are shifted, the token before the window predicts its first token, so a window starts one
earlier while that token is masked; FreeCache always does, its frozen prefix ends one token earlier.

Source: Fast-dLLM (arXiv 2505.22618), Sec. 3.2; FlashDLM, Sec. 3.2; dKV-Cache (arXiv 2505.15781), the one-step delay;
BD3-LM (arXiv 2503.09573), Alg. 2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dlm_jax.decode import window
from dlm_jax.decode.state import Request

POLICIES = ("none", "prefix", "dual", "free", "delayed", "prompt", "block")
PER_BLOCK = ("prefix", "dual", "block")  # a new block is due a pass of its own


def span(policy: str, request: Request, masked: Array, fresh: Array, due: Array, begin: Array, end: Array, shift: int,
         block_length: int) -> tuple[Array, Array]:
    """Returns the (B,) start and stop indices of the next forward's window.

    Args:
      policy: one of `POLICIES`.
      request: the batch.
      masked: (B, G) bool tokens still to come.
      fresh: (B, G) bool tokens that the last forward committed.
      due: (B,) bool rows whose cache is to be refreshed.
      begin, end: (B,) int32 numbers g of the first token and behind the last of the open block(s).
      shift: the model's.
      block_length: tokens of a block, static.
    """
    length, whole = request.prompt_length, window.total(request)
    zero = jnp.zeros_like(length)
    if policy == "none":
        return zero, whole
    first = zero if policy == "prompt" else begin
    if policy == "delayed":
        latest = jnp.argmax(fresh, axis=1) // block_length * block_length
        first = jnp.where(jnp.any(fresh, axis=1), jnp.minimum(begin, latest), begin)
    if policy in ("free", "delayed"):
        early = shift
    else:
        early = shift * jnp.take_along_axis(masked, jnp.clip(first, 0, masked.shape[1] - 1)[:, None], axis=1)[:, 0]
    start = length + first - early
    stop = length + end if policy in ("dual", "block") else whole
    if policy == "block":
        return jnp.where(due, length + begin - block_length, start), jnp.where(due, length + begin, stop)
    return jnp.where(due, 0, start), jnp.where(due, whole, stop)


def widths(policy: str, request: Request, block_length: int, several: bool, shift: int) -> tuple[int, ...]:
    """Returns the static query widths that the policy's windows need, ascending.

    Args:
      policy: one of `POLICIES`.
      request: the batch; its shapes count.
      block_length: tokens of a block, or the canvas length where there is one.
      several: whether more than one block may be open.
      shift: the model's.
    """
    G, whole = request.capacity, request.prompt_capacity + request.capacity
    if policy == "none":
        return (whole,)
    if policy == "block":
        return (block_length + shift,)
    if policy == "prompt":
        sizes = [G]
    elif policy == "dual" and not several:
        sizes = [block_length]
    else:  # shrinking, or growing with the blocks that are open
        sizes = [block_length]
        while sizes[-1] < G:
            sizes.append(min(2 * sizes[-1], G))
    return (*(size + shift for size in sizes if size + shift < whole), whole)
