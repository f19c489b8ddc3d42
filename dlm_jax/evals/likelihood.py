"""Log-likelihoods under a masked diffusion model, by LLaDA's Monte-Carlo bound.

Of an answer of L tokens, l are masked, l uniform in 1..L and the places uniform; the loss of the masked tokens times
L / l has the mean of all orders' chain-rule log-likelihoods, a lower bound of the answer's log-likelihood. The draws
of a row spread l evenly over 1..L, which varies less than independent ones.

Letters: B rows scored at a time, T tokens, D model width, V vocabulary.

Source: LLaDA (arXiv 2502.09992), Eq. 6 and Algorithm 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode import request
from dlm_jax.nn import visibility
from dlm_jax.objectives import losses
from dlm_jax.scoring import Pass, Scorer
from dlm_jax.types import Params

HEAD_CHUNK = 512  # tokens a row whose logits are held at a time


@dataclasses.dataclass(frozen=True)
class _Guided:
    """A head over pairs of hidden states, with and without the prompt, each (..., 2 D) as one."""

    score: Scorer
    scale: Array

    def head(self, pair: Array) -> Array:
        with_prompt, without = (self.score.head(part) for part in jnp.split(pair, 2, axis=-1))
        return without + (self.scale + 1) * (with_prompt - without)


def bound(
    score: Scorer, tokens: Array, noisy: Array, p_mask: Array, prompt_length: Array, length: Array, mask_id: int,
    cfg_scale: Array | float | None = None,
) -> Array:
    """Returns one draw of the bound for every row.

    Args:
      score: the model, bidirectional.
      tokens: (B, T) int32 prompt, answer, padding.
      noisy: (B, T) int32 the same with some of the answer masked.
      p_mask: (B,) float32 share of the answer that is masked.
      prompt_length: (B,) int32.
      length: (B,) int32 of prompt and answer.
      mask_id: id of the mask token.
      cfg_scale: () strength w of classifier-free guidance: logits without the prompt plus (1 + w) times what the
        prompt adds; None or 0 leaves it out, and None saves its forward.

    Returns:
      (B,) float32 nats, 0 or less without guidance; its mean over draws is at most the log-likelihood.
    """
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    prompt, valid = index < prompt_length[:, None], index < length[:, None]
    labels = jnp.where((noisy == mask_id) & valid & ~prompt, tokens, losses.IGNORE)
    read = lambda seen: losses.aligned(
        score.hidden(seen, Pass(index, visibility.bidirectional(valid)))[0], score.shift)
    hidden, head = read(noisy), score
    if cfg_scale is not None:
        hidden = jnp.concatenate([hidden, read(jnp.where(prompt, mask_id, noisy))], axis=-1)
        head = _Guided(score, jnp.asarray(cfg_scale, jnp.float32))
    return -jnp.sum(losses.head_nll(head, hidden, labels, HEAD_CHUNK), axis=1) / p_mask


@functools.partial(jax.jit, static_argnums=0)
def _bound(model, params, rows, mask_id, cfg_scale):
    return bound(model.scorer(params), *rows, mask_id, cfg_scale)


def compiled_bound(model: Any, params: Params, rows: tuple, mask_id: int, cfg_scale: float = 0.0) -> Array:
    """Returns `bound` of a module and its parameters; one compile a shape, and one more for guidance.

    Args:
      model: the module.
      params: its parameters.
      rows: `tokens`, `noisy`, `p_mask`, `prompt_length` and `length` of `bound`.
      mask_id, cfg_scale: of `bound`.
    """
    return _bound(model, params, rows, mask_id, cfg_scale or None)


def draw(answer_length: int, samples: int, seed: int, row: int) -> np.ndarray:
    """Draws which tokens of an answer each sample masks.

    Args:
      answer_length: L, at least 1.
      samples: number of draws.
      seed: of all rows.
      row: number of this one.

    Returns:
      (samples, L) bool; the numbers masked are spread evenly over 1..L from a random start, the places are uniform.
    """
    random = np.random.default_rng([seed, row])
    start = random.integers(answer_length)
    count = 1 + (start + np.arange(samples) * answer_length // samples) % answer_length
    return random.permuted(np.arange(answer_length) < count[:, None], axis=1)


def log_likelihood(
    model: Any, params: Params, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *,
    mask_id: int | None = None, samples: int = 128, batch_size: int = 32, cfg_scale: float = 0.0, seed: int = 0,
) -> np.ndarray:
    """Estimates a lower bound of log p(answer | prompt), deterministically.

    Args:
      model: the module, bidirectional.
      params: its parameters.
      prompts: token ids of each row; may be empty.
      answers: token ids of each row, with the end of sequence where it is to count.
      mask_id: id of the mask token; default the model's.
      samples: draws a row; the error falls with their square root or faster.
      batch_size: draws scored at a time, of any rows.
      cfg_scale: strength of classifier-free guidance, see `bound`; with it the result is a score, not a bound.
      seed: of the draws; those of a row follow the seed and the row's number alone.

    Returns:
      (rows,) float64 nats.

    Raises:
      ValueError: a causal model, no mask id, an empty answer, an answer with the mask token, ids outside the
        vocabulary, rows longer than the model's positions, or numbers out of range.
    """
    config = model.config
    mask_id = config.mask_token_id if mask_id is None else mask_id
    _check(config, prompts, answers, mask_id, samples, batch_size, cfg_scale)
    start, size = (np.asarray([len(x) for x in xs], np.int32) for xs in (prompts, answers))
    order = np.argsort(-(start + size), kind="stable")  # rows of a batch are padded to the longest of them
    masks = [draw(length, samples, seed, row) for row, length in enumerate(size)]
    found = np.zeros((len(answers), samples))
    for first in range(0, found.size, batch_size):
        # the last batch is filled up with draws that are scored again, so that there is one batch size
        row, sample = np.divmod(np.minimum(np.arange(first, first + batch_size), found.size - 1), samples)
        row = order[row]
        tokens = pad([[*prompts[r], *answers[r]] for r in row], config.max_position_embeddings)
        mask = np.zeros(tokens.shape, bool)
        for place, (r, s) in enumerate(zip(row, sample)):
            mask[place, start[r]: start[r] + size[r]] = masks[r][s]
        noisy, p_mask = np.where(mask, mask_id, tokens).astype(np.int32), mask.sum(1) / size[row]
        rows = tokens, noisy, p_mask.astype(np.float32), start[row], start[row] + size[row]
        found[row, sample] = np.asarray(compiled_bound(model, params, rows, mask_id, cfg_scale), np.float64)
    return found.mean(1)


def pad(rows: Sequence[Sequence[int]], most: int) -> np.ndarray:
    """Lays rows out side by side.

    Args:
      rows: token ids; none is longer than `most`.
      most: positions that the model has.

    Returns:
      (rows, T) int32, padded with 0; T is one of few, so that few shapes are compiled.
    """
    tokens = np.zeros((len(rows), min(request.bucket(max(map(len, rows)), 32), most)), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return tokens


def _check(config: Any, prompts: Any, answers: Any, mask_id: Any, samples: int, batch_size: int, cfg_scale: float):
    if not config.bidirectional:
        raise ValueError(f"a {config.family} model is causal; the bound needs a bidirectional one, such as "
                         "`python -m launch.convert_weights to-diffusion` makes")
    if config.convention.prompt != "full":
        raise ValueError(f"tokens of this {config.family} model see no block behind their own; the bound is of models "
                         "that see whole rows (LLaDA, Dream)")
    if mask_id is None:
        raise ValueError("mask_id is None and the model's config has no mask_token_id: give the id of its mask token")
    if not 0 <= mask_id < config.vocab_size:
        raise ValueError(f"mask_id = {mask_id} lies outside the vocabulary of {config.vocab_size} ids")
    if len(prompts) != len(answers):
        raise ValueError(f"{len(prompts)} prompts but {len(answers)} answers; give one answer to each prompt")
    for name, value in (("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} = {value}: expected at least 1")
    if not 0 <= cfg_scale < float("inf"):
        raise ValueError(f"cfg_scale = {cfg_scale}: expected 0 (no guidance) or more")
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        ids = [*prompt, *answer]
        if not len(answer):
            raise ValueError(f"answer {row} is empty; give at least one token, such as the end of sequence")
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            bad = next(i for i in ids if not 0 <= i < config.vocab_size)
            raise ValueError(f"row {row} has token id {bad}, outside the vocabulary of {config.vocab_size} ids")
        for what, tokens in (("answer", answer), ("prompt", prompt)):
            if mask_id in tokens:
                raise ValueError(f"{what} {row} contains the mask token {mask_id}, which stands for text to come; "
                                 "remove it")
        if len(ids) > config.max_position_embeddings:
            raise ValueError(f"row {row} has {len(ids)} tokens, more than the model's max_position_embeddings = "
                             f"{config.max_position_embeddings}")
