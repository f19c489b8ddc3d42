"""AsyncLane decoding: refine the past while the future advances.

An answer is denoised by lanes. The one that generates advances; where its tokens reach a boundary it forks into a lane
that refines the prefix and one that generates behind it, so that both go on at once. An iteration reads all lanes of
all rows in one forward, and every decision is an array function of the lane table: rows of a batch may fork, refresh
and stop side by side.

Letters: B batch, G canvas length, V vocabulary.

Source: "AsyncLane: Decoupling Refinement from Advancement in Diffusion Language Model Decoding", arXiv 2606.08411.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode import parts
from dlm_jax.decode.asynclane import advance, forward, guide, transfer
from dlm_jax.decode.asynclane import boundary as boundaries
from dlm_jax.decode.asynclane import lanes as table
from dlm_jax.decode.asynclane.boundary import Boundary, Classes
from dlm_jax.decode.asynclane.caches import Compact
from dlm_jax.decode.asynclane.delimiters import BOUNDARIES
from dlm_jax.decode.asynclane.state import Rooms, State, start
from dlm_jax.decode.canvas import DRAFTED, Canvas
from dlm_jax.decode.masked.caches import CachePolicy
from dlm_jax.decode.masked.commit import CommitRule, Threshold
from dlm_jax.decode.masked.confidence import Confidence, Probability
from dlm_jax.decode.parts import number, static, whole
from dlm_jax.decode.protocol import Decoder, Needs, decoder, refuse_masks
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Scorer

_EXAMPLES = {"commit": (CommitRule, Threshold()),
             "confidence": (Confidence, Probability()), "sampler": (Sampler, Sampler())}
_KINDS = {"mode": advance.MODES, "continuation_length": advance.CONTINUATIONS, "eos_frontier": advance.EOS_FRONTIERS}


@decoder
class AsyncLane(Decoder):
    """Lanes that refine beside one that advances; training-free, over any model that denoises from masks.

    Attributes:
      boundary: where a lane may be split; a name of `BOUNDARIES` waits for a tokenizer, see `reading`. `Boundary()`, of
        no ids, splits nowhere.
      block_size: B, tokens of a lane.
      steps: S, forwards that a lane may take; 0 is one a token of a block.
      commit: which drafts of a lane stay; a rule that plans steps plans those of each lane. A threshold may be 0, which
        takes everything at once, or beyond what is ever reached, which takes a token a forward. With `GuideAgrees` a
        causal model judges them (FlashDLM).
      confidence: how sure a draft is.
      rho_min: share of a lane that must be written before it forks (Eq. 5).
      t_min: forwards that it must have seen (Eq. 5).
      lookahead: w, tokens read ahead of a lane (Eq. 2).
      tau_future: how sure tokens ahead must be to be written as drafts (Eq. 8), in the confidence's unit: a probability
        or margin from which they are, beyond 1 none at all, or nats of entropy up to which.
      lane_capacity: unfinished lanes of a row; where another would be one too many, the lane does not fork.
      cache: `Compact`, the lanes' own, or a policy of masked diffusion, whose window all lanes share: `NoCache()`.
      sampler: draws the drafts.
      mode: "asynclane"; "blockwise" never forks; "coupled" has the continuation wait for the prefix;
        "commit_and_advance" commits the prefix at once and refines nothing.
      continuation_length: "block" gives a continuation a whole block, "remainder" what is left of the one split.
      eos_frontier: "stop" makes no lane on an end of the answer; "spawn" does, and that lane ends it.
      refine_lookahead: whether lanes that refine read ahead, too.
      max_iterations: iterations at most; 0 for no bound.
      ends: ids that end an answer besides the request's EOS.
      literal_mask: whether prompts may hold the mask token; it then stays as it is.
      rooms, classes: of the compiled step; `fitted` sets them.
    """

    needs = Needs(bidirectional=True, mask=True, masked_canvas=True)
    boundary: Boundary | str = static("math")
    block_size: int = whole(32, least=1)
    steps: int = whole(0)
    commit: CommitRule = Threshold()
    confidence: Confidence = Probability()
    rho_min: float = number(0.5, most=1.0)
    t_min: int = whole(1)
    lookahead: int = whole(32)
    tau_future: float = number(0.9)
    lane_capacity: int = whole(8, least=1)
    cache: Compact | CachePolicy = Compact()
    sampler: Sampler = Sampler()
    mode: str = static("asynclane")
    continuation_length: str = static("block")
    eos_frontier: str = static("stop")
    refine_lookahead: bool = static(True)
    max_iterations: int = whole(0)
    ends: tuple[int, ...] = static(())
    literal_mask: bool = static(False)
    rooms: Rooms | None = static(None)
    classes: Classes | None = None

    def __post_init__(self):
        super().__post_init__()
        parts.check_kinds(self, _EXAMPLES)
        for name, accepted in _KINDS.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        if not isinstance(self.boundary, Boundary) and self.boundary not in BOUNDARIES:
            raise ValueError(f"boundary = {self.boundary!r}: expected a Boundary, such as Boundary(delimiters=(13,)), "
                             f"or one of {sorted(BOUNDARIES)}, which a tokenizer makes one of")
        if isinstance(self.cache, type) or not isinstance(self.cache, Compact | CachePolicy):
            raise ValueError(f"cache = {self.cache!r}: expected Compact() or a CachePolicy, such as NoCache()")
        if not self._compact and self.cache.block_causal:
            raise ValueError(f"cache = {self.cache!r} hides later tokens and lanes read ahead: take Compact() or "
                             "another policy")
        free = type(self.commit) is Threshold and self.confidence.kind in ("probability", "margin")
        if not (free or self.guided):
            self.commit.check(self.confidence)
        if self.confidence.kind not in ("probability", "margin") and isinstance(self.lookahead, int) and self.lookahead:
            self._check_ahead()

    def _check_ahead(self) -> None:
        try:
            self.confidence.check(self.tau_future)
        except ValueError:
            raise ValueError(f"tau_future = {self.tau_future} says nothing to {self.confidence!r}: give lookahead=0, a "
                             "level in its unit, or another confidence") from None

    @property
    def _compact(self) -> bool:
        return isinstance(self.cache, Compact)

    @property
    def guided(self) -> bool:
        """See `Decoder.guided`: where its commit rule asks one."""
        return isinstance(self.commit, guide.GuideAgrees)

    @property
    def _sets(self) -> Boundary:
        """The boundary's ids; block-wise decoding needs none."""
        return self.boundary if isinstance(self.boundary, Boundary) else Boundary()

    def reading(self, tokenizer: Any) -> AsyncLane:
        """See `Decoder.reading`: a boundary's name becomes sets of ids."""
        return self if isinstance(self.boundary, Boundary) else self.replace(
            boundary=BOUNDARIES[self.boundary](tokenizer))

    def fitted(self, config: Any) -> AsyncLane:
        """See `Decoder.fitted`: sets become tables over the model's vocabulary, and shapes are chosen.

        Raises:
          ValueError: a decoder that is fitted already, to another model or to fewer or smaller lanes.
        """
        made = self if self.classes is not None else self.replace(
            boundary=Boundary(), ends=(), classes=boundaries.classes(self._sets, config.vocab_size, self.ends))
        if made.classes.sets.shape != (config.vocab_size,) or made.boundary != Boundary() or made.ends:
            raise ValueError(f"boundary = {made.boundary!r}, ends = {made.ends}: this decoder is fitted already, to "
                             f"its own and to {made.classes.sets.shape[0]} ids, where the model has "
                             f"{config.vocab_size}: change and pass the decoder that it was made from")
        several = made.classes.forks and self.mode == "asynclane"  # coupled ones wait for one another
        needed = Rooms.of(self.block_size, self.lookahead, self.lane_capacity if several else 1)
        if self.rooms is not None and not self.rooms.holds(needed):
            raise ValueError(f"rooms = {self.rooms} are too small for block_size = {self.block_size}, lookahead = "
                             f"{self.lookahead} and lane_capacity = {self.lane_capacity}, which need {needed}: change "
                             "the numbers of the decoder that this one was fitted from")
        return made.replace(rooms=self.rooms or needed)

    def check_model(self, config: Any) -> None:
        """See `Decoder.check_model`."""
        super().check_model(config)
        if not isinstance(self.boundary, Boundary) and self.mode != "blockwise":
            raise ValueError(f"boundary = {self.boundary!r} is the name of a rule, whose ids only a tokenizer knows: "
                             f"decoder.reading(tokenizer), or boundary={BOUNDARIES[self.boundary].__name__}(tokenizer)")
        planned, budget = _planned(self.commit), self.steps or self.block_size
        if planned > budget:
            raise ValueError(f"commit = {self.commit!r} plans {planned} forwards for a lane, which may take {budget}: "
                             f"give steps={planned}, or plan no more than {budget}")
        self._sets.check(config.vocab_size)
        for token in self.ends:
            parts.check_number("ends", token, 0, config.vocab_size - 1, kind=int)
            if token == config.mask_token_id:
                raise ValueError(f"ends = {self.ends} holds the mask {token}: the mask must be a token of its own")

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `Decoder.check_request`: prompts without masks."""
        super().check_request(prompts, limits, eos_id, mask_id)
        refuse_masks(prompts, mask_id, self.literal_mask)

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; the first step runs the prompt."""
        keeps = self._compact or self.cache.keeps
        cache = score.init_cache(request.batch, request.entries) if keeps else None
        state = start(request, self.block_size, cache)
        return guide.started(score, request, state) if self.guided else state

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one iteration of Algorithm 1."""
        rooms, live = self.rooms.within(request.capacity), ~state.done
        state = state.replace(iteration=state.iteration + live).tally(iterations=live)
        seats = table.seats(state.lanes, live, rooms.lanes)
        view = forward.windows(request, seats, rooms, self.lookahead, self.refine_lookahead)
        if self._compact:
            reading, state = forward.read(score, request, state, seats, view, self.cache, rooms, self.classes)
        else:
            widths = self._shared_widths(request, score.shift, rooms)
            reading, state = forward.read_shared(score, request, state, seats, view, self.cache, rooms, widths)
        verdict = transfer.judge(score, request, state, seats, view, reading, self._rules, rooms, self.classes)
        if self.guided:
            verdict, state = guide.extended(score, request, state, seats, view, verdict, self.commit, rooms)
        state = advance.age(transfer.write(state, seats, view, verdict, rooms), seats)
        return self._advanced(request, state, seats, self._forced(state, view, verdict))

    @property
    def _rules(self) -> transfer.Rules:
        return transfer.Rules(self.commit, self.confidence, self.sampler, advance.budget(self._plan), self.tau_future,
                              self.mode == "commit_and_advance")

    @property
    def _plan(self) -> advance.Plan:
        return advance.Plan(self.block_size, self.steps, self.rho_min, self.t_min, self.lane_capacity, self.mode,
                            self.continuation_length, self.eos_frontier)

    def _shared_widths(self, request: Request, shift: int, rooms: Rooms) -> tuple[int, ...]:
        """Returns the widths of shared windows that have a program of their own."""
        widths = sorted({size + shift for size in self.cache.widths(request, rooms.block, True)})
        return (*(width for width in widths if width < request.entries), request.entries)

    def _forced(self, state: State, view: forward.Windows, verdict: transfer.Verdict) -> Array:
        """Returns (B, G) int32 tokens that a fork which commits its prefix would write."""
        if self.mode != "commit_and_advance":
            return state.tokens
        own = view.wanted & (jnp.arange(view.number.shape[1]) < self.rooms.block)
        return transfer.scatter(state.tokens, view.number, own, verdict.unending)

    def _advanced(self, request: Request, state: State, seats: table.Seats, forced: Array) -> State:
        """Returns the state after the lanes' transitions, what they have written on the canvas, and rows ended."""
        made, live = state.count, ~state.done
        state = advance.refine(state, self._plan)
        taken = advance.turn(request, state, seats, self._plan, self.classes)
        state = advance.generate(request, state, taken, self._plan, forced)
        if not self._compact:
            state = state.replace(due=state.due | ((state.count > made) & self.cache.per_block))
        state = self._told(request, state, live)
        over = (self.max_iterations > 0) & (state.iteration >= self.max_iterations)
        return state.replace(done=state.done | over | ~jnp.any(state.lanes.state == table.ACTIVE, axis=1))

    def _told(self, request: Request, state: State, live: Array) -> State:
        """Returns the state with what the lanes are certain to put out on the canvas, CollectDFS of Algorithm 1.

        A token behind a mask of its lane stays off it: the mask may become an end, or never a token.
        """
        index, forward = jnp.arange(request.capacity, dtype=jnp.int32), state.counts.after_prefill()[:, None]
        front = jnp.max(jnp.where(state.lanes.made, state.lanes.stop, 0), axis=1, keepdims=True)
        fresh = state.filled & (index < front) & (state.reached < 0) & live[:, None]
        reached = jnp.where(fresh, forward, state.reached)
        inside, end = table.emitted(state.lanes, state.filled, state.ends(request, self.classes))
        canvas, sure = state.canvas, (inside | end) & live[:, None] & (state.canvas.committed_at < 0)
        canvas = Canvas(jnp.where(sure, state.tokens, canvas.tokens), jnp.where(sure, reached, canvas.committed_at),
                        jnp.where(sure, DRAFTED, canvas.origin))
        return state.replace(canvas=canvas, reached=reached)

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `Decoder.provisional`: tokens behind a mask of their lane, and drafts ahead that no lane has reached."""
        return state.tokens, state.filled & (state.canvas.committed_at < 0) & ~state.done[:, None]

    def lanes(self, state: State) -> Array:
        """See `Decoder.lanes`."""
        return state.writer

    def record(self, state: State) -> dict[str, Array]:
        """See `Decoder.record`: the lane table, (B, M) each, and the (B,) iterations; `diagnostics` reads it."""
        return {**vars(state.lanes), "iterations": state.iteration}


def _planned(rule: CommitRule) -> int:
    """Returns the forwards that a commit rule plans, those of the rule it stands around; 0 for none."""
    while hasattr(rule, "rule"):
        rule = rule.rule
    return getattr(rule, "steps", 0)
