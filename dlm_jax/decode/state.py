"""What every decoder shares: the request, the canvas of generated tokens, and the protocol.

A row's buffer holds the prompt at entries [0, P) and generated token g at entry P + g; its logical position is
prompt length + g. Rows are ragged, finished rows are frozen, and nothing of a row depends on its neighbours.

Letters: B batch, P prompt capacity, G generation capacity, S = P + G.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode.ledger import PREFILL, Counts
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Pass, Scorer

NOTHING, DRAFTED, AUTOREGRESSIVE = -1, 0, 1  # where a token came from
ORIGINS = {DRAFTED: "drafted", AUTOREGRESSIVE: "autoregressive"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """A batch of prompts and its limits; every value is traced, only `capacity` fixes a shape.

    Attributes:
      prompt: (B, P) int32, right-padded.
      prompt_length: (B,) int32, at least 1.
      max_new_tokens: (B,) int32, at most G; 0 for rows that only fill up the batch.
      eos_id: () int32; -1 for none.
      mask_id: () int32; -1 for none.
      keys: (B,) PRNG keys.
      capacity: G, static.
    """

    prompt: Array
    prompt_length: Array
    max_new_tokens: Array
    eos_id: Array
    mask_id: Array
    keys: Array
    capacity: int = dataclasses.field(metadata=dict(static=True))

    @property
    def batch(self) -> int:
        """B."""
        return self.prompt.shape[0]

    @property
    def prompt_capacity(self) -> int:
        """P."""
        return self.prompt.shape[1]

    def prompt_rank(self) -> Array:
        """Returns (B, P) int32: 0 on prompt tokens, -1 on padding."""
        index = jnp.arange(self.prompt_capacity)
        return jnp.where(index < self.prompt_length[:, None], 0, vis.NONE).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """Generated tokens as committed.

    Attributes:
      tokens: (B, G) int32; the mask id (or 0) where nothing is committed.
      committed_at: (B, G) int32 forward after prefill at which a token was committed; -1 where nothing is.
      origin: (B, G) int32 `DRAFTED`, `AUTOREGRESSIVE` or `NOTHING`.
    """

    tokens: Array
    committed_at: Array
    origin: Array

    @classmethod
    def empty(cls, request: Request) -> "Canvas":
        """Returns a canvas with nothing on it."""
        shape = (request.batch, request.capacity)
        nothing = jnp.full(shape, -1, jnp.int32)
        return cls(jnp.full(shape, jnp.maximum(request.mask_id, 0), jnp.int32), nothing, nothing)

    def commit(self, index: Array, mask: Array, tokens: Array, origin: Array | int, forward: Array) -> "Canvas":
        """Writes tokens.

        Args:
          index: (B, W) int32 generated-token indices, distinct within a row.
          mask: (B, W) bool which of them to write.
          tokens: (B, W) int32.
          origin: (B, W) or () int32.
          forward: (B,) int32 forwards after prefill so far.
        """
        row = jnp.arange(index.shape[0])[:, None]
        index = jnp.where(mask, index, self.tokens.shape[1])
        put = lambda old, new: old.at[row, index].set(jnp.broadcast_to(new, index.shape), mode="drop")
        return Canvas(put(self.tokens, tokens), put(self.committed_at, forward[:, None]), put(self.origin, origin))


class Decoder(Protocol):
    """A decoding procedure: a frozen dataclass of its paper's hyperparameters.

    `init` prefills, `step` runs one round for every row that is not done (one forward; a draft and its
    verification are two), and the state carries at least `canvas`, `counts` and `done` (B,). The compiled loop, the
    streaming loop and the plain Python loop are all made from the same `step`.
    """

    def check(self) -> None:
        """Raises ValueError for hyperparameters that make no sense."""

    def check_model(self, config: Any) -> None:
        """Raises ValueError for a model that the procedure is not made for."""

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """Raises ValueError for prompts, lengths or special ids that the procedure cannot work with.

        Args:
          prompts: token ids of each row.
          limits: (B,) tokens to generate.
          eos_id, mask_id: None for none.
        """

    def resolved(self) -> "Decoder":
        """Returns the decoder with values in place of None, so that equal hyperparameters compile alike."""

    def generation_capacity(self, max_new_tokens: int) -> int:
        """Returns the canvas length G needed for that many tokens."""

    def init(self, score: Scorer, request: Request) -> Any:
        """Returns the state after prefill."""

    def step(self, score: Scorer, request: Request, state: Any) -> Any:
        """Returns the state one round later."""

    def finish(self, request: Request, state: Any) -> Canvas:
        """Returns the canvas to be read as the answer."""

    def provisional(self, state: Any) -> tuple[Array, Array]:
        """Returns (B, G) tokens and a (B, G) bool mask of the latest drafts, which may come to nothing."""


def prefill(score: Scorer, request: Request) -> tuple[Array, Cache, Counts]:
    """Runs the prompts and keeps their keys and values.

    Args:
      score: the model.
      request: the batch.

    Returns:
      (B, 1, D) hidden state of each prompt's last token, a cache of capacity S, and counts with the prefill.
    """
    P = request.prompt_capacity
    index = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), request.prompt.shape)
    valid = index < request.prompt_length[:, None]
    cache = score.init_cache(request.batch, P)
    hidden, cache = score.hidden(
        request.prompt, Pass(index, vis.causal(valid), jnp.where(valid, index, P)), cache)
    last = jnp.take_along_axis(hidden, (request.prompt_length - 1)[:, None, None], axis=1)
    active = request.max_new_tokens > 0
    counts = Counts.zeros(request.batch).add(PREFILL, request.prompt_length, active)
    return last, cache.grow(P + request.capacity), counts


def check_attention(decoder: Decoder, config: Any, bidirectional: bool) -> None:
    """Raises ValueError unless a model's attention is what a decoder needs.

    Args:
      decoder: named in the message.
      config: of the model.
      bidirectional: what the decoder needs.
    """
    if config.bidirectional == bidirectional:
        return
    if bidirectional:
        fix = ("decode it with Autoregressive, or make a masked-diffusion model of it "
               "(launch.convert_weights to-diffusion) and train that")
    else:
        fix = "decode it with a masked-diffusion decoder (MaskedDiffusion)"
    kinds = {True: "bidirectional", False: "causal"}
    raise ValueError(f"{type(decoder).__name__} needs a {kinds[bidirectional]} model, this {config.family} one is "
                     f"{kinds[config.bidirectional]}: {fix}")


def check_mask(decoder: Decoder, mask_id: int | None, eos_id: int | None = None) -> None:
    """Raises ValueError unless there is a mask token to draft from.

    Args:
      decoder: named in the message.
      mask_id: of the mask token, None for none.
      eos_id: id that the mask must not be, because both may stand on the canvas; None where no mask does.
    """
    if mask_id is None:
        raise ValueError(f"{type(decoder).__name__} drafts from a mask token and the model's config names none: "
                         "pass mask_id, or convert the checkpoint (launch.convert_weights adds one)")
    if mask_id == eos_id:
        raise ValueError(f"mask_id = eos_id = {mask_id}: the mask must be a token of its own")


def check_no_mask(prompts: Sequence[Sequence[int]], mask_id: int, literal: bool) -> None:
    """Raises ValueError for a prompt that holds the mask, unless it is asked for as literal text.

    Args:
      prompts: token ids.
      mask_id: of the mask token.
      literal: the decoder's `literal_mask`.
    """
    for i, prompt in enumerate(prompts):
        if not literal and mask_id in prompt:
            raise ValueError(f"prompt {i} holds the mask token {mask_id}, which the model takes for a token to "
                             "come: remove it, or set literal_mask to keep it as it is")


def check_number(name: str, value: float, least: float, most: float = float("inf"), kind: type = float) -> None:
    """Raises ValueError unless a hyperparameter is a number of its kind in [least, most].

    Args:
      name: of the hyperparameter.
      value: what was given; a float may be given as an int.
      least, most: accepted range.
      kind: float or int.
    """
    fits = isinstance(value, (int, np.integer)) or (kind is float and isinstance(value, (float, np.floating)))
    if not fits or isinstance(value, bool) or not least <= value <= most or value == float("inf"):  # NaN: false
        upper = " and finite" if most == float("inf") else f" and at most {most}"
        raise ValueError(f"{name} = {value!r}: expected {'an int' if kind is int else 'a number'} of at least "
                         f"{least}{upper}")


def bucket(size: int, least: int = 16) -> int:
    """Returns the smallest of 16, 24, 32, 48, 64, 96, … that is at least `size`: few shapes, little padding."""
    power = least
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power
