"""Token losses in float32, and the weighted sums that every token objective reduces to.

An objective fixes what to predict and the weight of every prediction before it sees the model, so its loss is a
sum over rows: any split of a batch into pieces adds up to the loss of the whole.

Letters: B batch, T tokens, C tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.types import Scorer

IGNORE = -100  # label of a token that predicts nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What a token objective asks of the model; every array leads with B.

    Attributes:
      tokens: (B, T) int32 model inputs in physical order.
      positions: (B, T) int32 logical positions.
      valid: (B, T) bool, False on padding.
      labels: (B, T) int32 id predicted at each place, `IGNORE` where none.
      weights: for each term of the loss, (B, T) float32 weight of each prediction.
    """

    tokens: Array
    positions: Array
    valid: Array
    labels: Array
    weights: dict[str, Array]


def token_nll(logits: Array, labels: Array) -> Array:
    """Returns -log p(label) of every token, 0 where the label is `IGNORE`.

    Args:
      logits: (..., V) any float dtype; the reduction runs in float32.
      labels: (...,) int32.

    Returns:
      (...,) float32, nats.
    """
    logits = logits.astype(jnp.float32)
    # a comparison instead of a gather: it stays local when the vocabulary is sharded
    hit = jnp.arange(logits.shape[-1], dtype=jnp.int32) == labels[..., None]
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return jnp.where(labels == IGNORE, 0.0, nll)


def head_nll(score: Scorer, hidden: Array, labels: Array, chunk: int) -> Array:
    """Returns `token_nll` of hidden states, holding the logits of `chunk` tokens a row at a time.

    Args:
      score: the model; only its head is used.
      hidden: (B, T, D) hidden states after the final norm.
      labels: (B, T) int32, `IGNORE` where none.
      chunk: C, tokens a row; T or more makes all logits at once. The backward pass recomputes a chunk's logits.

    Returns:
      (B, T) float32, nats.

    Raises:
      ValueError: a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk = {chunk} tokens: expected at least 1")
    B, T = labels.shape
    if chunk >= T:
        return token_nll(score.head(hidden), labels)
    pieces = -(-T // chunk)
    pad = pieces * chunk - T
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, pad)), constant_values=IGNORE)
    split = lambda x: jnp.moveaxis(x.reshape(B, pieces, chunk, *x.shape[2:]), 1, 0)
    one = jax.checkpoint(lambda piece: token_nll(score.head(piece[0]), piece[1]))
    nll = jax.lax.map(one, (split(hidden), split(labels)))
    return jnp.moveaxis(nll, 0, 1).reshape(B, pieces * chunk)[:, :T]


def rows_nll(score: Scorer, rows: Rows, chunk: int) -> Array:
    """Scores rows under causal attention in physical order.

    Args:
      score: the model.
      rows: inputs and labels.
      chunk: tokens a row whose logits are held at a time.

    Returns:
      (B, T) float32 negative log-likelihoods, 0 where nothing is predicted.
    """
    hidden, _ = score.hidden(rows.tokens, rows.positions, visibility.causal(rows.valid))
    return head_nll(score, hidden, rows.labels, chunk)


def weighted(nll: Array, weights: dict[str, Array]) -> dict[str, Array]:
    """Returns the weighted sum of each term.

    Args:
      nll: (B, T) float32.
      weights: (B, T) float32 for each term.

    Returns:
      () float32 for each term.
    """
    return {name: jnp.sum(nll * weight) for name, weight in weights.items()}
