"""Masked-diffusion decoding: a schedule times a commit rule times a cache policy, batched and compiled.

The answer starts as masks. Every forward drafts the masked tokens of the open block(s), orders the drafts by a
confidence, commits as many as the rule says, and leaves the rest masked. LLaDA, Dream, Fast-dLLM, FreeCache, d3LLM and
block diffusion are points of that product; `masked_presets` names them.

Letters: B batch, C candidates, G canvas length, P prompt capacity, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode import cache_policies, commit_rules, sampling, schedules, window
from dlm_jax.decode import state as common
from dlm_jax.decode.ledger import DENOISE, PREFILL, REFRESH, Counts
from dlm_jax.decode.state import DRAFTED, Canvas, Request, check_number
from dlm_jax.types import Scorer

RULES = ("quota", "timesteps", "block_timesteps", "shares", "threshold", "factor", "budget")
EARLY_STOPS = ("none", "fill", "run", "block", "late_fill")


def _static(default):
    return dataclasses.field(default=default, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Loop carry.

    Attributes:
      draft: (B, G) int32 newest draft of each token that is not committed, -1 for none.
      late: (B, G) bool tokens that an EOS filled and that the next forward may still overwrite ("late_fill").
      opened: (B,) int32 blocks open, the finished ones included.
      step: (B,) int32 steps taken in the block.
      age: (B,) int32 forwards since the last full pass, it included.
      due: (B,) bool rows whose next forward refreshes the cache.
      cache: of 2B rows with classifier-free guidance; None without a cache.
    """

    canvas: Canvas
    draft: Array
    late: Array
    opened: Array
    step: Array
    age: Array
    due: Array
    done: Array
    cache: Any
    counts: Counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDiffusion:
    """Denoising from masks.

    Attributes:
      block_length: tokens of a block, decoded left to right (semi-autoregressive); 0 for one block, the answer.
      multi_block: a block opens when its predecessor is far enough (d3LLM), not only when it is finished.
      rule: how many tokens a forward commits, the surest first. "quota": equal shares of `steps`, the remainder to
        a block's first steps (LLaDA). "timesteps": floor(masks (1 - s/t)), masks and time of the whole answer (Dream);
        "block_timesteps": of the block (Fast-dLLM for Dream). "shares": what is left over the steps left, rounded
        (block diffusion). "threshold": all that reach `threshold`. "factor": Fast-dLLM's rule. "budget": all that
        reach `threshold`, and no more than equal shares of `steps` so far (Fast-dLLM for Dream without a cache).
        The last four commit at least one token a forward.
      confidence: "probability" of the draft, "margin" to the second likeliest token, "entropy" or "random".
      cache: see `cache_policies`.
      early_stop: what an EOS does. "none": nothing, the answer is filled. "fill": all after the first one becomes
        EOS. "run": where committed tokens have no gap and end in `eos_run` EOS, the rest becomes EOS. "block": nothing
        after the block that holds one is decoded. "late_fill": as "fill", but the tokens filled stay candidates for
        one more forward, as d3LLM's released code has it.
      first_token: the forward that opens a block commits its first token and nothing else (Fast-dLLM for Dream).
      steps: forwards for the whole answer, a multiple of the number of blocks; 0 takes one a token.
      eps: last time of "timesteps".
      threshold: probability or margin in (0, 1]; nats with confidence "entropy", reached from above.
      factor: positive; larger commits fewer.
      block_add_threshold: committed share of the newest block at which the next opens.
      decoded_token_threshold: committed share at which a block's successor is sure to get a token a forward.
      eos_run: EOS tokens in a row, for "run".
      refresh_every: forwards from full pass to full pass; 0 leaves it to the cache policy.
      cfg_scale: classifier-free guidance, 0 for none; every forward then runs a second copy with the prompt masked.
      temperature: of drafts; 0 is greedy. top_k, top_p: truncate them; 0 and 1 keep all.
      commit_temperature: Gumbel noise on confidence / temperature before ordering (Dream's alg_temp); 0 is off.
      guided: set by `resolved`.
    """

    block_length: int = _static(32)
    multi_block: bool = _static(False)
    rule: str = _static("threshold")
    confidence: str = _static("probability")
    cache: str = _static("none")
    early_stop: str = _static("fill")
    first_token: bool = _static(False)
    steps: int = 0
    eps: float = 1e-3
    threshold: float = 0.9
    factor: float = 1.0
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    eos_run: int = 1
    refresh_every: int = 0
    cfg_scale: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    commit_temperature: float = 0.0
    guided: bool | None = _static(None)

    def __post_init__(self):
        for name, accepted in (("rule", RULES), ("confidence", commit_rules.CONFIDENCES),
                               ("cache", cache_policies.POLICIES), ("early_stop", EARLY_STOPS)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        check_number("block_length", self.block_length, 0, kind=int)
        timed = self.rule in ("quota", "timesteps", "block_timesteps", "shares", "budget")
        for wrong, why in (
            (self.cache in ("prefix", "dual", "free", "block") and not self.block_length,
             f"cache = {self.cache!r} works block by block: give a block_length, or take cache = 'prompt'"),
            (self.multi_block and not self.block_length, "multi_block needs a block_length"),
            (self.multi_block and timed,
             f"rule = {self.rule!r} plans the steps of one block; with multi_block take 'threshold' or 'factor'"),
            (self.multi_block and self.cache == "block",
             "cache = 'block' hides later blocks, multi_block decodes into them: take another cache"),
            (self.multi_block and self.first_token, "first_token belongs to blocks decoded one by one"),
            (self.rule == "factor" and self.confidence != "probability",
             f"rule = 'factor' bounds probabilities, confidence = {self.confidence!r} is none"),
            (self.rule in ("threshold", "budget") and self.confidence == "random",
             f"rule = {self.rule!r} with random confidences commits at random: take rule = 'quota'"),
        ):
            if wrong:
                raise ValueError(why)

    def check(self) -> None:
        """See `state.Decoder.check`."""
        check_number("steps", self.steps, 0, kind=int)
        check_number("eps", self.eps, 1e-9, 1)
        nats = self.confidence == "entropy"
        if self.rule in ("threshold", "budget"):
            check_number("threshold", self.threshold, 0 if nats else 1e-9, float("inf") if nats else 1)
        check_number("factor", self.factor, 1e-9)
        check_number("block_add_threshold", self.block_add_threshold, 0, 1)
        check_number("decoded_token_threshold", self.decoded_token_threshold, 0, 1)
        check_number("eos_run", self.eos_run, 1, kind=int)
        check_number("refresh_every", self.refresh_every, 0, kind=int)
        check_number("cfg_scale", self.cfg_scale, 0)
        check_number("temperature", self.temperature, 0)
        check_number("top_k", self.top_k, 0, kind=int)
        check_number("top_p", self.top_p, 1e-6, 1)
        check_number("commit_temperature", self.commit_temperature, 0)
        if self.steps and self.rule in ("threshold", "factor"):
            raise ValueError(f"steps = {self.steps} has no effect with rule = {self.rule!r}: leave it at 0")
        if self.refresh_every and self.cache in ("none", "block"):
            raise ValueError(f"refresh_every = {self.refresh_every} with cache = {self.cache!r}: there is nothing stale "
                             "to refresh")

    def check_model(self, config: Any) -> None:
        """See `state.Decoder.check_model`."""
        common.check_attention(self, config, bidirectional=True)

    def check_limits(self, limits: np.ndarray) -> None:
        """Raises ValueError for answer lengths that the schedule does not fit.

        Args:
          limits: tokens to generate, one number a row.
        """
        if not self.steps:
            return
        for limit in np.unique(limits).tolist():
            blocks = -(-limit // self.block_length) if self.block_length else 1
            if self.steps % blocks:
                raise ValueError(
                    f"steps = {self.steps} do not divide among the {blocks} blocks of {self.block_length} that hold "
                    f"{limit} tokens: take a multiple of {blocks}, or 0 for one step a token")

    def resolved(self) -> "MaskedDiffusion":
        """See `state.Decoder.resolved`."""
        return dataclasses.replace(self, guided=bool(self.cfg_scale > 0)) if self.guided is None else self

    @property
    def needs_mask(self) -> bool:
        """Whether the model must have a mask token."""
        return True

    def generation_capacity(self, max_new_tokens: int) -> int:
        """See `state.Decoder.generation_capacity`: whole blocks."""
        return -(-max_new_tokens // self._length(max_new_tokens)) * self._length(max_new_tokens)

    def _length(self, capacity: int) -> int:
        return self.block_length or capacity

    def init(self, score: Scorer, request: Request) -> State:
        """See `state.Decoder.init`; only block diffusion runs the prompt by itself."""
        B, G, P = request.batch, request.capacity, request.prompt_capacity
        canvas, counts, zero = Canvas.empty(request), Counts.zeros(B), jnp.zeros(B, jnp.int32)
        copies, requests = self._copies(request)
        cache = None if self.cache == "none" else score.init_cache(copies * B, P + G)
        if self.cache == "block":
            many = lambda x: jnp.concatenate([x] * copies)
            _, cache = window.forward(
                score, requests, many(canvas.tokens), cache, many(zero), requests.prompt_length,
                jnp.zeros((copies * B, 1), jnp.int32), window.ranks(requests, self.block_length), (P,))
            counts = counts.add(PREFILL, copies * request.prompt_length, request.max_new_tokens > 0)
        return State(
            canvas=canvas, draft=jnp.full((B, G), -1, jnp.int32), late=jnp.zeros((B, G), bool), opened=zero + 1,
            step=zero, age=zero, due=jnp.full(B, self.cache not in ("none", "block")),
            done=request.max_new_tokens <= 0, cache=cache, counts=counts)

    def _copies(self, request: Request) -> tuple[int, Request]:
        guided = self.resolved().guided
        return (2, window.unconditional(request)) if guided else (1, request)

    def _logits(self, score, request, state, start, stop, wanted, length):
        """Returns the (B, C, V) logits of the wanted tokens, and the cache."""
        copies, requests = self._copies(request)
        many = lambda x: jnp.concatenate([x] * copies)
        rank = window.ranks(requests, length if self.cache == "block" else 0)
        widths = cache_policies.widths(self.cache, request, length, self.multi_block, score.shift)
        hidden, cache = window.forward(
            score, requests, many(state.canvas.tokens), state.cache, many(start), many(stop), many(wanted), rank, widths)
        logits = score.head(hidden)
        if copies == 2:
            with_prompt, without = jnp.split(logits, 2)
            logits = without + (self.cfg_scale + 1.0) * (with_prompt - without)
        return logits, cache

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `state.Decoder.step`."""
        s, B, G, L = state, request.batch, request.capacity, self._length(request.capacity)
        live, limit = ~s.done, request.max_new_tokens
        masked = self._masked(request, s.canvas)
        block = _first(masked) // L  # the first unfinished one
        opened = jnp.maximum(s.opened, block + 1)
        if self.multi_block:
            done = schedules.progress(masked, limit, L)
            opened = schedules.open_next(opened, done, self._ended(request, s), self.block_add_threshold)
        begin, end = block * L, jnp.minimum(opened * L, limit)

        # forward
        due = s.due
        if self.cache not in ("none", "block"):
            due = due | ((self.refresh_every > 0) & (s.age >= self.refresh_every))
        start, stop = cache_policies.span(self.cache, request, masked, due, begin, end, score.shift, L)
        stop = jnp.where(live, stop, start)
        wanted = jnp.arange(L, dtype=jnp.int32) + begin[:, None]
        if self.multi_block:
            wanted = jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32), (B, G))
        logits, cache = self._logits(score, request, s, start, stop, wanted, L)
        kind = jnp.where(due, REFRESH, DENOISE)
        copies = self._copies(request)[0]
        counts = s.counts.add(kind, copies * (stop - start), live)

        # draft
        keys = sampling.draw_keys(request.keys, s.counts.after_prefill(), wanted)
        draws, ties = (jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys, i) for i in (0, 1))
        answers = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)  # a mask is no answer
        token = sampling.sample(answers, draws, self.temperature, self.top_k, self.top_p)
        sure = commit_rules.confidence(logits, token, self.confidence, ties)

        # commit
        at = lambda x: jnp.take_along_axis(x, jnp.minimum(wanted, G - 1), axis=1)
        drafting = live & ~due if self.cache == "block" else live
        eligible = ((at(masked) & (wanted < end[:, None])) | at(s.late)) & drafting[:, None]
        chosen, step = self._choose(request, s, masked, block, sure, ties, eligible)
        if self.multi_block:
            chosen |= self._forced(chosen, eligible, sure, masked, done, opened, L)
        canvas = s.canvas.commit(wanted, chosen, token, DRAFTED, counts.after_prefill())
        canvas, late = self._stop_early(request, canvas, counts.after_prefill(), live)
        row = jnp.arange(B)[:, None]
        draft = s.draft.at[row, jnp.where(eligible, wanted, G)].set(token, mode="drop")

        # what is next
        masked = self._masked(request, canvas)
        done = s.done | ~jnp.any(masked, axis=1)
        moved = live & (_first(masked) // L != block)
        if self.early_stop == "block":
            inside = jnp.arange(G) < (block[:, None] + 1) * L
            done |= moved & jnp.any((canvas.tokens == request.eos_id) & inside & (canvas.committed_at >= 0), axis=1)
        return State(
            canvas=canvas, draft=draft, late=late, opened=opened,
            step=jnp.where(moved, 0, jnp.where(drafting, step, s.step)), age=jnp.where(due, 1, s.age + 1),
            due=moved & (self.cache in cache_policies.PER_BLOCK), done=done, cache=cache, counts=counts)

    def _choose(self, request, state, masked, block, sure, keys, eligible):
        """Returns the (B, C) candidates to commit, and the steps taken in the block then."""
        L, limit, step = self._length(request.capacity), request.max_new_tokens, state.step
        number = jnp.sum(eligible, axis=1)
        if self.first_token:
            opening = (step == 0)[:, None]
            first = eligible & (jnp.cumsum(eligible, axis=1) == 1)
        noise = jax.vmap(jax.vmap(jax.random.gumbel))(keys) * self.commit_temperature
        place = commit_rules.places(sure + noise, eligible)
        steps, whole = schedules.block_steps(self.steps, limit, L)
        left, after = jnp.sum(masked, axis=1), step + 1
        if self.rule == "quota":
            count = schedules.even(jnp.clip(limit - block * L, 1, L), steps, step)
        elif self.rule == "timesteps":
            count = schedules.by_time(left, whole, block * steps + step, self.eps)
        elif self.rule == "block_timesteps":
            count = schedules.by_time(number, steps, step, self.eps)
        elif self.rule == "shares":
            count, after = schedules.shares(number, steps, step)
        elif self.rule == "factor":
            count = commit_rules.by_factor(sure, place, eligible, self.factor)
        else:
            least = -self.threshold if self.confidence == "entropy" else self.threshold
            count = commit_rules.above(sure, eligible, least)
        if self.rule == "budget":
            allowed = jnp.minimum(step + 1, whole) * limit // whole - (limit - left)
            count = jnp.minimum(count, allowed)
        if self.rule in ("threshold", "factor", "budget"):
            count = jnp.maximum(count, 1)
        else:
            count = jnp.where(step >= steps - 1, number, count)  # a block's last step takes the rest
        chosen = eligible & (place < count[:, None])
        return (jnp.where(opening, first, chosen) if self.first_token else chosen), after

    def _forced(self, chosen, eligible, sure, masked, done, opened, length):
        """The surest token of the first unfinished block whose predecessor is far enough, if it got none."""
        B, G = masked.shape
        n = G // length
        before = jnp.concatenate([jnp.ones((B, 1)), done[:, :-1]], axis=1)
        split = lambda x: x.reshape(B, n, length)
        ready = (before >= self.decoded_token_threshold) & (jnp.arange(n) < opened[:, None])
        ready &= jnp.any(split(masked), axis=2)
        target = (ready & (jnp.cumsum(ready, axis=1) == 1)) & ~jnp.any(split(chosen), axis=2)
        inside = jnp.repeat(target, length, axis=1) & eligible
        return inside & (commit_rules.places(sure, inside) == 0)

    def _masked(self, request: Request, canvas: Canvas) -> Array:
        """(B, G) tokens still to come."""
        inside = jnp.arange(request.capacity) < request.max_new_tokens[:, None]
        return inside & (canvas.committed_at < 0)

    def _ended(self, request: Request, state: State) -> Array:
        """(B,) rows that hold an EOS and fill what follows."""
        found = jnp.any((state.canvas.tokens == request.eos_id) & (state.canvas.committed_at >= 0), axis=1)
        return found & (self.early_stop in ("fill", "late_fill"))

    def _stop_early(self, request, canvas, forward, live):
        """Returns the canvas with EOS where the rule puts them, and the tokens that stay candidates."""
        late = jnp.zeros(canvas.tokens.shape, bool)
        if self.early_stop in ("none", "block"):
            return canvas, late
        masked, have = self._masked(request, canvas), canvas.committed_at >= 0
        eos = have & (canvas.tokens == request.eos_id)
        index = jnp.arange(request.capacity)
        inside = index < request.max_new_tokens[:, None]
        if self.early_stop == "run":
            count = jnp.sum(have & inside, axis=1, keepdims=True)
            tail = (index < count) & (index >= count - self.eos_run)
            stop = (count >= self.eos_run) & (_first(masked)[:, None] == count)
            fill = masked & stop & jnp.all(eos | ~tail, axis=1, keepdims=True)
        else:
            fill = inside & (jnp.cumsum(eos, axis=1) - eos > 0)
            if self.early_stop == "late_fill":
                fill &= jnp.any(masked, axis=1, keepdims=True)
                late = fill & masked
        fill &= live[:, None]
        at = jnp.where(fill & masked, forward[:, None], canvas.committed_at)
        origin = jnp.where(fill, DRAFTED, canvas.origin)
        return Canvas(jnp.where(fill, request.eos_id, canvas.tokens), at, origin), late

    def finish(self, request: Request, state: State) -> Canvas:
        """See `state.Decoder.finish`."""
        del request
        return state.canvas

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `state.Decoder.provisional`: the newest drafts of masked tokens."""
        shown = (state.canvas.committed_at < 0) & (state.draft >= 0) & ~state.done[:, None]
        return jnp.where(shown, state.draft, state.canvas.tokens), shown


def _first(flag: Array) -> Array:
    """Returns (B,) the index of the first True; the length if there is none."""
    return jnp.where(jnp.any(flag, axis=1), jnp.argmax(flag, axis=1), flag.shape[1]).astype(jnp.int32)
