"""Is a lossless decoder lossless here? Its answers beside plain autoregressive ones, and why the first difference.

In reduced precision a forward over a block rounds otherwise than forwards of one token, so two tokens that the model
holds for equally likely may swap. Such a near tie is told from an error by the arithmetic itself: the one-token
forwards are compared with one float32 forward, and a gap below twice their own error decides nothing.

Letters: B batch, P prompt capacity, G generation capacity, K block size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.decode import api, orthrus
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.state import Request, bucket, prefill
from dlm_jax.nn import visibility as vis
from dlm_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a row's answers part.

    Attributes:
      row: number of the prompt. index: of the generated token.
      expected: id that plain decoding has there, None where its answer had ended. found: the decoder's, likewise.
      logits: (V,) float32 of the one-token forward there.
      block_logits: (V,) float32 of the verification forward that decided there.
      gap: logit of the expected token less that of the found one, in the one-token forward.
      error: largest error of the one-token forward's logits against one float32 forward over the whole prefix.
      block_error: the same of the verification forward.
    """

    row: int
    index: int
    expected: int | None
    found: int | None
    logits: np.ndarray
    block_logits: np.ndarray
    gap: float
    error: float
    block_error: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: the gap and the verification are within what plain decoding gets wrong."""
        return self.gap <= 2 * self.error and self.block_error <= 4 * self.error

    @property
    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """The two distributions, (V,) float32 each: plain decoding's, the decoder's."""
        softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        return softmax(self.logits), softmax(self.block_logits)

    def __str__(self) -> str:
        plain, block = self.probabilities
        of = lambda p, token: "ended" if token is None else f"{token} (p = {p[token]:.4f})"
        return (f"prompt {self.row}, token {self.index}: {'near tie' if self.near_tie else 'DIVERGENCE'}: expected "
                f"{of(plain, self.expected)}, found {of(block, self.found)}; logit gap {self.gap:.2e}, error of plain "
                f"decoding {self.error:.2e}, of the verification {self.block_error:.2e}")


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_lossless` found.

    Attributes:
      rows: prompts answered twice. tokens: compared.
      differences: the first one of every row that has any.
    """

    rows: int
    tokens: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether all answers are the same, token for token."""
        return not self.differences

    @property
    def lossless(self) -> bool:
        """Whether all answers are the same but for near ties."""
        return all(difference.near_tie for difference in self.differences)

    @property
    def first(self) -> Difference | None:
        """The first divergence, else the first near tie, else None."""
        return min(self.differences, key=lambda d: (d.near_tie, d.row), default=None)

    def __str__(self) -> str:
        ties = sum(d.near_tie for d in self.differences)
        head = (f"{'lossless' if self.lossless else 'NOT lossless'}: {self.rows} prompts, {self.tokens} tokens, "
                f"{self.rows - len(self.differences)} rows identical, {ties} near ties, "
                f"{len(self.differences) - ties} divergences")
        return "\n".join([head, *map(str, self.differences[:8])])


def check_lossless(
    model: Any,
    params: Params,
    prompts: Sequence[Sequence[int]],
    decoder: orthrus.Orthrus | None = None,
    *,
    max_new_tokens: int | Sequence[int],
    eos_id: int | None = None,
    mask_id: int | None = None,
    batch_size: int | None = None,
) -> Report:
    """Decodes prompts with Orthrus and token by token, and explains the first difference of every row.

    Args:
      model: a dual module, as `load` returns it, of any dtype.
      params: its parameters.
      prompts: ragged lists of token ids.
      decoder: greedy `Orthrus(...)`; None takes the default one.
      max_new_tokens, eos_id, mask_id, batch_size: as in `generate`.

    Returns:
      The report; `report.lossless`, `report.identical`, `print(report)`.

    Raises:
      ValueError: a decoder that is not greedy Orthrus, or as `generate`.
    """
    decoder = orthrus.Orthrus() if decoder is None else decoder
    if not isinstance(decoder, orthrus.Orthrus) or decoder.temperature != 0:
        raise ValueError(f"decoder = {decoder!r}: expected Orthrus(temperature=0); losslessness token by token is a "
                         "property of greedy decoding, sampled answers agree in distribution only")
    options = dict(max_new_tokens=max_new_tokens, eos_id=eos_id, mask_id=mask_id, batch_size=batch_size)
    found = api.generate(model, params, prompts, decoder, **options)
    expected = api.generate(model, params, prompts, Autoregressive(), **options)
    differences = []
    for row, (ours, plain) in enumerate(zip(found.tokens, expected.tokens)):
        index = first_difference(ours, plain)
        if index is not None:
            differences.append(explain(model, params, prompts[row], ours, plain, index,
                                       found.committed_at[row], decoder.block_size, row))
    return Report(len(prompts), int(sum(map(len, expected.tokens))), tuple(differences))


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """Returns the first index at which two token lists differ, one of them ending included; None if they are equal."""
    common = min(len(a), len(b))
    unequal = np.flatnonzero(a[:common] != b[:common])
    if unequal.size:
        return int(unequal[0])
    return None if len(a) == len(b) else common


def explain(model: Any, params: Params, prompt: Sequence[int], found: np.ndarray, expected: np.ndarray, index: int,
            committed_at: np.ndarray, block_size: int, row: int = 0) -> Difference:
    """Runs the forwards that led to both answers again, and one float32 forward over all.

    Args:
      model, params: a dual or autoregressive model.
      prompt: token ids.
      found, expected: the two answers; equal before `index`.
      index: of the generated token they part at.
      committed_at: of `found`, the forward that committed each token.
      block_size: K of the verification forwards.
      row: number of the prompt.
    """
    prefix = np.asarray(found[:index], np.int32)
    # a forward starts with the token before the first one it committed; a run stops where its forward changes
    groups = np.asarray(committed_at[: index + 1])
    if index < len(groups) and groups[index] < 0:  # nothing was committed there: the answer ended before
        groups[index] = groups[index - 1] + 1
    starts = np.flatnonzero(np.diff(groups, prepend=-2))
    request = api.make_request([list(prompt)], max_new_tokens=index + 1, capacity=bucket(index + 1))
    plain = _logits(model, params, request, prefix, np.arange(index + 1), 1)
    block = _logits(model, params, request, prefix, starts, block_size)
    exact = np.asarray(_whole(model, params, jnp.asarray([[*prompt, *prefix.tolist()]], jnp.int32)))
    at = lambda tokens: int(tokens[index]) if index < len(tokens) else None
    ours, plains = at(found), at(expected)
    gap = float(plain[plains] - plain[ours]) if None not in (ours, plains) else float("inf")
    worst = lambda x: float(np.abs(x - exact).max())
    return Difference(row, index, plains, ours, plain, block, gap, worst(plain), worst(block))


def _logits(model, params, request: Request, tokens: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
    """Feeds an answer in the pieces that begin at `starts`; returns the (V,) logits behind its last token."""
    padded = np.zeros(request.capacity + width, np.int32)
    padded[: len(tokens)] = tokens
    rounds = np.full(request.capacity, -1, np.int32)
    rounds[: len(starts)] = starts
    return np.asarray(_replayed(model, width, params, request, jnp.asarray(padded), jnp.asarray(rounds),
                                jnp.int32(len(tokens))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _replayed(model, width, params, request, tokens, starts, length):
    score = model.scorer(params)
    hidden, cache, _ = prefill(score, request)
    last = hidden[:, 0]

    def piece(carry, start):
        cache, last = carry
        newest = jnp.maximum(start, 1) - 1
        block = jax.lax.dynamic_slice_in_dim(tokens, newest, width)[None]
        size = jnp.where(start > 0, jnp.minimum(width, request.capacity - newest), 0)
        out, cache = orthrus.forward(score, True, request, newest[None], block, size[None], cache)
        here = (start > 0) & (newest < length) & (length <= newest + size)
        last = jnp.where(here, out[:, jnp.clip(length - 1 - newest, 0, width - 1)], last)
        return (cache, last), None

    (_, last), _ = jax.lax.scan(piece, (cache, last), starts)
    return score.head(last)[0]


@functools.partial(jax.jit, static_argnums=0)
def _whole(model, params, tokens):
    exact = dataclasses.replace(model, dtype=jnp.float32).scorer(params)
    with jax.default_matmul_precision("highest"):
        valid = jnp.ones(tokens.shape, bool)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = exact.hidden(tokens, positions, vis.causal(valid))
        return exact.head(hidden[:, -1:])[0, 0]
