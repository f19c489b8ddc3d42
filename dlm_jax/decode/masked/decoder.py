"""Masked-diffusion decoding: a product of small parts, batched and compiled.

The answer starts as masks. Every forward drafts the masked tokens of the open block(s), a confidence orders the drafts,
a commit rule chooses which stay, and the rest are masked again. LLaDA, Dream, Fast-dLLM, FreeCache, d3LLM and block
diffusion are points of that product; `presets` names them. Any part may be the user's own.

Letters: B batch, C candidates, G canvas length, P prompt capacity, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from dlm_jax.decode import parts, sampling
from dlm_jax.decode.canvas import DRAFTED, Canvas, scatter
from dlm_jax.decode.ledger import DENOISE, PREFILL, REFRESH, Counts
from dlm_jax.decode.masked import commit, stops
from dlm_jax.decode.masked.caches import CachePolicy, NoCache
from dlm_jax.decode.masked.commit import CommitRule, Threshold
from dlm_jax.decode.masked.confidence import Confidence, Probability
from dlm_jax.decode.masked.drafts import Clock, Drafts, Now
from dlm_jax.decode.masked.schedules import Blocks, Schedule
from dlm_jax.decode.masked.stops import Fill, Stop
from dlm_jax.decode.parts import Part, number, static
from dlm_jax.decode.protocol import Decoder, Needs, decoder, refuse_masks
from dlm_jax.decode.queries import ask, window
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache, Scorer

_EXAMPLES = {"schedule": (Schedule, Blocks()), "commit": (CommitRule, Threshold()),
             "confidence": (Confidence, Probability()), "cache": (CachePolicy, NoCache()), "stop": (Stop, Fill()),
             "sampler": (Sampler, Sampler())}


@struct.dataclass
class ClassifierFree(Part):
    """Classifier-free guidance: every forward runs a second copy of each row, its prompt masked.

    Attributes:
      scale: what is added of the difference that the prompt makes; 0 adds nothing.
    """

    scale: float = number(0.0)


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      draft: (B, G) int32 newest draft of each token that is not committed, -1 for none.
      late: (B, G) bool tokens that an EOS filled and that the next forward may still overwrite (`LateFill`).
      opened: (B,) int32 blocks open, the finished ones included.
      step: (B,) int32 steps taken in the block.
      age: (B,) int32 forwards since the last full pass, it included.
      due: (B,) bool rows whose next forward refreshes the cache.
      done: (B,) bool.
      cache: of 2B rows with guidance, the copies last; None without a cache.
    """

    canvas: Canvas
    draft: Array
    late: Array
    opened: Array
    step: Array
    age: Array
    due: Array
    done: Array
    cache: Cache | None
    counts: Counts


@decoder
class MaskedDiffusion(Decoder):
    """Denoising from masks.

    Attributes:
      schedule: which tokens are open, see `schedules`.
      commit: which drafts stay, see `commit`.
      confidence: how sure a draft is, see `confidence`.
      cache: what is computed anew, see `caches`.
      stop: what an EOS does, see `stops`.
      sampler: draws the drafts.
      guidance: `ClassifierFree(scale)`, or None.
      literal_mask: whether prompts may hold the mask token; it then stays as it is.
    """

    needs = Needs(bidirectional=True, mask=True, masked_canvas=True)
    schedule: Schedule = Blocks()
    commit: CommitRule = Threshold()
    confidence: Confidence = Probability()
    cache: CachePolicy = NoCache()
    stop: Stop = Fill()
    sampler: Sampler = Sampler()
    guidance: ClassifierFree | None = None
    literal_mask: bool = static(False)

    def __post_init__(self):
        super().__post_init__()
        parts.check_kinds(self, _EXAMPLES)
        self.commit.check(self.confidence)
        one_block = self.schedule.block_length(1 << 30) == 1 << 30
        for wrong, why in (
            (self.cache.by_block and one_block,
             f"cache = {self.cache!r} works block by block: take schedule=Blocks(...), or cache=Prompt()"),
            (self.stop.by_block and one_block,
             f"stop = {self.stop!r} ends an answer after a block and the schedule has one: take Fill() or Never()"),
            (self.schedule.several and self.commit.timed,
             f"commit = {self.commit!r} plans the steps of one block, several may be open: take Threshold or Factor"),
            (self.schedule.several and self.cache.block_causal,
             f"cache = {self.cache!r} hides later blocks and the schedule decodes into them: take another cache"),
        ):
            if wrong:
                raise ValueError(why)

    def check_model(self, config: Any) -> None:
        """See `Decoder.check_model`."""
        super().check_model(config)
        trained, length = config.block_size, self.schedule.block_length(1 << 30)
        if self.cache.block_causal and trained not in (None, length):
            raise ValueError(f"blocks of {length} tokens with {self.cache!r}: the model was trained on blocks of "
                             f"{trained} (block_size of its config); take schedule=Blocks({trained})")

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `Decoder.check_request`: prompts without masks, and steps that fit the answers."""
        super().check_request(prompts, limits, eos_id, mask_id)
        refuse_masks(prompts, mask_id, self.literal_mask)
        for limit in np.unique(limits).tolist():
            self.commit.check_limit(limit, self._length(limit))

    def capacity(self, max_new_tokens: int) -> int:
        """See `Decoder.capacity`: whole blocks."""
        length = self._length(max_new_tokens)
        return -(-max_new_tokens // length) * length

    def _length(self, capacity: int) -> int:
        """Returns the tokens of a block: no more than there are, but where the prompt has blocks, too."""
        length = self.schedule.block_length(capacity)
        return length if self.cache.block_causal else min(length, capacity)

    @property
    def _copies(self) -> int:
        return 1 if self.guidance is None else 2

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; only block diffusion runs the prompt by itself."""
        B, G = request.batch, request.capacity
        canvas, counts, zero = Canvas.empty(request), Counts.zeros(B), jnp.zeros(B, jnp.int32)
        cache = score.init_cache(self._copies * B, request.entries) if self.cache.keeps else None
        if self.cache.block_causal:
            span = -request.prompt_length, zero
            _, cache = self._hidden(score, request, canvas, cache, span, zero[:, None], self._length(G),
                                    (request.prompt_capacity,))
            counts = counts.add(PREFILL, self._copies * request.prompt_length, request.max_new_tokens > 0)
        return State(
            canvas=canvas, draft=jnp.full((B, G), -1, jnp.int32), late=jnp.zeros((B, G), bool), opened=zero + 1,
            step=zero, age=zero, due=jnp.full(B, self.cache.keeps and not self.cache.block_causal),
            done=request.max_new_tokens <= 0, cache=cache, counts=counts)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`."""
        now = self._now(score, request, state)
        L, live, block = now.block_length, ~state.done, now.begin // now.block_length
        due = state.due | ((self.cache.refresh_every > 0) & (state.age >= self.cache.refresh_every))
        start, stop = self._span(now, due)
        stop = jnp.where(live, stop, start)
        number = jnp.arange(L, dtype=jnp.int32) + now.begin[:, None]  # of the candidates
        if self.schedule.several:
            number = jnp.broadcast_to(jnp.arange(request.capacity, dtype=jnp.int32), now.masked.shape)
        logits, cache = self._logits(score, request, state, (start, stop), number, L)
        counts = state.counts.add(jnp.where(due, REFRESH, DENOISE), self._copies * (stop - start), live)

        drafting = live & ~due if self.cache.block_causal else live
        computed = (start[:, None] <= number - score.shift) & (number - score.shift < stop[:, None])
        drafts = self._drafts(request, state, now, logits, number, computed & drafting[:, None], counts)
        draft = scatter(state.draft, number, drafts.eligible, drafts.tokens)
        clock = Clock(state.step, block, jnp.sum(now.masked, axis=1), request.max_new_tokens, L)
        chosen = self._chosen(drafts, clock, now)
        canvas = state.canvas.commit(number, chosen, drafts.tokens, DRAFTED, counts.after_prefill())
        canvas, late = self._stopped(request, state, canvas, counts.after_prefill(), live)

        board = stops.board(request, canvas)
        moved = live & (_first(board.masked) // L != block)
        finished = moved[:, None] & (board.index < (now.begin + L)[:, None])
        taken = self.commit.after(drafts, clock)
        return State(
            canvas=canvas, draft=draft, late=late, opened=now.opened,
            step=jnp.where(moved, 0, jnp.where(drafting, taken, state.step)), age=jnp.where(due, 1, state.age + 1),
            due=moved & self.cache.per_block,
            done=state.done | ~jnp.any(board.masked, axis=1) | self.stop.ends(board, finished),
            cache=cache, counts=counts)

    def _now(self, score: Scorer, request: Request, state: State) -> Now:
        L, board = self._length(request.capacity), stops.board(request, state.canvas)
        block = _first(board.masked) // L  # the first unfinished one
        ended = jnp.any(board.eos, axis=1) & self.stop.fills
        opened = self.schedule.opened(jnp.maximum(state.opened, block + 1), board.masked, board.length, ended)
        fresh = state.canvas.committed_at == state.counts.after_prefill()[:, None]
        return Now(request, board.masked, fresh, block * L, jnp.minimum(opened * L, board.length), opened, L,
                   score.shift)

    def _span(self, now: Now, due: Array) -> tuple[Array, Array]:
        """Returns the (B,) numbers where the next forward's window begins and ends; one that would predict nothing is
        not taken, so that no policy can keep a row waiting."""
        first = _first(now.masked) - now.shift
        start, stop = (parts.shaped(self.cache, "window", edge, due.shape) for edge in self.cache.window(now))
        open_blocks = (now.predicting(now.begin), now.end) if self.cache.block_causal else (now.first, now.stop)
        useful = (start <= first) & (first < stop)
        start, stop = (jnp.where(useful, edge, other) for edge, other in zip((start, stop), open_blocks))
        if self.cache.keeps:
            start, stop = (jnp.where(due, edge, other) for edge, other in zip(self.cache.refresh(now), (start, stop)))
        return jnp.maximum(start, now.first), jnp.minimum(stop, now.stop)

    def widths(self, request: Request, shift: int) -> tuple[int, ...]:
        """Returns the static widths of windows that have a program of their own, ascending.

        Args:
          request: the batch; its shapes count.
          shift: the model's.
        """
        sizes = self.cache.widths(request, self._length(request.capacity), self.schedule.several)
        widths = sorted({size + shift for size in sizes})
        if self.cache.block_causal:
            return tuple(widths)
        return (*(width for width in widths if width < request.entries), request.entries)

    def _logits(self, score, request, state, span, number, block_length) -> tuple[Array, Cache | None]:
        """Returns the (B, C, V) logits of the tokens `number`, and the cache."""
        widths = self.widths(request, score.shift)
        hidden, cache = self._hidden(score, request, state.canvas, state.cache, span, number, block_length, widths)
        logits = score.head(hidden)
        if self.guidance is not None:
            conditional, free = jnp.split(logits, 2)
            logits = free + (self.guidance.scale + 1.0) * (conditional - free)
        return logits, cache

    def _hidden(self, score, request, canvas, cache, span, number, block_length, widths):
        """Runs the tokens of a span, in every copy of the rows; returns what predicts the (B, C) tokens `number`."""
        many = lambda x: jnp.concatenate([x] * self._copies)
        rows = request if self.guidance is None else _with_copies_without_prompt(request)
        start, stop = map(many, span)
        queries = window(rows, many(canvas.tokens), start, stop, widths[-1])
        queries = queries.replace(limit=self.cache.limit(rows, queries.number, block_length))
        # the one place that knows the shift: the output at number n predicts the token n + shift
        return ask(score, rows, queries, cache, many(number) - score.shift - start[:, None], widths=widths)

    def _drafts(self, request, state, now, logits, number, computed, counts) -> Drafts:
        keys = sampling.draw_keys(request.keys, counts.after_prefill(), number)
        draws, ties = (jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, use)))(keys) for use in (0, 1))
        answers = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)  # a mask is no answer
        at = lambda x: jnp.take_along_axis(x, jnp.minimum(number, request.capacity - 1), axis=1)
        eligible = ((at(now.masked) & (number < now.end[:, None])) | at(state.late)) & computed
        drafts = Drafts(self.sampler.draw(answers, draws), logits, eligible, number, ties, self.sampler,
                        self.confidence)
        sure = parts.shaped(self.confidence, "of", self.confidence.of(drafts), number.shape)
        sure = jnp.where(eligible, sure, -jnp.inf)
        return drafts.replace(confidence=sure, order=sure)

    def _chosen(self, drafts: Drafts, clock: Clock, now: Now) -> Array:
        """Returns the (B, C) candidates to commit: those of the rule, and those that the schedule wants besides."""
        chosen = commit.chosen(self.commit, drafts, clock)
        if self.schedule.several:
            chosen |= self.schedule.forced(chosen, drafts, now.masked, clock.tokens, now.opened)
        return chosen

    def _stopped(self, request, state, canvas, forward, live) -> tuple[Canvas, Array]:
        """Puts EOS where the stop wants them; returns the canvas, and (B, G) tokens that stay candidates."""
        committed_at = jnp.where(state.late, state.canvas.committed_at, canvas.committed_at)
        canvas = canvas.replace(committed_at=committed_at)
        board = stops.board(request, canvas)
        rest = parts.shaped(self.stop, "fill", self.stop.fill(board), board.masked.shape) & live[:, None]
        fresh = rest & board.masked
        return canvas.replace(
            tokens=jnp.where(rest, request.eos_id, canvas.tokens),
            committed_at=jnp.where(fresh, forward[:, None], canvas.committed_at),
            origin=jnp.where(fresh, DRAFTED, canvas.origin)), fresh & self.stop.late

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `Decoder.provisional`: the newest drafts of masked tokens."""
        shown = (state.canvas.committed_at < 0) & (state.draft >= 0) & ~state.done[:, None]
        return jnp.where(shown, state.draft, state.canvas.tokens), shown


def _with_copies_without_prompt(request: Request) -> Request:
    """Returns a request of 2B rows: every row, then every row with its prompt masked."""
    twice = lambda x: jnp.concatenate([x, x])
    return request.replace(
        prompt=jnp.concatenate([request.prompt, jnp.full_like(request.prompt, request.mask_id)]),
        prompt_length=twice(request.prompt_length), max_new_tokens=twice(request.max_new_tokens))


def _first(flag: Array) -> Array:
    """Returns (B,) the index of the first True; the length if there is none."""
    return jnp.where(jnp.any(flag, axis=1), jnp.argmax(flag, axis=1), flag.shape[1]).astype(jnp.int32)
