"""Masked-diffusion decoding: a schedule times a commit rule times a cache policy, batched and compiled.

The answer starts as masks. Every forward drafts the masked tokens of the open block(s), orders the drafts by a
confidence, commits as many as the rule says, and leaves the rest masked. LLaDA, Dream, Fast-dLLM, FreeCache, d3LLM and
block diffusion are points of that product; `masked_presets` names them.

Letters: B batch, C candidates, G canvas length, P prompt capacity, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode import cache_policies, commit_rules, early_stops, sampling, schedules, window
from dlm_jax.decode import state as common
from dlm_jax.decode.ledger import DENOISE, PREFILL, REFRESH, Counts
from dlm_jax.decode.masked_state import State
from dlm_jax.decode.state import DRAFTED, Canvas, Request, check_number
from dlm_jax.scoring import Scorer

RULES = ("quota", "timesteps", "block_timesteps", "ancestral", "shares", "threshold", "factor", "budget")
QUOTA, TIMESTEPS, BLOCK_TIMESTEPS, ANCESTRAL, SHARES, THRESHOLD, FACTOR, BUDGET = range(len(RULES))
PLANNED = RULES[:SHARES + 1]  # no confidence is asked for how many
NAMES = {"rule": RULES, "confidence": commit_rules.CONFIDENCES, "early_stop": early_stops.KINDS}


def _static(default):
    return dataclasses.field(default=default, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDiffusion:
    """Denoising from masks.

    Only block length, cache, `multi_block` and guidance are compiled in; rules and numbers are values of one program.

    Attributes:
      block_length: tokens of a block, decoded left to right (semi-autoregressive); 0 for one block, the answer.
      multi_block: a block opens when its predecessor is far enough (d3LLM), not only when it is finished.
      rule: how many tokens a forward commits, the surest first. "quota": equal shares of `steps`, the remainder to
        a block's first steps (LLaDA). "timesteps": floor(masks (1 - s/t)), masks and time of the whole answer (Dream);
        "block_timesteps": of the block (Fast-dLLM for Dream). "ancestral": each mask of the block with probability
        1 - s/t, at random (MDLM; Dream's "origin"). "shares": what is left over the steps left, rounded
        (block diffusion). "threshold": all that reach `threshold`. "factor": Fast-dLLM's rule. "budget": all that
        reach `threshold`, and no more than equal shares of `steps` so far (Fast-dLLM for Dream without a cache).
        The last three commit at least one token a forward.
      confidence: "probability" of the draft, its "margin" over the likeliest other token, "entropy" or "random".
      tempered: whether confidences are of logits after temperature and truncation, and a margin that of the two
        likeliest tokens (Dream), or of the model's own distribution (LLaDA).
      cache: see `cache_policies`.
      early_stop: what an EOS does, see `early_stops`.
      first_token: the forward that opens a block commits its first token and nothing else (Fast-dLLM for Dream).
      steps: forwards for the whole answer, a multiple of the number of blocks; 0 takes one a token.
      eps: last time of "timesteps", "block_timesteps" and "ancestral".
      threshold: probability or margin in (0, 1]; nats with confidence "entropy", reached from above.
      factor: positive; larger commits fewer.
      block_add_threshold: committed share of the newest block at which the next opens.
      decoded_token_threshold: committed share at which a block's successor is sure to get a token a forward.
      eos_run: EOS tokens in a row, for "run".
      refresh_every: forwards from full pass to full pass; 0 leaves it to the cache policy.
      cfg_scale: classifier-free guidance, 0 for none; every forward then runs a second copy with the prompt masked.
      temperature: of drafts; 0 is greedy. top_k, top_p: truncate them; 0 and 1 keep all.
      commit_temperature: Gumbel noise on confidence / temperature before ordering (Dream's alg_temp); 0 is off.
      literal_mask: whether prompts may hold the mask token; it then stays as it is.
      classifier_free: whether the copy without the prompt runs; None takes it from `cfg_scale`.
    """

    block_length: int = _static(32)
    multi_block: bool = _static(False)
    cache: str = _static("none")
    rule: int | str = "threshold"
    confidence: int | str = "probability"
    tempered: int | bool = False
    early_stop: int | str = "fill"
    first_token: int | bool = False
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
    literal_mask: int | bool = False
    classifier_free: bool | None = _static(None)

    def __post_init__(self):
        if self._is_resolved:  # names are numbers and were checked before
            return
        for name, accepted in NAMES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        if self.cache not in cache_policies.POLICIES:
            raise ValueError(f"cache = {self.cache!r}: accepted are {cache_policies.POLICIES}")
        check_number("block_length", self.block_length, 0, kind=int)
        timed = self.rule in (*PLANNED, "budget")
        for wrong, why in (
            (self.cache not in ("none", "prompt") and not self.block_length,
             f"cache = {self.cache!r} works block by block: give a block_length, or take cache = 'prompt'"),
            (self.multi_block and not self.block_length, "multi_block needs a block_length"),
            (self.multi_block and timed,
             f"rule = {self.rule!r} plans the steps of one block; with multi_block take 'threshold' or 'factor'"),
            (self.multi_block and self.cache == "block",
             "cache = 'block' hides later blocks, multi_block decodes into them: take another cache"),
            (self.multi_block and self.first_token, "first_token belongs to blocks decoded one by one"),
            (self.rule == "factor" and self.confidence != "probability",
             f"rule = 'factor' bounds probabilities, confidence = {self.confidence!r} is none"),
            (self.rule == "ancestral" and self.confidence != "random",
             f"rule = 'ancestral' commits at random, whatever the confidence: say confidence = 'random', not "
             f"{self.confidence!r}"),
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
        if self.cfg_scale > 0 and self.classifier_free is False:
            raise ValueError(f"cfg_scale = {self.cfg_scale} with classifier_free = False: nothing is guided; leave "
                             "classifier_free at None, or cfg_scale at 0")
        if self.refresh_every and self.cache in ("none", "block"):
            raise ValueError(f"refresh_every = {self.refresh_every} with cache = {self.cache!r}: nothing is stale "
                             "there, leave it at 0")

    def check_model(self, config: Any) -> None:
        """See `state.Decoder.check_model`."""
        common.check_attention(self, config, bidirectional=True)
        trained = config.block_size
        if self.cache == "block" and trained is not None and trained != self.block_length:
            raise ValueError(f"block_length = {self.block_length} with cache = 'block': the model was trained on "
                             f"blocks of {trained} tokens (block_size of its config); take block_length = {trained}")

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `state.Decoder.check_request`: prompts without masks, and steps that fit the answers."""
        common.check_mask(self, mask_id, eos_id)
        common.check_no_mask(prompts, mask_id, self.literal_mask)
        for limit in np.unique(limits).tolist() if self.steps else []:
            blocks = -(-limit // self.block_length) if self.block_length else 1
            if self.steps % blocks:
                raise ValueError(
                    f"steps = {self.steps} do not divide among the {blocks} blocks of {self.block_length} that hold "
                    f"{limit} tokens: take a multiple of {blocks}, or 0 for one step a token")

    def resolved(self) -> "MaskedDiffusion":
        """See `state.Decoder.resolved`."""
        if self._is_resolved:
            return self
        numbers = {name: accepted.index(getattr(self, name)) for name, accepted in NAMES.items()}
        free = self.cfg_scale > 0 if self.classifier_free is None else self.classifier_free
        return dataclasses.replace(self, classifier_free=free, **numbers)

    @property
    def _is_resolved(self) -> bool:
        return not isinstance(self.rule, str)

    def generation_capacity(self, max_new_tokens: int) -> int:
        """See `state.Decoder.generation_capacity`: whole blocks."""
        return -(-max_new_tokens // self._length(max_new_tokens)) * self._length(max_new_tokens)

    def _length(self, capacity: int) -> int:
        """Returns the tokens of a block: no more than there are, but where the prompt has blocks, too."""
        length = self.block_length or capacity
        return length if self.cache == "block" else min(length, capacity)

    def init(self, score: Scorer, request: Request) -> State:
        """See `state.Decoder.init`; only block diffusion runs the prompt by itself."""
        if not self._is_resolved:
            return self.resolved().init(score, request)
        B, G, P = request.batch, request.capacity, request.prompt_capacity
        canvas, counts, zero = Canvas.empty(request), Counts.zeros(B), jnp.zeros(B, jnp.int32)
        cache = None if self.cache == "none" else score.init_cache(self._copies * B, P + G)
        if self.cache == "block":
            many = lambda x: jnp.concatenate([x] * self._copies)
            requests = window.unconditional(request) if self.classifier_free else request
            _, cache = window.forward(
                score, requests, many(canvas.tokens), cache, many(zero), requests.prompt_length,
                jnp.zeros((self._copies * B, 1), jnp.int32), window.ranks(requests, self.block_length), (P,))
            counts = counts.add(PREFILL, self._copies * request.prompt_length, request.max_new_tokens > 0)
        return State(
            canvas=canvas, draft=jnp.full((B, G), -1, jnp.int32), late=jnp.zeros((B, G), bool), opened=zero + 1,
            step=zero, age=zero, due=jnp.full(B, self.cache not in ("none", "block")),
            done=request.max_new_tokens <= 0, cache=cache, counts=counts)

    @property
    def _copies(self) -> int:
        return 2 if self.classifier_free else 1

    def _logits(self, score, request, state, start, stop, wanted, length):
        """Returns the (B, C, V) logits of the wanted tokens, and the cache."""
        many = lambda x: jnp.concatenate([x] * self._copies)
        requests = window.unconditional(request) if self.classifier_free else request
        rank = window.ranks(requests, length if self.cache == "block" else 0)
        widths = cache_policies.widths(self.cache, request, length, self.multi_block, score.shift)
        hidden, cache = window.forward(
            score, requests, many(state.canvas.tokens), state.cache, many(start), many(stop), many(wanted), rank,
            widths)
        logits = score.head(hidden)
        if self.classifier_free:
            conditional, free = jnp.split(logits, 2)
            logits = free + (self.cfg_scale + 1.0) * (conditional - free)
        return logits, cache

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `state.Decoder.step`."""
        if not self._is_resolved:
            return self.resolved().step(score, request, state)
        s, B, G, L = state, request.batch, request.capacity, self._length(request.capacity)
        live, limit, masked = ~s.done, request.max_new_tokens, early_stops.masked(request, s.canvas)
        block = _first(masked) // L  # the first unfinished one
        opened, progress = jnp.maximum(s.opened, block + 1), schedules.progress(masked, limit, L)
        if self.multi_block:
            filling = (self.early_stop == early_stops.FILL) | (self.early_stop == early_stops.LATE_FILL)
            ended = filling & jnp.any(early_stops.found(request, s.canvas), axis=1)
            opened = schedules.open_next(opened, progress, ended, self.block_add_threshold)
        begin, end = block * L, jnp.minimum(opened * L, limit)

        # forward
        due = s.due
        if self.cache not in ("none", "block"):
            due = due | ((self.refresh_every > 0) & (s.age >= self.refresh_every))
        fresh = s.canvas.committed_at == s.counts.after_prefill()[:, None]
        start, stop = cache_policies.span(self.cache, request, masked, fresh, due, begin, end, score.shift, L)
        stop = jnp.where(live, stop, start)
        wanted = jnp.arange(L, dtype=jnp.int32) + begin[:, None]
        if self.multi_block:
            wanted = jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32), (B, G))
        logits, cache = self._logits(score, request, s, start, stop, wanted, L)
        counts = s.counts.add(jnp.where(due, REFRESH, DENOISE), self._copies * (stop - start), live)

        # draft
        keys = sampling.draw_keys(request.keys, s.counts.after_prefill(), wanted)
        draws, ties = (jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, use)))(keys) for use in (0, 1))
        answers = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)  # a mask is no answer
        warm = jnp.asarray(self.temperature) > 0
        token = sampling.sample(answers, draws, self.temperature, self.top_k, self.top_p)

        def tempered():  # the mask is part of what Dream judges
            x = sampling.scaled(logits, jnp.where(warm, self.temperature, 1.0), self.top_k, self.top_p)
            margin = self.confidence == commit_rules.CONFIDENCES.index("margin")
            return x, jnp.where(margin & warm, sampling.likeliest(x), token)

        judged, of = jax.lax.cond(jnp.asarray(self.tempered) > 0, tempered, lambda: (logits, token))
        sure = commit_rules.confidence(judged, of, self.confidence, ties)
        drafting = live & ~due if self.cache == "block" else live
        at = lambda x: jnp.take_along_axis(x, jnp.minimum(wanted, G - 1), axis=1)
        output = request.prompt_length[:, None] + wanted - score.shift
        computed = (start[:, None] <= output) & (output < stop[:, None])
        eligible = ((at(masked) & (wanted < end[:, None])) | (at(s.late) & computed)) & drafting[:, None]
        draft = s.draft.at[jnp.arange(B)[:, None], jnp.where(eligible, wanted, G)].set(token, mode="drop")

        # commit
        chosen, step = self._choose(request, s, masked, block, sure, ties, eligible)
        if self.multi_block:
            chosen |= commit_rules.forced(
                chosen, eligible, sure, masked, progress >= self.decoded_token_threshold, opened)
        canvas = s.canvas.commit(wanted, chosen, token, DRAFTED, counts.after_prefill())
        at_forward = jnp.where(s.late, s.canvas.committed_at, canvas.committed_at)
        canvas, late = early_stops.fill(
            self.early_stop, request, dataclasses.replace(canvas, committed_at=at_forward), self.eos_run,
            counts.after_prefill(), live)

        # what is next
        masked = early_stops.masked(request, canvas)
        moved = live & (_first(masked) // L != block)
        inside = jnp.arange(G) < (begin + L)[:, None]
        ended = moved & jnp.any(early_stops.found(request, canvas) & inside, axis=1)
        return State(
            canvas=canvas, draft=draft, late=late, opened=opened,
            step=jnp.where(moved, 0, jnp.where(drafting, step, s.step)), age=jnp.where(due, 1, s.age + 1),
            due=moved & (self.cache in cache_policies.PER_BLOCK),
            done=s.done | ~jnp.any(masked, axis=1) | (ended & (self.early_stop == early_stops.BLOCK)),
            cache=cache, counts=counts)

    def _choose(self, request, state, masked, block, sure, ties, eligible):
        """Returns the (B, C) candidates to commit, and the steps taken in the block then."""
        length, limit, step = self._length(request.capacity), request.max_new_tokens, state.step
        here, left = jnp.sum(eligible, axis=1), jnp.sum(masked, axis=1)
        noise = jax.vmap(jax.vmap(jax.random.gumbel))(ties) * self.commit_temperature
        place = commit_rules.places(sure + noise, eligible)

        # as planned; a block's last step takes the rest
        steps, whole = schedules.block_steps(self.steps, limit, length)
        shares, after = schedules.shares(here, steps, step)
        planned = jnp.select(
            [self.rule == QUOTA, self.rule == TIMESTEPS, self.rule == BLOCK_TIMESTEPS, self.rule == ANCESTRAL],
            [schedules.even(jnp.clip(limit - block * length, 1, length), steps, step),
             schedules.by_time(left, whole, block * steps + step, self.eps),
             schedules.by_time(here, steps, step, self.eps),
             commit_rules.above(sure, eligible, -schedules.elapsed(steps, step, self.eps)[:, None])], shares)
        after = jnp.where(self.rule == SHARES, after, step + 1)
        planned = jnp.where(after >= steps, here, planned)

        # as sure; the surest always
        nats = self.confidence == commit_rules.CONFIDENCES.index("entropy")
        reach = commit_rules.above(sure, eligible, jnp.where(nats, -self.threshold, self.threshold - 1.0))
        allowed = jnp.minimum(block * steps + step + 1, whole) * limit // whole - (limit - left)
        seen = jnp.select([self.rule == FACTOR, self.rule == BUDGET],
                          [commit_rules.by_factor(sure, place, eligible, self.factor), jnp.minimum(reach, allowed)],
                          reach)
        count = jnp.where(self.rule <= SHARES, planned, jnp.maximum(seen, 1))
        chosen = eligible & (place < count[:, None])
        opening = (jnp.asarray(self.first_token) > 0) & (step == 0)
        return jnp.where(opening[:, None], eligible & (jnp.cumsum(eligible, axis=1) == 1), chosen), after

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
