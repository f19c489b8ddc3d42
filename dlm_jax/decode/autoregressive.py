"""Left-to-right decoding, one token a forward: the baseline every other decoder is measured against."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.canvas import AUTOREGRESSIVE, Canvas
from dlm_jax.decode.ledger import DECODE, Counts
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.queries import Queries, ask, prefill
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache, Scorer


@struct.dataclass
class State:
    """Loop carry; `last` (B,) int32 is the newest token and `length` (B,) int32 how many there are."""

    canvas: Canvas
    last: Array
    length: Array
    cache: Cache
    counts: Counts
    done: Array


def first_token(draw: Callable[[Array, Array], Array], score: Scorer, request: Request, window: int = 0) -> State:
    """Returns the state after a prefill that yields the first token.

    Args:
      draw: returns (B, 1) tokens of (B, 1, D) hidden states, with (B, 1) keys.
      score: the model.
      request: the batch.
      window: see `prefill`.
    """
    hidden, cache, counts = prefill(score, request, window)
    zero = jnp.zeros(request.batch, jnp.int32)
    token = draw(hidden, sampling.draw_keys(request.keys, zero, zero[:, None]))[:, 0]
    active = request.max_new_tokens > 0
    canvas = Canvas.empty(request).commit(zero[:, None], active[:, None], token[:, None], AUTOREGRESSIVE, zero)
    done = (token == request.eos_id) | (request.max_new_tokens <= 1)
    return State(canvas, token, active.astype(jnp.int32), cache, counts, done)


@decoder
class Autoregressive(Decoder):
    """Next-token decoding with a KV cache.

    Attributes:
      sampler: of every token.
    """

    needs = Needs(bidirectional=False, recurrent=True)
    lossless = True
    sampler: Sampler = Sampler()

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; the prefill yields the first token."""
        return first_token(lambda hidden, keys: self.sampler.draw(score.head(hidden), keys), score, request)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`."""
        active = ~state.done
        hidden, cache = self.replay(score, request, state.length - 1, state.last[:, None],
                                    active.astype(jnp.int32), state.cache)
        keys = sampling.draw_keys(request.keys, state.length, state.length[:, None])
        token = self.sampler.draw(score.head(hidden), keys)[:, 0]
        counts = state.counts.add(DECODE, active.astype(jnp.int32), active)
        canvas = state.canvas.commit(
            state.length[:, None], active[:, None], token[:, None], AUTOREGRESSIVE, counts.after_prefill())
        length = state.length + active
        done = state.done | (token == request.eos_id) | (length >= request.max_new_tokens)
        return State(canvas, jnp.where(active, token, state.last), length, cache.commit(active.astype(jnp.int32)),
                     counts, done)

    def replay(self, score: Scorer, request: Request, start: Array, tokens: Array, size: Array, cache: Cache
               ) -> tuple[Array, Cache]:
        """See `Decoder.replay`."""
        number = start[:, None]
        return ask(score, request, Queries(tokens, number, size[:, None] > 0, request.position(number)), cache)
