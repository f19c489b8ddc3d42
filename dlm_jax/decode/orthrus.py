"""Orthrus: the diffusion view drafts a block, the frozen AR view of the same model keeps what it would have said.

Both views use one cache. A draft's keys and values stand at the entries that its verification overwrites, so nothing
is held beyond the AR cache; accepting a shorter run moves nothing, it only lowers the visible rank.

Letters: B batch, K block size, G generation capacity, S cache entries, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.ledger import DRAFT, VERIFY, Counts
from dlm_jax.decode.state import (
    AUTOREGRESSIVE, DRAFTED, Canvas, Request, check_attention, check_mask, check_number, prefill)
from dlm_jax.nn import visibility as vis
from dlm_jax.nn.cache import KVCache
from dlm_jax.scoring import Pass, Scorer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Loop carry.

    Attributes:
      canvas: committed tokens.
      last: (B,) int32 newest token; its key and value are not in the cache yet.
      length: (B,) int32 committed tokens.
      drafts: (B, K-1) int32 of the latest round.
      drafted_at: (B, K-1) int32 generated-token index of each, G where there was none.
      accepted: (B,) int32 drafts of the latest round that the AR view agreed with, in a row.
      cache: keys and values of the AR view.
      counts, done: see `state.Decoder`.
    """

    canvas: Canvas
    last: Array
    length: Array
    drafts: Array
    drafted_at: Array
    accepted: Array
    cache: KVCache
    counts: Counts
    done: Array


def accept(drafts: Array, draft_logits: Array, logits: Array, keys: Array) -> tuple[Array, Array]:
    """Judges drafts so that what is kept is distributed as the verifying view's own samples.

    A draft x survives with probability min(1, p(x) / q(x)); in its place comes a draw from max(p - q, 0), and after
    the last draft one from p.

    Args:
      drafts: (B, K-1) int32 drawn from q.
      draft_logits: (B, K-1, V) logits of q, as they were drawn from.
      logits: (B, K, V) logits of p at the same places and one more.
      keys: (B, K) PRNG keys, fresh.

    Returns:
      (B, K-1) bool which drafts survive, and (B, K) int32 the token to take at each place if the one drafted there
      does not.

    Source: Orthrus, Sec. 3.3 (exact rejection sampling); Leviathan et al., 2023, Algorithm 1. A correction drawn from p
    itself, as Orthrus' text can be read, would not be exact: p's mass under q would count twice.
    """
    p, q = jax.nn.softmax(logits, axis=-1), jax.nn.softmax(draft_logits, axis=-1)
    of = lambda mass: jnp.take_along_axis(mass, drafts[..., None], axis=-1)[..., 0]
    coin, other = (jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, i)))(keys) for i in range(2))
    chance = jax.vmap(jax.vmap(jax.random.uniform))(coin[:, :-1])
    survives = chance * of(q) < of(p[:, :-1])
    rest = jnp.maximum(p[:, :-1] - q, 0.0)
    # where p = q nothing is rejected, but for rounding: p then stands for the empty rest
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p[:, :-1])
    mass = jnp.concatenate([rest, p[:, -1:]], axis=1)
    return survives, sampling.draw(jnp.log(mass), other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Orthrus:
    """Parallel drafting by the diffusion view, kept where the AR view agrees; needs a dual model.

    Greedy output equals `Autoregressive()` on the same model; sampled output equals it in distribution.

    Attributes:
      block_size: K, the newest token and K - 1 masks; free at decode time. None takes what the model was trained on,
        32 where its config does not say.
      temperature: 0 is greedy: the longest run of drafts that equals the AR view's own choices.
      top_k: tokens kept before sampling, in both views; 0 keeps all.
      top_p: probability mass kept before sampling, in both views, in (0, 1]; 1 keeps all.

    Source: Orthrus, Sec. 3.3.
    """

    block_size: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """See `state.Decoder.check`."""
        if self.block_size is not None:
            check_number("block_size", self.block_size, 2, kind=int)
        check_number("temperature", self.temperature, 0)
        check_number("top_k", self.top_k, 0, kind=int)
        check_number("top_p", self.top_p, 1e-6, 1)

    def check_model(self, config: Any) -> None:
        """See `state.Decoder.check_model`."""
        check_attention(self, config, bidirectional=False)
        if not config.dual:
            raise ValueError(f"Orthrus drafts with a second view and this {config.family} model has one: make a dual "
                             "model of it (launch.convert_weights to-orthrus, or dlm_jax.init_from_ar) and train "
                             "that, or decode it with Autoregressive")
        if self.size(config) < 2:
            raise ValueError(f"block_size = {config.block_size} in the model's config leaves no room for drafts: name "
                             "one of at least 2, as in Orthrus(block_size=32)")

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `state.Decoder.check_request`; the canvas never holds a mask, so the mask may even be the EOS."""
        del prompts, limits, eos_id
        check_mask(self, mask_id)

    def resolved(self) -> "Orthrus":
        """See `state.Decoder.resolved`."""
        return self

    def generation_capacity(self, max_new_tokens: int) -> int:
        """See `state.Decoder.generation_capacity`."""
        return max_new_tokens

    def size(self, model: Any) -> int:
        """Returns the block size for a model, given as its config or its scorer."""
        return self.block_size or model.block_size or 32

    def _width(self, score: Scorer, request: Request) -> int:
        """Returns K, which no answer needs to exceed."""
        return min(self.size(score), request.capacity)

    def init(self, score: Scorer, request: Request) -> State:
        """See `state.Decoder.init`; the prefill yields the first token, as in `Autoregressive`."""
        hidden, cache, counts = prefill(score, request)
        zero = jnp.zeros(request.batch, jnp.int32)
        keys = sampling.draw_keys(request.keys, zero, zero[:, None])
        first = sampling.sample(score.head(hidden), keys, self.temperature, self.top_k, self.top_p)[:, 0]
        active = request.max_new_tokens > 0
        canvas = Canvas.empty(request).commit(zero[:, None], active[:, None], first[:, None], AUTOREGRESSIVE, zero)
        done = (first == request.eos_id) | (request.max_new_tokens <= 1)
        none = jnp.full((request.batch, self._width(score, request) - 1), request.capacity, jnp.int32)
        return State(canvas, first, active.astype(jnp.int32), jnp.zeros_like(none), none, zero, cache, counts, done)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `state.Decoder.step`: one forward of each view."""
        K = self._width(score, request)
        offset = jnp.arange(K, dtype=jnp.int32)
        newest = state.length - 1
        # a block ends with the request; a row that is done has none
        width = jnp.where(state.done, 0, jnp.minimum(K, request.max_new_tokens - newest))
        inside = offset < width[:, None]
        place = state.length[:, None] + offset  # index of the token that each output predicts
        active = ~state.done
        counts = state.counts.add(DRAFT, width, active)

        block = lambda rest: jnp.concatenate([state.last[:, None], rest], axis=1)
        masks = jnp.full((request.batch, K - 1), request.mask_id, jnp.int32)
        hidden, cache = forward(
            score.view("diffusion"), False, request, newest, block(masks), width, state.cache)
        warm = jnp.asarray(self.temperature) > 0
        shaped = lambda logits: sampling.scaled(logits, self.temperature, self.top_k, self.top_p)
        # shaped once: drafts are judged by what they were drawn from
        draft_logits = jax.lax.cond(warm, shaped, lambda logits: logits, score.head(hidden[:, :-1]))
        keys = sampling.draw_keys(request.keys, counts.after_prefill(), place[:, :-1])
        drafts = sampling.sample(draft_logits, keys, warm.astype(jnp.float32))
        counts = counts.add(VERIFY, width, active)

        hidden, cache = forward(score, True, request, newest, block(drafts), width, cache)
        logits = score.head(hidden)
        keys = sampling.draw_keys(request.keys, counts.after_prefill(), place)

        def greedy():
            choice = sampling.likeliest(logits)
            return drafts == choice[:, :-1], choice

        def sampled():
            return accept(drafts, draft_logits, shaped(logits), keys)

        survives, choice = jax.lax.cond(warm, sampled, greedy)
        run = jnp.cumprod(survives & inside[:, 1:], axis=1, dtype=jnp.int32)
        accepted = jnp.sum(run, axis=1)
        own = offset == accepted[:, None]  # the place of the AR view's own token
        tokens = jnp.where(own, choice, jnp.concatenate([drafts, choice[:, -1:]], axis=1))
        ended = jnp.cumsum(tokens == request.eos_id, axis=1) - (tokens == request.eos_id) > 0
        keep = (offset <= accepted[:, None]) & (place < request.max_new_tokens[:, None]) & ~ended & active[:, None]
        canvas = state.canvas.commit(
            place, keep, tokens, jnp.where(own, AUTOREGRESSIVE, DRAFTED), counts.after_prefill())
        gained = jnp.sum(keep, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(tokens, jnp.maximum(gained - 1, 0)[:, None], axis=1)[:, 0]
        last = jnp.where(active, last, state.last)
        length = state.length + gained
        done = state.done | (last == request.eos_id) | (length >= request.max_new_tokens)
        return State(
            canvas, last, length, jnp.where(active[:, None], drafts, state.drafts),
            jnp.where(inside[:, 1:], place[:, :-1], request.capacity), accepted, cache, counts, done)

    def finish(self, request: Request, state: State) -> Canvas:
        """See `state.Decoder.finish`."""
        del request
        return state.canvas

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `state.Decoder.provisional`."""
        row = jnp.arange(state.drafts.shape[0])[:, None]
        empty = jnp.zeros_like(state.canvas.tokens)
        tokens = empty.at[row, state.drafted_at].set(state.drafts, mode="drop")
        return tokens, (empty > 0).at[row, state.drafted_at].set(True, mode="drop")


def forward(view: Scorer, causal: bool, request: Request, newest: Array, tokens: Array, width: Array,
            cache: KVCache) -> tuple[Array, KVCache]:
    """Runs one view over a block that continues the committed tokens, and writes the block's keys and values.

    Args:
      view: the AR view, or the diffusion view.
      causal: whether block tokens see those up to themselves, or the whole block.
      request: the batch.
      newest: (B,) int32 generated-token index of the block's first token.
      tokens: (B, K) int32 block.
      width: (B,) int32 tokens of the block that count; the others see nothing and are seen by none.
      cache: capacity S; entries before the block are the committed tokens'.

    Returns:
      (B, K, D) hidden states and the cache.
    """
    P, offset = request.prompt_capacity, jnp.arange(tokens.shape[1], dtype=jnp.int32)
    S = P + request.capacity
    start = (P + newest)[:, None]
    inside, at = offset < width[:, None], start + offset
    entry = jnp.arange(S, dtype=jnp.int32)
    rank = jnp.where((entry < request.prompt_length[:, None]) | (entry >= P), entry, vis.NONE)
    limit = jnp.where(inside, at if causal else start - 1, vis.NONE)
    block = (entry >= start) & (entry < start + width[:, None])
    zero = lambda x: jnp.zeros_like(x, jnp.int32)
    group = lambda x: jnp.where(x & (not causal), 0, vis.NONE).astype(jnp.int32)
    rule = vis.Visibility(zero(at), limit, group(inside), zero(at), rank, group(block), zero(rank))
    positions = (request.prompt_length + newest)[:, None] + offset
    return view.hidden(tokens, Pass(positions, rule, jnp.where(inside, at, S)), cache)
