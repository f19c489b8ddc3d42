"""Is a lossless decoder lossless here? Its answers beside plain autoregressive ones, and why the first difference.

In reduced precision a forward over a block rounds otherwise than forwards of one token, so two tokens that the model
holds for equally likely may swap. Such a near tie is told from an error by the arithmetic itself: both kinds of forward
are run again and compared with one float32 forward. A gap that their errors can close decides nothing, provided that
the verification's errors are of the size that plain decoding makes, too.

Letters: R rows explained at once, P prompt capacity, G generation capacity, K block size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.decode import api
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.flare import ARTrust
from dlm_jax.decode.orthrus import Orthrus
from dlm_jax.decode.protocol import Decoder
from dlm_jax.decode.queries import prefill
from dlm_jax.decode.request import Request, bucket, make
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Model, Pass
from dlm_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a row's answers part.

    Attributes:
      row: of the prompt. number: of the generated token.
      expected: id that plain decoding has there, None where its answer had ended. found: the decoder's, likewise.
      logits: (V,) float32 of the one-token forward there.
      block_logits: (V,) float32 of the verification forward that decided there, run again among other rows.
      gap: logit of the expected token less that of the found one, in the one-token forward.
      error: largest error of the one-token forward's logits against one float32 forward over the whole prefix.
      block_error: the same of the verification forward.
    """

    row: int
    number: int
    expected: int | None
    found: int | None
    logits: np.ndarray
    block_logits: np.ndarray
    gap: float
    error: float
    block_error: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: the errors close the gap, the verification's being as small as the other's."""
        return abs(self.gap) <= 2 * (self.error + self.block_error) and self.block_error <= 4 * self.error

    @property
    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """The two distributions, (V,) float32 each: plain decoding's, the decoder's."""
        softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        return softmax(self.logits), softmax(self.block_logits)

    def __str__(self) -> str:
        plain, block = self.probabilities
        of = lambda p, token: "ended" if token is None else f"{token} (p = {p[token]:.4f})"
        return (f"prompt {self.row}, token {self.number}: {'near tie' if self.near_tie else 'DIVERGENCE'}: expected "
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


AT_ONCE = 32  # differing rows that are explained in one batch: each holds its logits over the vocabulary


def check_lossless(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    decoder: Decoder | None = None,
    *,
    max_new_tokens: int | Sequence[int],
    eos_id: int | None = None,
    mask_id: int | None = None,
    batch_size: int | None = None,
) -> Report:
    """Decodes prompts with a decoder and token by token, and explains the first difference of every row.

    Args:
      model: a module, as `load` returns it, of any dtype.
      params: its parameters.
      prompts: ragged lists of token ids.
      decoder: greedy `Orthrus(...)` or `ARTrust(...)`; None takes the default one that the model is made for.
      max_new_tokens, eos_id, mask_id, batch_size: as in `generate`.

    Returns:
      The report; `report.lossless`, `report.identical`, `print(report)`.

    Raises:
      ValueError: a decoder that makes no such claim, or as `generate`.
    """
    decoder = (Orthrus() if model.config.dual else ARTrust()) if decoder is None else decoder
    if not getattr(decoder, "lossless", False) or isinstance(decoder, Autoregressive) or decoder.sampler.temperature:
        raise ValueError(f"decoder = {decoder!r}: expected Orthrus(temperature=0) or ARTrust(temperature=0); "
                         "losslessness token by token is a property of greedy decoding, sampled answers agree in "
                         "distribution only")
    options = dict(max_new_tokens=max_new_tokens, eos_id=eos_id, mask_id=mask_id, batch_size=batch_size)
    found = api.generate(model, params, prompts, decoder, **options)
    expected = api.generate(model, params, prompts, Autoregressive(), **options)
    parted = [Parted(row, number, list(prompts[row]), ours, plain, found.committed_at[row])
              for row, (ours, plain) in enumerate(zip(found.tokens, expected.tokens))
              if (number := first_difference(ours, plain)) is not None]
    mask_id = model.config.mask_token_id if mask_id is None else mask_id
    differences = [difference for start in range(0, len(parted), AT_ONCE)
                   for difference in explain(model, params, parted[start : start + AT_ONCE], decoder, mask_id)]
    return Report(len(prompts), int(sum(map(len, expected.tokens))), tuple(differences))


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """Returns the first index at which (n,) and (m,) tokens differ, one of them ending included; None if nowhere."""
    common = min(len(a), len(b))
    unequal = np.flatnonzero(a[:common] != b[:common])
    if unequal.size:
        return int(unequal[0])
    return None if len(a) == len(b) else common


@dataclasses.dataclass(frozen=True)
class Parted:
    """A row whose two answers part at a `number`; `committed_at` is the forward that committed each of `found`."""

    row: int
    number: int
    prompt: list[int]
    found: np.ndarray
    expected: np.ndarray
    committed_at: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """First token that each forward up to the difference committed; the last one decided there."""
        groups = np.array(self.committed_at[: self.number + 1])
        if groups[-1] < 0:  # nothing was committed there: the answer had ended
            groups[-1] = groups[-2] + 1
        return np.flatnonzero(np.diff(groups, prepend=-2))


def explain(model: Model, params: Params, rows: Sequence[Parted], decoder: Decoder, mask_id: int | None
            ) -> list[Difference]:
    """Runs the forwards that led to both answers of each row again, and one float32 forward over all its tokens.

    Args:
      model, params: of both answers.
      rows: what to explain.
      decoder: of the answers found.
      mask_id: its mask token.
    """
    decoder = decoder.fitted(model.config)
    request = make([row.prompt for row in rows], max_new_tokens=[row.number + 1 for row in rows], mask_id=mask_id,
                   capacity=decoder.capacity(bucket(max(row.number for row in rows) + 1)))
    prefixes = [row.found[: row.number] for row in rows]
    each = [np.arange(row.number + 1) for row in rows]
    plain = _logits(model, params, Autoregressive(), request, prefixes, each)
    block = _logits(model, params, decoder, request, prefixes, [row.starts for row in rows])
    whole = [[*row.prompt, *prefix.tolist()] for row, prefix in zip(rows, prefixes)]
    length = np.array([len(tokens) for tokens in whole] + [1] * (request.batch - len(rows)), np.int32)
    exact = np.asarray(_whole(model, params, _padded(whole, request.batch, bucket(int(length.max()))), length))
    at = lambda tokens, number: int(tokens[number]) if number < len(tokens) else None
    differences = []
    for i, row in enumerate(rows):
        ours, theirs = at(row.found, row.number), at(row.expected, row.number)
        gap = float("inf") if None in (ours, theirs) else float(plain[i, theirs] - plain[i, ours])
        worst = lambda x: float(np.abs(x[i] - exact[i]).max())
        differences.append(
            Difference(row.row, row.number, theirs, ours, plain[i], block[i], gap, worst(plain), worst(block)))
    return differences


def _padded(rows: Sequence[Sequence[int]], count: int, width: int, fill: int = 0) -> np.ndarray:
    out = np.full((count, width), fill, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _logits(model, params, decoder, request: Request, prefixes, starts) -> np.ndarray:
    """Feeds answers in the pieces that begin at their `starts`; returns the (R, V) logits behind the last tokens."""
    G = request.capacity
    tokens, rounds = _padded(prefixes, request.batch, G + decoder.span), _padded(starts, request.batch, G + 1, -1)
    length = np.array([len(prefix) for prefix in prefixes] + [0] * (request.batch - len(prefixes)), np.int32)
    return np.asarray(_replayed(model, decoder, params, request, tokens, rounds, length))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _replayed(model, decoder, params, request, tokens, starts, length):
    score, width = model.scorer(params), min(decoder.span, request.capacity)
    hidden, cache, _ = prefill(score, request, width)
    take = lambda x, index: jnp.take_along_axis(x, index, axis=1)

    def piece(carry, of):
        (cache, last), (start, following) = carry, of
        newest = jnp.maximum(start, 1) - 1
        size = jnp.where(start > 0, jnp.minimum(width, request.capacity - newest), 0)
        out, cache = decoder.replay(score, request, newest, take(tokens, newest[:, None] + jnp.arange(width)), size,
                                    cache)
        here = (start > 0) & (newest < length) & (length <= newest + size)
        own = take(out, jnp.clip(length - 1 - newest, 0, width - 1)[:, None, None])[:, 0]
        cache = cache.commit(jnp.where(following > 0, following - 1 - newest, size))
        return (cache, jnp.where(here[:, None], own, last)), None

    (_, last), _ = jax.lax.scan(piece, (cache, hidden[:, 0]), (starts[:, :-1].T, starts[:, 1:].T))
    return score.head(last)


@functools.partial(jax.jit, static_argnums=0)
def _whole(model, params, tokens, length):
    exact = dataclasses.replace(model, dtype=jnp.float32).scorer(params)
    with jax.default_matmul_precision("highest"):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = exact.hidden(tokens, Pass(positions, vis.causal(positions < length[:, None])))
        return exact.head(jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1))[:, 0]
