"""Left-to-right decoding, one token a forward: the baseline every other decoder is measured against."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.ledger import DECODE, Counts
from dlm_jax.decode.state import AUTOREGRESSIVE, Canvas, Request, check_attention, check_number, prefill
from dlm_jax.nn import visibility as vis
from dlm_jax.nn.cache import KVCache
from dlm_jax.scoring import Pass, Scorer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Loop carry; `last` (B,) int32 is the newest token and `length` (B,) int32 how many there are."""

    canvas: Canvas
    last: Array
    length: Array
    cache: KVCache
    counts: Counts
    done: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoregressive:
    """Next-token decoding with a KV cache.

    Attributes:
      temperature: 0 is greedy.
      top_k: tokens kept before sampling; 0 keeps all.
      top_p: probability mass kept before sampling, in (0, 1]; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """See `state.Decoder.check`."""
        check_number("temperature", self.temperature, 0)
        check_number("top_k", self.top_k, 0, kind=int)
        check_number("top_p", self.top_p, 1e-6, 1)

    def check_model(self, config: Any) -> None:
        """See `state.Decoder.check_model`."""
        check_attention(self, config, bidirectional=False)

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `state.Decoder.check_request`: any will do."""

    def resolved(self) -> "Autoregressive":
        """See `state.Decoder.resolved`."""
        return self

    def generation_capacity(self, max_new_tokens: int) -> int:
        """See `state.Decoder.generation_capacity`."""
        return max_new_tokens

    def _pick(self, score: Scorer, request: Request, hidden: Array, index: Array) -> Array:
        keys = sampling.draw_keys(request.keys, index, index[:, None])
        return sampling.sample(score.head(hidden), keys, self.temperature, self.top_k, self.top_p)[:, 0]

    def init(self, score: Scorer, request: Request) -> State:
        """See `state.Decoder.init`; the prefill yields the first token."""
        hidden, cache, counts = prefill(score, request)
        zero = jnp.zeros(request.batch, jnp.int32)
        first = self._pick(score, request, hidden, zero)
        active = request.max_new_tokens > 0
        canvas = Canvas.empty(request).commit(zero[:, None], active[:, None], first[:, None], AUTOREGRESSIVE, zero)
        done = (first == request.eos_id) | (request.max_new_tokens <= 1)
        return State(canvas, first, active.astype(jnp.int32), cache, counts, done)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `state.Decoder.step`."""
        P, S = request.prompt_capacity, request.prompt_capacity + request.capacity
        active = ~state.done
        newest = state.length - 1
        entry = jnp.arange(S, dtype=jnp.int32)
        prompt = entry < request.prompt_length[:, None]
        rank = jnp.where(prompt | (entry >= P), entry, vis.NONE)
        limit = jnp.where(active, P + newest, vis.NONE)[:, None]
        hidden, cache = score.hidden(
            state.last[:, None],
            Pass((request.prompt_length + newest)[:, None], vis.by_rank(jnp.zeros_like(limit), limit, rank),
                 jnp.where(active, P + newest, S)[:, None]),
            state.cache,
        )
        token = self._pick(score, request, hidden, state.length)
        counts = state.counts.add(DECODE, active.astype(jnp.int32), active)
        canvas = state.canvas.commit(
            state.length[:, None], active[:, None], token[:, None], AUTOREGRESSIVE, counts.after_prefill())
        length = state.length + active
        done = state.done | (token == request.eos_id) | (length >= request.max_new_tokens)
        return State(canvas, jnp.where(active, token, state.last), length, cache, counts, done)

    def finish(self, request: Request, state: State) -> Canvas:
        """See `state.Decoder.finish`."""
        del request
        return state.canvas

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `state.Decoder.provisional`: every token is final at once."""
        return state.canvas.tokens, jnp.zeros(state.canvas.tokens.shape, bool)
