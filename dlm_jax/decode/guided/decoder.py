"""Guided diffusion: a diffusion model drafts every masked token, a small causal model decides how many stay.

A round is one forward of the drafter over its window, then as many of the guide, a chunk of drafts each, as it takes
to find the first draft that it rejects. What is committed is always a prefix of the answer, so masks are always a
suffix. Both models keep a token's key and value at its own entry: those of a rejected draft are beyond every query's
rank, are overwritten when the place is filled, and nothing ever moves.

Letters: B batch, G generation capacity, D width of the drafter.

Source: "FlashDLM", Sec. 3.2.2, Algorithm 1, C.4, Table 11.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from dlm_jax.decode import parts, speculative
from dlm_jax.decode.canvas import AUTOREGRESSIVE, DRAFTED, Canvas
from dlm_jax.decode.guided import reading
from dlm_jax.decode.guided.acceptance import Acceptance, Exact, Sure
from dlm_jax.decode.guided.caches import widths
from dlm_jax.decode.guided.commits import Agreed, GuideRule, Speculative
from dlm_jax.decode.guided.model import GuidedScorer
from dlm_jax.decode.ledger import DRAFT, GUIDE, Counts
from dlm_jax.decode.masked.caches import CachePolicy, NoCache, Prompt
from dlm_jax.decode.masked.drafts import Now
from dlm_jax.decode.parts import static
from dlm_jax.decode.protocol import Decoder, Needs, decoder, refuse_masks
from dlm_jax.decode.queries import ask, prefill, window
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: committed tokens.
      draft: (B, G) int32 the drafts that the guide has read last.
      read: (B, G) bool which those are.
      length: (B,) int32 committed tokens.
      cache, guide_cache: the drafter's (None where it keeps nothing) and the guide's.
    """

    canvas: Canvas
    draft: Array
    read: Array
    length: Array
    cache: Cache | None
    guide_cache: Cache
    counts: Counts
    done: Array


_EXAMPLES = {"rule": (GuideRule, Agreed()), "accept": (Acceptance, Exact()), "cache": (CachePolicy, Prompt())}


@decoder
class Guided(Decoder):
    """Draft by diffusion, commit what a causal guide agrees with; `decode.join` makes one model of the two.

    Attributes:
      rule: what is committed of a judged draft: `Agreed` or `Speculative`.
      accept: which drafts the guide agrees with: `Exact`, `TopK`, `Relative` (the released relaxed rule), `Relaxed`
        (the paper's), each of them within `Sure`, or one of your own.
      cache: what the drafter computes anew after the first round, which computes everything: `NoCache`, `Prompt`,
        `Free`, `Delayed`, `Aggressive`, `Sliding`, `BlockBoundary`, or one of your own.
      sampler: of the drafts.
      verify_batch_size: drafts that the guide reads in one forward; 0 reads all of them at once.
      literal_mask: whether prompts may hold the mask token; it then stays as it is.
    """

    needs = Needs(bidirectional=True, mask=True, masked_canvas=True, guide=True)
    rule: GuideRule = Agreed()
    accept: Acceptance = Exact()
    cache: CachePolicy = Prompt()
    sampler: Sampler = Sampler()
    verify_batch_size: int = static(32, least=0)
    literal_mask: bool = static(False)

    def __post_init__(self):
        super().__post_init__()
        parts.check_kinds(self, _EXAMPLES)
        refreshes = self.cache.refresh_every
        if self.cache.per_block or (isinstance(refreshes, int) and refreshes):
            raise ValueError(f"cache = {self.cache!r} computes everything anew now and then, which Guided does in its "
                             "first round alone: take Prompt(), Free() or Delayed() as they are")
        kind = type(self.cache)
        if kind.block_causal or kind.limit is not CachePolicy.limit or kind.refresh is not CachePolicy.refresh:
            raise ValueError(f"cache = {self.cache!r} says what tokens see or what a refresh computes, which Guided "
                             "never asks: take a policy of windows alone, such as Prompt(), Free() or Delayed()")
        if isinstance(self.rule, Speculative) and isinstance(self.accept, Sure):
            raise ValueError("accept = Sure(...) with rule = Speculative(): the guide's token takes the place of a "
                             "draft turned down, so nothing is gained; take rule = Agreed()")

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `Decoder.check_request`; prompts hold no masks."""
        super().check_request(prompts, limits, eos_id, mask_id)
        refuse_masks(prompts, mask_id, self.literal_mask)

    def init(self, score: GuidedScorer, request: Request) -> State:
        """See `Decoder.init`; the guide reads the prompt, and the first round drafts from everything."""
        B, G = request.batch, request.capacity
        active, theirs = request.max_new_tokens > 0, score.for_guide(request)
        _, guide_cache, _ = prefill(score.guide, theirs)
        # the prompt's last token is read once more, before the first draft
        guide_cache = guide_cache.commit(theirs.prompt_length - 1)
        state = State(
            canvas=Canvas.empty(request),
            draft=jnp.zeros((B, G), jnp.int32),
            read=jnp.zeros((B, G), bool),
            length=jnp.zeros(B, jnp.int32),
            cache=score.init_cache(B, request.entries) if self.cache.keeps else None,
            guide_cache=guide_cache,
            counts=Counts.zeros(B).add(GUIDE, theirs.prompt_length, active),
            done=~active,
        )
        return self._round(score, request, state, NoCache())

    def step(self, score: GuidedScorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one round."""
        return self._round(score, request, state, self.cache)

    def _round(self, score: GuidedScorer, request: Request, state: State, cache: CachePolicy) -> State:
        drafts, state = draft(score, request, state, cache)
        width = min(self.verify_batch_size or request.capacity, request.capacity)
        judge = reading.Judge(self.accept, self.rule, self.sampler, width)
        return commit(request, state, reading.read(score, request, drafts, state, judge), self.rule)

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `Decoder.provisional`: the drafts that the guide has read."""
        return state.draft, state.read


def draft(score: GuidedScorer, request: Request, state: State, cache: CachePolicy) -> tuple[reading.Drafts, State]:
    """Runs the drafter over its window; the state gets its cache and its forward.

    Args:
      score, request, state: as in `Decoder.step`.
      cache: what is computed anew.
    """
    index = jnp.broadcast_to(jnp.arange(request.capacity, dtype=jnp.int32), state.draft.shape)
    fresh = state.canvas.committed_at == state.counts.after_prefill()[:, None]
    now = Now(request, index >= state.length[:, None], fresh, state.length, request.max_new_tokens,
              jnp.ones_like(state.length), block_length=1, shift=score.shift)
    start, stop = cache.window(now)
    useless = (start > state.length) | (stop <= state.length)  # nothing would be drafted
    start = jnp.where(useless, now.first, jnp.maximum(start, now.first))
    stop = jnp.where(useless, now.stop, jnp.minimum(stop, now.stop))
    start, sizes = jnp.where(state.done, stop, start), widths(cache, request, score.shift)
    queries = window(request, state.canvas.tokens, start, stop, sizes[-1])
    # what lies beyond a sliding window is not seen
    queries = queries.replace(limit=jnp.broadcast_to(request.position(stop[:, None] - 1), queries.number.shape))
    outputs = state.length[:, None] + index - score.shift - start[:, None]
    hidden, kept = ask(score, request, queries, state.cache, outputs, widths=sizes)
    counts = state.counts.add(DRAFT, stop - start, ~state.done)
    drafts = reading.Drafts(hidden, state.length, stop - state.length, counts.after_prefill())
    return drafts, state.replace(cache=kept, counts=counts)


def commit(request: Request, state: State, read: reading.Reading, rule: GuideRule) -> State:
    """Commits what the guide agrees with.

    Args:
      request: the batch.
      state: of this round, drafted.
      read: the guide's verdict.
      rule: how much of it is committed.
    """
    index = jnp.broadcast_to(jnp.arange(request.capacity, dtype=jnp.int32), read.draft.shape)
    count, guided = rule.commits(read.agreed, read.correction)
    count = jnp.clip(count, 1, jnp.maximum(jnp.sum(read.read, axis=1), 1))  # what was read, and something always
    behind = guided[:, None] & (index == (state.length + read.agreed)[:, None])
    tokens = jnp.where(behind, read.correction[:, None], read.draft)
    fresh = (index >= state.length[:, None]) & (index < (state.length + count)[:, None]) & ~state.done[:, None]
    fresh = speculative.through_eos(tokens, fresh, request.eos_id)
    canvas = state.canvas.commit(
        index, fresh, tokens, jnp.where(behind, AUTOREGRESSIVE, DRAFTED), read.counts.after_prefill())
    length = state.length + jnp.sum(fresh, axis=1, dtype=jnp.int32)
    ended = jnp.any(fresh & (tokens == request.eos_id), axis=1)
    return State(canvas, read.draft, read.read, length, state.cache, read.cache, read.counts,
                 state.done | ended | (length >= request.max_new_tokens))
