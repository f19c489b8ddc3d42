"""Exact log-likelihoods under a causal view, and whether a row is what greedy decoding would have written.

Letters: B rows scored at a time, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.decode import Autoregressive
from dlm_jax.evals.likelihood import HEAD_CHUNK, pad
from dlm_jax.nn import visibility
from dlm_jax.objectives import losses
from dlm_jax.scoring import Pass
from dlm_jax.types import Params


@functools.partial(jax.jit, static_argnums=0)
def _score(model, params, tokens, labels, length):
    score = model.scorer(params)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = score.hidden(tokens, Pass(index, visibility.causal(index < length[:, None])))

    def judge(hidden, labels):
        logits = score.head(hidden)
        return losses.token_nll(logits, labels), (labels == losses.IGNORE) | (jnp.argmax(logits, -1) == labels)

    nll, greedy = losses.in_chunks(judge, HEAD_CHUNK, hidden, labels)
    return -jnp.sum(nll, axis=1), jnp.all(greedy, axis=1)


def log_likelihood(
    model: Any, params: Params, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *,
    batch_size: int = 32,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log p(answer | prompt) of every row, by the chain rule.

    Args:
      model: the module; its autoregressive view is asked.
      params: its parameters.
      prompts: token ids of each row, at least one.
      answers: token ids of each row, with the end of sequence where it is to count.
      batch_size: rows scored at a time.

    Returns:
      (rows,) float64 nats, and (rows,) bool whether every token of the answer is the likeliest there.

    Raises:
      ValueError: a model without a causal view, an empty prompt or answer, ids outside the vocabulary, rows longer
        than the model's positions (the last token is only predicted), or a batch size below 1.
    """
    _check(model.config, prompts, answers, batch_size)
    found, greedy = np.zeros(len(answers)), np.zeros(len(answers), bool)
    order = np.argsort([-len(prompt) - len(answer) for prompt, answer in zip(prompts, answers)], kind="stable")
    for first in range(0, len(order), batch_size):
        # the last batch is filled up with a row that is scored again, so that there is one batch size
        rows = order[np.minimum(np.arange(first, first + batch_size), len(order) - 1)]
        tokens = pad([[*prompts[row], *answers[row]][:-1] for row in rows], model.config.max_position_embeddings)
        labels, length = np.full(tokens.shape, losses.IGNORE, np.int32), np.zeros(len(rows), np.int32)
        for place, row in enumerate(rows):
            start, length[place] = len(prompts[row]) - 1, len(prompts[row]) + len(answers[row]) - 1
            labels[place, start:length[place]] = answers[row]
        made = _score(model, params, tokens, labels, length)
        found[rows], greedy[rows] = np.asarray(made[0], np.float64), np.asarray(made[1])
    return found, greedy


def _check(config: Any, prompts: Any, answers: Any, batch_size: int) -> None:
    Autoregressive().check_model(config)
    if len(prompts) != len(answers):
        raise ValueError(f"{len(prompts)} prompts but {len(answers)} answers; give one answer to each prompt")
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: expected at least 1")
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        if not len(prompt) or not len(answer):
            what = "answer" if len(prompt) else "prompt"
            raise ValueError(f"{what} {row} is empty; give at least one token, such as the "
                             f"{'end' if len(prompt) else 'beginning'} of sequence")
        ids = [*prompt, *answer]
        bad = next((i for i in ids if not 0 <= i < config.vocab_size), None)
        if bad is not None:
            raise ValueError(f"row {row} has token id {bad}, outside the vocabulary of {config.vocab_size} ids")
        if len(ids) - 1 > config.max_position_embeddings:
            raise ValueError(f"row {row} reads {len(ids) - 1} tokens, more than the model's max_position_embeddings = "
                             f"{config.max_position_embeddings}")
