"""Token losses in float32, and the weighted sums that every token objective reduces to.

An objective fixes what to predict and the weight of every prediction before it sees the model, so its loss is a
sum over rows: any split of a batch into pieces adds up to the loss of the whole.

Letters: B batch, T tokens, C tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.nn import visibility
from dlm_jax.objectives.base import choice
from dlm_jax.scoring import Pass, Scorer, Streams

IGNORE = -100  # label of a token that predicts nothing
DISTANCES = ("kl", "top_k_kl", "cross_entropy")


@struct.dataclass
class Rows:
    """What a token objective asks of the model; every array leads with B.

    Attributes:
      tokens: (B, T) int32 model inputs in physical order.
      positions: (B, T) int32 logical positions.
      valid: (B, T) bool, False on padding.
      labels: (B, T) int32 id predicted at each place, `IGNORE` where none.
      weights: for each term of the loss, (B, T) float32 weight of each prediction.
      documents: (B, T) int32 document number of each token of a packed row; None where a row is one document.
    """

    tokens: Array
    positions: Array
    valid: Array
    labels: Array
    weights: dict[str, Array]
    documents: Array | None = None


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
    one = lambda hidden, labels: token_nll(score.head(hidden), labels)
    return in_chunks(one if chunk >= labels.shape[1] else jax.checkpoint(one), chunk, hidden, labels)


def in_chunks(f: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """Applies a function to pieces of (B, T, ...) arrays, one after another, and joins what it returns.

    Args:
      f: maps (B, C, ...) arrays to a tree of such; every token on its own.
      chunk: C; T or more applies it to the whole.
      *arrays: (B, T, ...) each.
    """
    if chunk < 1:
        raise ValueError(f"chunk = {chunk} tokens: expected at least 1")
    B, T = arrays[0].shape[:2]
    if chunk >= T:
        return f(*arrays)
    pieces = -(-T // chunk)
    longer = lambda x: jnp.pad(x, [(0, 0), (0, pieces * chunk - T)] + [(0, 0)] * (x.ndim - 2))
    split = lambda x: jnp.moveaxis(longer(x).reshape(B, pieces, chunk, *x.shape[2:]), 1, 0)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, pieces * chunk, *x.shape[3:])[:, :T]
    return jax.tree.map(join, jax.lax.map(lambda piece: f(*piece), tuple(map(split, arrays))))


@struct.dataclass
class Distance:
    """How far a student's predictions are from a teacher's, token by token; all (B, T) float32.

    Attributes:
      loss: what is trained, nats; the only one with a gradient.
      kl: forward KL(teacher || student), nats.
      overlap: sum over the vocabulary of min(teacher, student): the probability that a token drawn from the student
        passes exact rejection sampling against the teacher.
      agreement: 1 where both have the same most likely token, else 0.
    """

    loss: Array
    kl: Array
    overlap: Array
    agreement: Array


def distance(
    student: Array, teacher: Array, labels: Array, kind: str = "kl", temperature: float = 1.0, top_k: int = 64
) -> Distance:
    """Compares two predictions of the same tokens.

    Args:
      student: (B, T, V) logits.
      teacher: (B, T, V) logits.
      labels: (B, T) int32 ids, only for "cross_entropy"; `IGNORE` where none.
      kind: one of `DISTANCES`. "kl" is the forward KL over the whole vocabulary; "top_k_kl" that of the teacher's
        `top_k` most likely tokens, renormalised, against the student's whole distribution (with 1, the cross-entropy
        on the teacher's choice; with V, "kl"; tokens tied with the last are kept too); "cross_entropy" that on
        `labels`.
      temperature: divides the logits of both, unitless.
      top_k: tokens.

    Returns:
      The loss and the measures; all at the temperature.

    Raises:
      ValueError: an unknown kind.
    """
    choice("distance", kind, DISTANCES)
    student, teacher = student.astype(jnp.float32) / temperature, teacher.astype(jnp.float32) / temperature
    log_q, log_p = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    if kind == "top_k_kl":
        kept = teacher >= jax.lax.top_k(teacher, top_k)[0][..., -1:]
        log_kept = jax.nn.log_softmax(jnp.where(kept, teacher, -jnp.inf))
        loss = jnp.sum(jnp.where(kept, jnp.exp(log_kept) * (log_kept - log_q), 0.0), axis=-1)
    else:
        loss = kl if kind == "kl" else token_nll(student, labels)
    overlap = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)
    same = jnp.argmax(student, axis=-1) == jnp.argmax(teacher, axis=-1)
    return Distance(loss, *jax.lax.stop_gradient((kl, overlap, same.astype(jnp.float32))))


def head_distance(
    score: Scorer, hidden: Array, teacher: Array, labels: Array, chunk: int, kind: str = "kl",
    temperature: float = 1.0, top_k: int = 64,
) -> Distance:
    """Returns `distance` of two sets of hidden states, holding the logits of `chunk` tokens a row at a time.

    The gradient with respect to the student's hidden states is taken while their logits are at hand, so the backward
    pass makes none. Head and teacher are constants: they get no gradient.

    Args:
      score: the model; only its head is used.
      hidden: (B, T, D) the student's hidden states after the final norm.
      teacher: (B, T, D) the teacher's.
      labels: (B, T) int32, see `distance`.
      chunk: C, tokens a row.
      kind, temperature, top_k: see `distance`.

    Returns:
      The loss, whose gradient reaches `hidden`, and the measures.

    Raises:
      ValueError: a chunk below 1, or an unknown kind.
    """
    def one(hidden, teacher, labels):
        target = score.head(teacher)

        def total(hidden):
            found = distance(score.head(hidden), target, labels, kind, temperature, top_k)
            return jnp.sum(found.loss), found  # no token's loss depends on another's state

        slope, found = jax.grad(total, has_aux=True)(hidden)
        return found, slope

    constant = jax.lax.stop_gradient(hidden)
    found, slope = jax.lax.stop_gradient(
        in_chunks(one, chunk, constant, jax.lax.stop_gradient(teacher), labels))
    # zero in value, the slope in gradient
    linear = jnp.sum((hidden - constant).astype(jnp.float32) * slope.astype(jnp.float32), axis=-1)
    return found.replace(loss=found.loss + linear)


def aligned(outputs: Array, shift: int, documents: Array | None = None) -> Array:
    """Returns outputs moved to the tokens they predict: place i holds output i - shift, the first `shift` their own.

    Args:
      outputs: (B, T, ...) hidden states or logits of a whole row.
      shift: `score.shift`, or 0 to leave them.
      documents: (B, T) int32 document numbers of a packed row, each of which has first places.
    """
    if not shift:
        return outputs
    moved = lambda x: jnp.concatenate([x[:, :shift], x[:, : x.shape[1] - shift]], axis=1)
    if documents is None:
        return moved(outputs)
    same = (moved(documents) == documents).reshape(*documents.shape, *[1] * (outputs.ndim - 2))
    return jnp.where(same, moved(outputs), outputs)


def rows_nll(
    score: Scorer, rows: Rows, chunk: int, rule: Callable[..., visibility.Visibility] = visibility.causal,
    shift: int = 0,
) -> Array:
    """Scores rows, by default in physical order with labels where the outputs are.

    Args:
      score: the model.
      rows: inputs and labels.
      chunk: tokens a row whose logits are held at a time.
      rule: makes the visibility of `rows.valid` and the rows' documents.
      shift: `score.shift` where labels stand at their own tokens.

    Returns:
      (B, T) float32 negative log-likelihoods, 0 where nothing is predicted.
    """
    if rows.documents is None:
        document = recurrence = None
    else:
        document = jnp.where(rows.valid, rows.documents, visibility.NONE)
        recurrence = Streams(document)
    hidden, _ = score.hidden(rows.tokens, Pass(rows.positions, rule(rows.valid, document), recurrence=recurrence))
    return head_nll(score, aligned(hidden, shift, document), rows.labels, chunk)


def weighted(nll: Array, weights: dict[str, Array]) -> dict[str, Array]:
    """Returns the weighted sum of each term.

    Args:
      nll: (B, T) float32.
      weights: (B, T) float32 for each term.

    Returns:
      () float32 for each term.
    """
    return {name: jnp.sum(nll * weight) for name, weight in weights.items()}
