"""Guided diffusion: a diffusion model drafts every masked token, a small causal model decides how many stay.

A round is one forward of the drafter over its window, then as many of the guide, a chunk of drafts each, as it takes
to find the first draft that it rejects. What is committed is always a prefix of the answer, so masks are always a
suffix. Both models keep a token's key and value at its own entry: those of a rejected draft are beyond every query's
rank, are overwritten when the place is filled, and nothing ever moves.

Index, entry and number of a token are as in `window`.

Letters: B batch, P prompt capacity, G canvas length, S = P + G, W drafts of a chunk, D width of the drafter.

Source: "FlashDLM", Sec. 3.2.2, Algorithm 1, C.4, Table 11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode.guided import rules
from dlm_jax.decode import sampling, window
from dlm_jax.decode.guided.model import GuidedScorer
from dlm_jax.decode.ledger import DRAFT, GUIDE, Counts
from dlm_jax.decode.state import (
    AUTOREGRESSIVE, DRAFTED, Canvas, Request, check_mask, check_no_mask, check_number, prefill)
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass

ACCEPTANCE = {  # by name, the thresholds that a test applies and their defaults
    "exact": dict(top_k=1),
    "top_k": dict(top_k=2),
    "top_k_relative": dict(top_k=2, relative_probability=0.5),
    "logit_threshold": dict(top_k=2, logit_threshold=0.5),
}
CACHES = ("none", "prompt", "free", "aggressive", "delayed", "sliding", "block_boundary")


def _static(default):
    return dataclasses.field(default=default, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Loop carry.

    Attributes:
      draft: (B, G) int32 the drafts that the guide has read last.
      read: (B, G) bool which those are.
      length: (B,) int32 generated tokens that are committed.
      cache, guide_cache: the drafter's and the guide's, of S entries each.
    """

    canvas: Canvas
    draft: Array
    read: Array
    length: Array
    cache: Any
    guide_cache: Any
    counts: Counts
    done: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Reading:
    """Carry of the chunks of one round; in `alive` (B,) rows every draft was accepted so far, `last` is the last."""

    chunk: Array
    alive: Array
    agreed: Array
    correction: Array
    last: Array
    draft: Array
    read: Array
    cache: Any
    counts: Counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guided:
    """Draft by diffusion, commit what a causal guide agrees with; `decode.join` makes one model of the two.

    Attributes:
      rule: "paper" (the agreed prefix, or else the drafter's own first token), "assisted" (the released code's name
        for it), or "speculative" (the agreed prefix and the guide's token behind it).
      acceptance: "exact", "top_k", "top_k_relative" (the released relaxed rule) or "logit_threshold" (the paper's);
        see `guided_rules.accepts`.
      top_k: K of the last three, 2 by default.
      relative_probability: least share of the likeliest token's probability, for "top_k_relative"; 0.5 by default.
      logit_threshold: tau of "logit_threshold"; 0.5 by default.
      draft_threshold: least probability that the drafter itself gives a draft which is to be agreed upon; 0, the
        paper's, asks the guide alone, and a weak one then also confirms what both only guess.
      cache: what the drafter computes anew each round; the first round computes everything, and what lies before the
        window is read as it was last computed, which may be while it was masked. "none": everything. "prompt": all
        but the prompt. "free": from the block on that holds the first mask (FreeCache). "aggressive": from the last
        committed token on. "delayed": from the block on that holds the first token which the last round committed,
        so that a block is left as it is when finished. "sliding": `window_size` tokens on either side of the last
        committed one, and no drafts beyond. "block_boundary": the released variant of "free", whose blocks are counted
        from the prompt's first token, and where a block begins at the first mask, that token is drafted from its own
        output even if outputs are shifted.
      block_length: tokens of a block of "free", "delayed" and "block_boundary".
      window_size: tokens on either side of "sliding".
      verify_batch_size: drafts that the guide reads in one forward; 0 reads all of them at once.
      temperature: of the drafts; 0 is greedy.
      literal_mask: whether prompts may hold the mask token; it then stays as it is.
    """

    rule: str = _static("paper")
    acceptance: str = _static("exact")
    top_k: int | None = None
    relative_probability: float | None = None
    logit_threshold: float | None = None
    draft_threshold: float = 0.0
    cache: str = _static("prompt")
    block_length: int = _static(256)
    window_size: int = _static(128)
    verify_batch_size: int = _static(32)
    temperature: float = 0.0
    literal_mask: bool = _static(False)

    def __post_init__(self):
        for name, accepted in (("rule", rules.RULES), ("acceptance", tuple(ACCEPTANCE)), ("cache", CACHES)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        check_number("block_length", self.block_length, 1, kind=int)
        check_number("window_size", self.window_size, 2, kind=int)
        check_number("verify_batch_size", self.verify_batch_size, 0, kind=int)

    def check(self) -> None:
        """See `state.Decoder.check`."""
        check_number("temperature", self.temperature, 0)
        check_number("draft_threshold", self.draft_threshold, 0, 1)
        if self.draft_threshold and self.rule == "speculative":
            raise ValueError(f"draft_threshold = {self.draft_threshold} with rule = 'speculative': the guide's token "
                             "takes the place of a draft turned down, so nothing is gained; take rule = 'paper'")
        for name in ("top_k", "relative_probability", "logit_threshold"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in ACCEPTANCE[self.acceptance] or self.acceptance == "exact":
                users = [other for other in ACCEPTANCE if name in ACCEPTANCE[other] and other != "exact"]
                raise ValueError(f"{name} = {value!r} means nothing to acceptance = {self.acceptance!r}: drop it, or "
                                 f"choose acceptance from {users}")
            check_number(name, value, *((1, float("inf"), int) if name == "top_k" else (0, 1)))

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `state.Decoder.check_request`: prompts without masks."""
        del limits
        check_mask(self, mask_id, eos_id)
        check_no_mask(prompts, mask_id, self.literal_mask)

    def check_model(self, config: Any) -> None:
        """See `state.Decoder.check_model`; `decode.join` has checked the pair."""
        if not hasattr(config, "guide"):
            raise ValueError("Guided needs a guide beside the drafter: model, params = dlm_jax.decode.join(model, "
                             "params, guide_model, guide_params, vocabulary_map)")

    def resolved(self) -> "Guided":
        """See `state.Decoder.resolved`: a test of acceptance becomes its thresholds."""
        given = {name: getattr(self, name) for name in ("top_k", "relative_probability", "logit_threshold")}
        off = dict(top_k=1, relative_probability=rules.OFF, logit_threshold=rules.OFF)
        thresholds = off | ACCEPTANCE[self.acceptance] | {k: v for k, v in given.items() if v is not None}
        return dataclasses.replace(
            self, rule="paper" if self.rule == "assisted" else self.rule, acceptance="exact", **thresholds)

    def generation_capacity(self, max_new_tokens: int) -> int:
        """See `state.Decoder.generation_capacity`."""
        return max_new_tokens

    def init(self, score: GuidedScorer, request: Request) -> State:
        """See `state.Decoder.init`: the guide reads the prompt, and the first round drafts from everything."""
        B, G = request.batch, request.capacity
        active = request.max_new_tokens > 0
        _, guide_cache, _ = prefill(score.guide, dataclasses.replace(request, prompt=score.feed[request.prompt]))
        state = State(
            canvas=Canvas.empty(request),
            draft=jnp.zeros((B, G), jnp.int32),
            read=jnp.zeros((B, G), bool),
            length=jnp.zeros(B, jnp.int32),
            cache=None if self.cache == "none" else score.init_cache(B, request.prompt_capacity + G),
            guide_cache=guide_cache,
            counts=Counts.zeros(B).add(GUIDE, request.prompt_length, active),
            done=~active,
        )
        return self._round(score, request, state, first=True)

    def step(self, score: GuidedScorer, request: Request, state: State) -> State:
        """See `state.Decoder.step`: one round."""
        return self._round(score, request, state)

    def _round(self, score: GuidedScorer, request: Request, state: State, first: bool = False) -> State:
        s, G = state, request.capacity
        index = jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32), s.draft.shape)
        start, stop, widths = self._window(score, request, s, "none" if first else self.cache)
        entry = jnp.arange(request.prompt_capacity + G, dtype=jnp.int32)
        number = entry - request.prompt_capacity  # what lies beyond a sliding window is not seen
        beyond = (number >= 0) & (request.prompt_length[:, None] + number >= stop[:, None])
        rank = jnp.where(beyond, vis.NONE, window.ranks(request))
        hidden, cache = window.forward(
            score, request, s.canvas.tokens, s.cache, start, stop, s.length[:, None] + index, rank, widths)
        counts = s.counts.add(DRAFT, stop - start, ~s.done)
        r = self._read(score, request, s, hidden, stop - request.prompt_length - s.length, counts)

        count, guided = rules.commits(self.rule, r.agreed, r.correction)
        behind = guided[:, None] & (index == (s.length + r.agreed)[:, None])
        tokens = jnp.where(behind, r.correction[:, None], r.draft)
        fresh = (index >= s.length[:, None]) & (index < (s.length + count)[:, None]) & ~s.done[:, None]
        ends = fresh & (tokens == request.eos_id)
        fresh = fresh & (jnp.cumsum(ends, axis=1) - ends == 0)  # nothing behind an end of sequence
        canvas = s.canvas.commit(
            index, fresh, tokens, jnp.where(behind, AUTOREGRESSIVE, DRAFTED), r.counts.after_prefill())
        length = s.length + jnp.sum(fresh, axis=1)
        done = s.done | jnp.any(ends, axis=1) | (length >= request.max_new_tokens)
        return State(canvas, r.draft, r.read, length, cache, r.cache, r.counts, done)

    def _window(self, score, request, state, cache) -> tuple[Array, Array, tuple[int, ...]]:
        """Returns the (B,) indices where the drafter's window begins and ends, and its static widths, ascending."""
        G, everything = request.capacity, request.prompt_capacity + request.capacity
        first, stop = request.prompt_length + state.length, window.total(request)
        shrinking = [w for w in (G // 8, G // 4, G // 2) if w >= 64]  # narrower is not worth a program of its own
        if cache == "none":
            start, widths = jnp.zeros_like(stop), [everything]
        elif cache == "prompt":
            start, widths = request.prompt_length, [G]
        elif cache == "free":
            begin = state.length // self.block_length * self.block_length
            start, widths = request.prompt_length + begin - score.shift, [*shrinking, G + score.shift]
        elif cache == "aggressive":
            start, widths = first - 1, [*shrinking, G]
        elif cache == "delayed":  # the last round's tokens are the newest of the committed prefix
            fresh = state.canvas.committed_at == state.counts.after_prefill()[:, None]
            begin = (state.length - jnp.sum(fresh, axis=1)) // self.block_length * self.block_length
            start, widths = request.prompt_length + begin - score.shift, [*shrinking, G + score.shift]
        elif cache == "sliding":
            start, stop = jnp.maximum(first - 1 - self.window_size, 0), jnp.minimum(first - 1 + self.window_size, stop)
            widths = [min(2 * self.window_size, everything)]
        else:
            start = first // self.block_length * self.block_length
            widths = [*shrinking, min(G + self.block_length, everything)]
        return jnp.where(state.done, stop, start), stop, tuple(widths)

    def _read(self, score, request, state, hidden, proposed, counts) -> _Reading:
        """Lets the guide read the drafts of (B, G, D) outputs, a chunk at a time, until it rejects one in every row."""
        B, G = request.batch, request.capacity
        S, W = request.prompt_capacity + G, min(self.verify_batch_size or G, G)
        first, row = request.prompt_length + state.length, jnp.arange(B)
        entry = jnp.arange(S, dtype=jnp.int32)
        rank = jnp.where(window.ranks(request) < 0, vis.NONE, jnp.where(
            entry < request.prompt_capacity, entry, request.prompt_length[:, None] + entry - request.prompt_capacity))
        buffer = jnp.concatenate([request.prompt, state.canvas.tokens], axis=1)
        forward = counts.after_prefill()

        def chunk(r: _Reading) -> _Reading:
            within = jnp.broadcast_to(r.chunk * W + jnp.arange(W, dtype=jnp.int32), (B, W))
            active = (within < proposed[:, None]) & r.alive[:, None]
            number = state.length[:, None] + within
            logits = score.head(jnp.take_along_axis(hidden, jnp.minimum(within, G - 1)[..., None], axis=1))
            logits = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)  # a mask is no answer
            draft = sampling.sample(logits, sampling.draw_keys(request.keys, forward, number), self.temperature)

            # the guide reads up to the token before each draft
            index = first[:, None] - 1 + within
            limit = jnp.where(active, index, vis.NONE)
            read, cache = score.guide.hidden(
                score.feed[jnp.concatenate([r.last[:, None], draft[:, :-1]], axis=1)],
                Pass(index, vis.by_rank(jnp.zeros_like(limit), limit, rank),
                     jnp.where(active, window.entries(request, index), S)), r.cache)
            verdict = score.guide.head(read)
            place, logit, likeliest = rules.standing(verdict, score.to_draft, draft)
            accepted = active & rules.accepts(
                place, logit, jnp.max(verdict, axis=-1), jnp.max(logits, axis=-1), self.top_k,
                self.relative_probability, self.logit_threshold) & rules.confident(logits, draft, self.draft_threshold)
            run = rules.prefix_length(accepted)
            rejected = r.alive & (run < jnp.sum(active, axis=1))
            theirs = score.to_draft[likeliest[row, jnp.minimum(run, W - 1), 0]]
            theirs = jnp.where(theirs == request.mask_id, rules.UNMAPPED, theirs)
            ended = jnp.any(accepted & (draft == request.eos_id) & (jnp.arange(W) < run[:, None]), axis=1)
            target = jnp.where(active, number, G)
            return _Reading(
                chunk=r.chunk + 1,
                alive=r.alive & ~rejected & ~ended & ((r.chunk + 1) * W < proposed),
                agreed=r.agreed + run,
                correction=jnp.where(rejected, theirs, r.correction),
                last=draft[:, -1],
                draft=r.draft.at[row[:, None], target].set(draft, mode="drop"),
                read=r.read.at[row[:, None], target].set(True, mode="drop"),
                cache=cache,
                counts=r.counts.add(GUIDE, jnp.sum(active, axis=1), r.alive),
            )

        start = _Reading(
            chunk=jnp.int32(0), alive=~state.done, agreed=jnp.zeros(B, jnp.int32),
            correction=jnp.full(B, rules.UNMAPPED, jnp.int32),
            last=buffer[row, window.entries(request, first[:, None] - 1)[:, 0]], draft=state.draft,
            read=jnp.zeros((B, G), bool), cache=state.guide_cache, counts=counts)
        return chunk(start) if W == G else jax.lax.while_loop(lambda r: jnp.any(r.alive), chunk, start)

    def finish(self, request: Request, state: State) -> Canvas:
        """See `state.Decoder.finish`."""
        del request
        return state.canvas

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `state.Decoder.provisional`: the drafts that the guide has read."""
        return state.draft, state.read
