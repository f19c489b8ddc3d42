"""Orthrus: the diffusion view drafts a block, the frozen AR view of the same model keeps what it would have said.

Both views use one cache. A draft's keys and values stand at the entries that its verification overwrites, so nothing
is held beyond the AR cache; accepting a shorter run moves nothing.

Letters: B batch, K block size, G generation capacity, S cache entries, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling, speculative
from dlm_jax.decode.autoregressive import first_token
from dlm_jax.decode.canvas import AUTOREGRESSIVE, DRAFTED, Canvas, scatter
from dlm_jax.decode.ledger import DRAFT, VERIFY, Counts
from dlm_jax.decode.parts import static
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.queries import Queries, ask
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache, Scorer

_SIZE = 32  # tokens of a block, the paper's (Sec. 4.1)


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: committed tokens.
      last: (B,) int32 newest token; its key and value are not in the cache yet.
      length: (B,) int32 committed tokens.
      drafts: (B, K-1) int32 of the latest round.
      drafted: (B, K-1) int32 number of each, G where there was none.
      accepted: (B,) int32 drafts of the latest round that the AR view agreed with, in a row.
      cache: keys and values of the AR view.
    """

    canvas: Canvas
    last: Array
    length: Array
    drafts: Array
    drafted: Array
    accepted: Array
    cache: Cache
    counts: Counts
    done: Array


@decoder
class Orthrus(Decoder):
    """Parallel drafting by the diffusion view, kept where the AR view agrees; needs a dual model.

    Greedy output equals `Autoregressive()` on the same model; sampled output equals it in distribution.

    Attributes:
      block_size: K, the newest token and K - 1 masks; free at decode time. None takes what the model was trained on,
        32 where its config does not say.
      sampler: of both views; greedy, the longest run of drafts that equals the AR view's own choices is kept.

    Source: Orthrus, Sec. 3.3.
    """

    needs = Needs(bidirectional=False, mask=True, dual=True)
    lossless = True
    block_size: int | None = static(None, least=2)
    sampler: Sampler = Sampler()

    def check_model(self, config: Any) -> None:
        """See `Decoder.check_model`."""
        super().check_model(config)
        if self.size(config) < 2:
            raise ValueError(f"block_size = {config.block_size} in the model's config leaves no room for drafts: name "
                             "one of at least 2, as in Orthrus(block_size=32)")

    def size(self, model: Any) -> int:
        """Returns the block size for a model, given as its config or its scorer."""
        return self.block_size or model.block_size or _SIZE

    def fitted(self, config: Any) -> "Orthrus":
        """See `Decoder.fitted`."""
        return self.replace(block_size=self.size(config))

    @property
    def span(self) -> int:
        """See `Decoder.span`."""
        return self.block_size or _SIZE

    def replay(self, score: Scorer, request: Request, start: Array, tokens: Array, size: Array, cache: Cache
               ) -> tuple[Array, Cache]:
        """See `Decoder.replay`: the verification."""
        number = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return forward(score, True, request, number, tokens, size, cache)

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; the prefill yields the first token, as in `Autoregressive`."""
        first = first_token(lambda hidden, keys: self.sampler.draw(score.head(hidden), keys), score, request)
        none = jnp.full((request.batch, self._width(score, request) - 1), request.capacity, jnp.int32)
        return State(first.canvas, first.last, first.length, jnp.zeros_like(none), none, jnp.zeros_like(first.length),
                     first.cache, first.counts, first.done)

    def _width(self, score: Scorer, request: Request) -> int:
        """Returns K, which no answer needs to exceed."""
        return min(self.size(score), request.capacity)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one forward of each view."""
        K = self._width(score, request)
        offset, active = jnp.arange(K, dtype=jnp.int32), ~state.done
        # a block ends with the request; a row that is done has none
        width = jnp.where(state.done, 0, jnp.minimum(K, self._room(request) - state.length + 1))
        place = state.length[:, None] + offset  # number of the token that each output predicts
        drafts, draft_logits, cache, counts = self._drafts(score, request, state, place, width)

        counts = counts.add(VERIFY, width, active)
        cache = cache.commit(jnp.zeros_like(width))  # what has been drafted is read once more to be judged
        block = jnp.concatenate([state.last[:, None], drafts], axis=1)
        hidden, cache = forward(score, True, self._whole(request), place - 1, block, width, cache)
        keys = sampling.draw_keys(request.keys, counts.after_prefill(), place)
        survives, choice = speculative.judge(self.sampler, drafts, draft_logits, score.head(hidden), keys)
        accepted = speculative.prefix_length(survives & (offset < width[:, None])[:, 1:])

        own = offset == accepted[:, None]  # the place of the AR view's own token
        tokens = jnp.where(own, choice, jnp.concatenate([drafts, choice[:, -1:]], axis=1))
        keep = (offset <= accepted[:, None]) & (place < request.max_new_tokens[:, None]) & active[:, None]
        keep = speculative.through_eos(tokens, keep, request.eos_id)
        canvas = state.canvas.commit(
            place, keep, tokens, jnp.where(own, AUTOREGRESSIVE, DRAFTED), counts.after_prefill())
        gained = jnp.sum(keep, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(tokens, jnp.maximum(gained - 1, 0)[:, None], axis=1)[:, 0]
        last, length = jnp.where(active, last, state.last), state.length + gained
        return State(
            canvas, last, length, jnp.where(active[:, None], drafts, state.drafts),
            jnp.where((offset < width[:, None])[:, 1:], place[:, :-1], request.capacity), accepted,
            cache.commit(gained), counts,
            state.done | (last == request.eos_id) | (length >= request.max_new_tokens))

    def _room(self, request: Request) -> Array:
        """Returns (B,) the number behind the last token that may be read."""
        return request.max_new_tokens

    def _whole(self, request: Request) -> Request:
        """Returns the request with all tokens that may be read."""
        return request.replace(max_new_tokens=self._room(request))

    def _drafts(self, score: Scorer, request: Request, state: State, place: Array, width: Array
                ) -> tuple[Array, Array, Cache, Counts]:
        """Drafts what follows the newest token.

        Args:
          score, request, state: of the batch.
          place: (B, K) int32 number of the token behind each of the block.
          width: (B,) int32 tokens of the block that count.

        Returns:
          (B, K-1) int32 drafts, the (B, K-1, V) logits that they were drawn from, cache and counts.
        """
        counts = state.counts.add(DRAFT, width, ~state.done)
        masks = jnp.full((request.batch, place.shape[1] - 1), request.mask_id, jnp.int32)
        block = jnp.concatenate([state.last[:, None], masks], axis=1)
        hidden, cache = forward(score.view("diffusion"), False, request, place - 1, block, width, state.cache)
        # shaped once: drafts are judged by what they were drawn from
        logits = jax.lax.cond(self.sampler.warm, self.sampler.shaped, lambda x: x, score.head(hidden[:, :-1]))
        keys = sampling.draw_keys(request.keys, counts.after_prefill(), place[:, :-1])
        return Sampler(temperature=self.sampler.warm.astype(jnp.float32)).draw(logits, keys), logits, cache, counts

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `Decoder.provisional`."""
        empty, drafted = jnp.zeros_like(state.canvas.tokens), state.drafted < state.canvas.tokens.shape[1]
        return (scatter(empty, state.drafted, drafted, state.drafts),
                scatter(empty > 0, state.drafted, drafted, True))


def forward(view: Scorer, causal: bool, request: Request, number: Array, tokens: Array, width: Array,
            cache: Cache) -> tuple[Array, Cache]:
    """Runs one view over a block that continues the committed tokens, and writes the block's keys and values.

    Args:
      view: the AR view, or the diffusion view.
      causal: whether block tokens see those up to themselves, or the whole block.
      request: the batch.
      number: (B, K) int32 numbers of the block's tokens.
      tokens: (B, K) int32 block.
      width: (B,) int32 tokens of the block that count; the others see nothing and are seen by none.
      cache: capacity S; entries before the block are the committed tokens'.

    Returns:
      (B, K, D) hidden states and the cache.
    """
    active = jnp.arange(tokens.shape[1]) < width[:, None]
    position = request.position(number)
    if causal:
        return ask(view, request, Queries(tokens, number, active, position), cache)
    before = jnp.broadcast_to(position[:, :1] - 1, position.shape)
    return ask(view, request, Queries(tokens, number, active, before, group=jnp.zeros_like(number)), cache)
