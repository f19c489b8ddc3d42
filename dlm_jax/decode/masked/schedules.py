"""When tokens may be committed: how many each forward takes, and which blocks are open.

Letters: B batch, G canvas length, n blocks of a canvas.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def block_steps(steps: Array, tokens: Array, block_length: Array | int) -> tuple[Array, Array]:
    """Returns (B,) steps of each block, and (B,) steps of the whole answer.

    Args:
      steps: () int32 for the whole answer; 0 takes one a token.
      tokens: (B,) int32 answer length.
      block_length: tokens of a block.
    """
    blocks = jnp.maximum(-(-tokens // block_length), 1)
    whole = jnp.where(steps > 0, steps, blocks * jnp.minimum(tokens, block_length))
    return jnp.maximum(whole // blocks, 1), jnp.maximum(whole, 1)


def even(tokens: Array, steps: Array, step: Array) -> Array:
    """Returns (B,) tokens of a step: equal shares, the remainder given to the first steps (LLaDA).

    Args:
      tokens: (B,) int32 tokens of the block.
      steps: (B,) int32 steps of the block.
      step: (B,) int32 steps taken.
    """
    return tokens // steps + (step < tokens % steps)


def by_time(masked: Array, steps: Array, step: Array, eps: Array) -> Array:
    """Returns (B,) tokens of a step: floor(masked * (1 - s / t)), time falling evenly from 1 to eps (Dream).

    Args:
      masked: (B,) int32 tokens still masked.
      steps: (B,) int32 steps from time 1 to eps.
      step: (B,) int32 steps taken.
      eps: () float32 last time.
    """
    return jnp.floor(masked * elapsed(steps, step, eps)).astype(jnp.int32)


def elapsed(steps: Array, step: Array, eps: Array) -> Array:
    """Returns (B,) float32 share 1 - s/t of what is masked that a step from time t to s unmasks.

    Args:
      steps: (B,) int32 steps from time 1 to eps.
      step: (B,) int32 steps taken.
      eps: () float32 last time.
    """
    stride = (eps - 1.0) / steps.astype(jnp.float32)
    # from the nearer end, as torch.linspace does, so that float32 rounds alike
    time = lambda i: jnp.where(i < (steps + 1) // 2, 1.0 + stride * i, eps - stride * (steps - i))
    return 1.0 - time(step + 1) / time(step)


def shares(masked: Array, steps: Array, step: Array) -> tuple[Array, Array]:
    """Returns (B,) tokens of a step and (B,) steps taken then: what is left over the steps left, rounded half to even.

    Steps that would commit nothing are passed over without a forward (the linear schedule of dllm's samplers).

    Args:
      masked: (B,) int32 tokens of the block still masked.
      steps: (B,) int32 steps of the block.
      step: (B,) int32 steps taken.
    """
    left = jnp.clip(steps - step, 1, jnp.maximum(2 * masked - 1, 1))  # masked / left > 1/2, which rounds to 1 or more
    whole, rest = masked // left, masked % left
    up = (2 * rest > left) | ((2 * rest == left) & (whole % 2 == 1))
    return whole + up, steps - left + 1


def progress(masked: Array, tokens: Array, block_length: int) -> Array:
    """Returns (B, n) float32 committed share of each block; 1 for blocks that a row does not have.

    Args:
      masked: (B, G) bool.
      tokens: (B,) int32 answer length.
      block_length: G is a multiple of it.
    """
    B, G = masked.shape
    left = jnp.sum(masked.reshape(B, G // block_length, block_length), axis=2)
    size = jnp.clip(tokens[:, None] - jnp.arange(0, G, block_length), 1, block_length)
    return 1.0 - left / size


def open_next(opened: Array, done: Array, ended: Array, add_threshold: Array) -> Array:
    """Returns (B,) blocks open: one more where the newest is far enough.

    Args:
      opened: (B,) int32 blocks open, at least 1.
      done: (B, n) float32, see `progress`.
      ended: (B,) bool rows that open no more.
      add_threshold: committed share of the newest block from which on the next opens.

    Source: d3LLM (arXiv 2601.07568), multi-block decoding.
    """
    newest = jnp.take_along_axis(done, jnp.minimum(opened, done.shape[1])[:, None] - 1, axis=1)[:, 0]
    more = (newest >= jnp.minimum(add_threshold, 1.0)) & ~ended
    return jnp.minimum(opened + more, done.shape[1])
