"""A mixture of experts as a function: tokens sorted by expert, one ragged product, nobody turned away.

Letters: M tokens, D width, X experts, A experts a token, F expert width, G groups.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import devices
from dlm_jax.types import HEADS, ROWS


def route(
    scores: Array, active: int, normalise: bool = False, bias: Array | None = None, *, weigh_bias: bool = False,
    groups: int = 1, active_groups: int = 1, scale: float = 1.0
) -> tuple[Array, Array]:
    """Chooses each token's experts.

    Args:
      scores: (M, X) float32 of all experts, the larger the better.
      active: A.
      normalise: divide the weights of a token's experts by their sum.
      bias: (X,) float32 added to the scores that experts are chosen by, or None.
      weigh_bias: whether it stays in their weights, too.
      groups: G, of as many experts in a row.
      active_groups: how many groups a token's experts are of, those with the largest sum of two scores.
      scale: factor on the weights, unitless.

    Returns:
      (M, A) float32 weights, those of the best expert first, and (M, A) int32 experts.

    Source: Qwen3 (softmax, normalised); DeepSeek-V3, Sec. 2.1.2 (sigmoid, bias for the choice alone, groups).
    """
    judged = scores if bias is None else scores + bias
    scores = judged if weigh_bias else scores
    if active_groups < groups:
        by_group = judged.reshape(-1, groups, judged.shape[-1] // groups)
        worth = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
        kept = jax.nn.one_hot(jax.lax.top_k(worth, active_groups)[1], groups, dtype=bool).any(axis=1)
        judged = jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(judged.shape)
    experts = jax.lax.top_k(judged, active)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * scale, experts


def mixture(x: Array, weights: Array, experts: Array, gate: Array, up: Array, down: Array) -> Array:
    """Runs every token through its own experts, SwiGLU feed-forwards, and sums what they make of it.

    A token's result is its own: no expert has a capacity that others could fill. On a mesh every device runs the
    experts that it holds; where tokens are few, they travel to the devices that hold parts of an expert, else the
    parts come together where the tokens are.

    Args:
      x: (M, D) tokens.
      weights: (M, A) of the experts.
      experts: (M, A) int32.
      gate, up: (X, D, F).
      down: (X, F, D).

    Returns:
      (M, D) in x's dtype.
    """
    mesh = devices.mesh_of(x)
    if mesh.empty or not {*ROWS, HEADS} <= {*mesh.axis_names} or gate.shape[0] % mesh.shape[HEADS]:
        return _local(x, weights, experts, gate, up, down)
    (M, D), (X, _, F), P = x.shape, gate.shape, jax.P
    # bytes that move between devices of the axis that weights are cut along, either way
    travels = D % mesh.shape[ROWS[1]] == 0 and M * (D + 2 * experts.shape[1] * F) < 3 * X // mesh.shape[HEADS] * D * F
    rows, cut = (ROWS[:1], ROWS[1]) if travels else (ROWS, None)
    rows = None if M % math.prod(mesh.shape[axis] for axis in rows) else rows
    # not checked for replication: jax 0.10.2 then leaves the sum over devices out of a ragged product's gradient
    return devices.share(
        functools.partial(_local, axes=(HEADS, cut)), (x, weights, experts, gate, up, down),
        (P(rows, cut), P(rows), P(rows), *(P(HEADS, cut),) * 2, P(HEADS, None, cut)), P(rows, cut))


def _local(x, weights, experts, gate, up, down, axes: tuple[str | None, str | None] = (None, None)):
    """`mixture`, or a device's part of it: the axes that experts and that D lie on."""
    tokens, active = experts.shape
    across, along = axes
    flat = experts.reshape(-1)
    if across is not None:  # the experts of other devices come last, and no group holds them
        flat = flat - jax.lax.axis_index(across) * gate.shape[0]
        flat = jnp.where((flat >= 0) & (flat < gate.shape[0]), flat, gate.shape[0])
    order = jnp.argsort(flat, stable=True)  # places (token, choice) by expert
    sizes = jnp.bincount(flat, length=gate.shape[0] + 1)[:-1].astype(jnp.int32)
    held = (jnp.arange(flat.size) < jnp.sum(sizes))[:, None]  # rows of no group are anything
    own = lambda rows: rows if across is None else jnp.where(held, rows, 0)
    whole = lambda part: part if along is None else jax.lax.psum(part, along)
    sorted_x = own(x[order // active])
    product = lambda weight: whole(own(jax.lax.ragged_dot(sorted_x, weight, sizes)))
    made = own(jax.lax.ragged_dot(jax.nn.silu(product(gate)) * product(up), down, sizes))
    back = jnp.zeros_like(made).at[order].set(made, unique_indices=True).reshape(tokens, active, -1)
    mixed = jnp.sum(weights[..., None].astype(x.dtype) * back, axis=1)
    return mixed if across is None else jax.lax.psum(mixed, across)
