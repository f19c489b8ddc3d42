"""ReFusion decoding: plan slots by diffusion, infill them autoregressively, in any order, every KV reused.

Each row is a small state machine whose every transition costs one forward, so rows of a batch may plan, verify
and infill side by side. Slots that are refined together are told apart by the visibility rule's groups inside
one window (no copies of the cache), and a committed token never moves: it only gains rank.

Letters: B batch, n slots of a block, k slot size, W = n * k block length, Q = W + n queries of a forward (the
block's window, then one tail query per slot), M slots of the canvas, G canvas length, P prompt capacity.

Source: "ReFusion", Sec. 4.2, A.2, B.1, C.2, C.5, Table 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.decode.refusion import rules
from dlm_jax.decode import sampling
from dlm_jax.decode.refusion.state import (
    COMMITTED, FRESH, INFILL_MANY, INFILL_ONE, JUDGE, KIND, PLAN, RECOMPUTE, REDRAFT, REJUDGE, Queries, State)
from dlm_jax.decode.state import (
    AUTOREGRESSIVE, DRAFTED, Canvas, Request, check_attention, check_mask, check_number, prefill)
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass, Scorer


def _static(default):
    return dataclasses.field(default=default, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReFusion:
    """Plan-and-infill decoding over slots.

    Attributes:
      slot_size: k, tokens of a slot.
      block_length: b, tokens decoded before the next block opens; a multiple of k (C.4).
      slot_threshold: tau for choosing slots, strictly exceeded; the best slot is chosen if none passes.
      token_threshold: tau for accepting drafted tokens; None takes `slot_threshold`, as the paper does.
      certainty: "first" scores a slot by its first token (Eq. 5), "mean" by all its tokens (C.2).
      kv: "reuse" keeps the keys and values made while infilling; "recompute" spends a forward so that slots
        infilled together see each other (Table 4).
      completion: what follows a draft that is not accepted whole. "autoregressive" cuts all chosen slots to
        their common verified length and samples on token by token (Eq. 7, the paper's rule). "redraft" drafts
        the rejected tails from masks and verifies again, at least one token a round (the released code).
      confidence_aware: False always takes `slots_per_round` slots and verifies no draft (Table 10).
      slots_per_round: slots chosen when `confidence_aware` is off.
      temperature: of drafts and infilled tokens; 0 is greedy.
      reference_compat: do as the released code does where it leaves the paper: completion by redraft, every
        slot's first token accepted, the mask token not excluded, keys and values of slots refined together kept
        row-wise, and an EOS in refinement closing slots by row index, so that earlier slots may be lost and their
        positions stay empty.
    """

    slot_size: int = _static(8)
    block_length: int = _static(32)
    slot_threshold: float = 0.6
    token_threshold: float | None = None
    certainty: str = _static("first")
    kv: str = _static("reuse")
    completion: str = _static("autoregressive")
    confidence_aware: bool = _static(True)
    slots_per_round: int = 1
    temperature: float = 0.0
    reference_compat: bool = _static(False)

    def __post_init__(self):
        if self.slot_size < 2:
            raise ValueError(f"slot_size = {self.slot_size}: a slot holds at least 2 tokens")
        if self.block_length < self.slot_size or self.block_length % self.slot_size:
            raise ValueError(
                f"block_length = {self.block_length} is not a multiple of slot_size = {self.slot_size}; "
                f"try {max(1, round(self.block_length / self.slot_size)) * self.slot_size}")
        for name, accepted in (("certainty", ("first", "mean")), ("kv", ("reuse", "recompute")),
                               ("completion", ("autoregressive", "redraft"))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        if self.reference_compat and self.kv == "recompute":
            raise ValueError("reference_compat keeps row-wise keys and values, kv = 'recompute' does not: drop one")
        if self.reference_compat and not self.confidence_aware:
            raise ValueError("reference_compat needs confidence_aware: the released code always verifies")

    def check(self) -> None:
        """See `state.Decoder.check`."""
        check_number("slot_threshold", self.slot_threshold, 0, 1)
        if self.token_threshold is not None:
            check_number("token_threshold", self.token_threshold, 0, 1)
        check_number("temperature", self.temperature, 0)
        check_number("slots_per_round", self.slots_per_round, 1, kind=int)

    def check_model(self, config: Any) -> None:
        """See `state.Decoder.check_model`."""
        check_attention(self, config, bidirectional=False)

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `state.Decoder.check_request`."""
        del prompts, limits
        check_mask(self, mask_id, eos_id)

    def resolved(self) -> "ReFusion":
        """See `state.Decoder.resolved`."""
        tau = self.slot_threshold if self.token_threshold is None else self.token_threshold
        return dataclasses.replace(self, token_threshold=tau)

    @property
    def _slots(self) -> int:
        return self.block_length // self.slot_size

    @property
    def _redrafts(self) -> bool:
        return self.confidence_aware and (self.reference_compat or self.completion == "redraft")

    def generation_capacity(self, max_new_tokens: int) -> int:
        """See `state.Decoder.generation_capacity`: whole blocks."""
        return -(-max_new_tokens // self.block_length) * self.block_length

    def init(self, score: Scorer, request: Request) -> State:
        """See `state.Decoder.init`."""
        _, cache, counts = prefill(score, request)
        B, n, k, G = request.batch, self._slots, self.slot_size, request.capacity
        zero = jnp.zeros(B, jnp.int32)
        off = lambda *shape: jnp.zeros((B, *shape), bool)
        return State(
            canvas=Canvas.empty(request),
            draft=jnp.zeros((B, n, k), jnp.int32),
            origin=jnp.full((B, n, k), DRAFTED, jnp.int32),
            tagged=off(n, k),
            first_accepted=off(n),
            open_slots=self._open(request, zero),
            chosen=off(n),
            pending=jnp.full((B, n), -1, jnp.int32),
            rank=jnp.full((B, G), vis.NONE, jnp.int32),
            block=zero,
            phase=jnp.full(B, PLAN, jnp.int32),
            eos_seen=off(),
            done=request.max_new_tokens <= 0,
            cache=cache,
            counts=counts,
        )

    def _open(self, request: Request, block: Array) -> Array:
        """Slots of a block that begin before the row's end."""
        start = block[:, None] * self.block_length + jnp.arange(self._slots) * self.slot_size
        return start < request.max_new_tokens[:, None]

    def _window_index(self, block: Array) -> Array:
        """(B, n, k) generated-token indices of a block."""
        within = jnp.arange(self.block_length, dtype=jnp.int32).reshape(self._slots, self.slot_size)
        return block[:, None, None] * self.block_length + within

    # ---- the forward -------------------------------------------------------------------------------------

    def _queries(self, request: Request, state: State) -> Queries:
        s, B, n, k = state, request.batch, self._slots, self.slot_size
        phase = s.phase[:, None, None]
        index = self._window_index(s.block)
        whole = jnp.broadcast_to(s.chosen[..., None], (B, n, k))
        active = jnp.select(
            [phase == PLAN, (phase == INFILL_MANY) | (phase == RECOMPUTE), phase == INFILL_ONE],
            [jnp.broadcast_to(s.open_slots[..., None], (B, n, k)), whole & s.tagged, jnp.zeros_like(whole)],
            whole,
        ) & ~s.done[:, None, None]
        masked = (phase == PLAN) | ((phase == REDRAFT) & ~s.tagged)
        joint = (phase == PLAN) | (phase == JUDGE) | (phase == RECOMPUTE)
        slot = index // k
        group = jnp.where(joint, request.capacity, slot)  # a group number no slot has
        following = jnp.concatenate([s.draft[..., 1:], s.draft[..., :1]], axis=-1)

        newest = jnp.maximum(jnp.sum(s.tagged, axis=-1) - 1, 0)
        infill = (s.phase == INFILL_ONE)[:, None]
        tail_index = jnp.where(infill, index[..., 0] + newest, jnp.maximum(s.pending, 0))
        tail_tokens = jnp.where(
            infill,
            jnp.take_along_axis(s.draft, newest[..., None], axis=-1)[..., 0],
            jnp.take_along_axis(s.canvas.tokens, jnp.maximum(s.pending, 0), axis=1),
        )
        tail_active = jnp.where(infill, s.chosen, s.pending >= 0) & ~s.done[:, None]
        join = lambda window, tail: jnp.concatenate([window.reshape(B, n * k), tail], axis=1)
        return Queries(
            tokens=join(jnp.where(masked, request.mask_id, s.draft), tail_tokens),
            index=join(index, tail_index),
            active=join(active, tail_active),
            group=join(group, tail_index // k),
            limit=join(jnp.full_like(index, FRESH), jnp.full_like(tail_index, COMMITTED)),
            following=join(following, jnp.zeros_like(tail_index)),
        )

    def _visibility(self, request: Request, state: State, queries: Queries, take: slice) -> vis.Visibility:
        """Committed keys by rank; drafts by group: jointly, or slot by slot while infilling."""
        B, G, W, k = request.batch, request.capacity, self.block_length, self.slot_size
        seen = queries.active[:, :W].reshape(B, self._slots, k)
        infilling = ((state.phase == INFILL_MANY) | (state.phase == INFILL_ONE))[:, None, None]
        seen = seen | (infilling & state.chosen[..., None] & state.tagged)
        window = jnp.where(seen.reshape(B, W), queries.group[:, :W], vis.NONE)
        entry = jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32), (B, G))
        here = jnp.where(entry // W == state.block[:, None],
                         jnp.take_along_axis(window, entry % W, axis=1), vis.NONE)
        group = jnp.where((here < 0) & (state.rank == FRESH), entry // k, here)
        none = jnp.full((B, request.prompt_capacity), vis.NONE, jnp.int32)
        cut = lambda x: jnp.where(queries.active, x, vis.NONE)[:, take]
        return vis.Visibility(
            floor_q=jnp.zeros_like(queries.index[:, take]),
            limit_q=cut(queries.limit),
            group_q=cut(queries.group),
            order_q=cut(queries.index),
            rank_k=jnp.concatenate([request.prompt_rank(), state.rank], axis=1),
            group_k=jnp.concatenate([none, group], axis=1),
            order_k=jnp.concatenate([none, entry], axis=1),
        )

    def _forward(self, score, request, state, queries, take):
        """Returns, per query: a token, its probability, the probability of `following`; and the cache."""
        P, S = request.prompt_capacity, request.prompt_capacity + request.capacity
        index, active = queries.index[:, take], queries.active[:, take]
        hidden, cache = score.hidden(
            queries.tokens[:, take],
            Pass(request.prompt_length[:, None] + index, self._visibility(request, state, queries, take),
                 jnp.where(active, P + index, S)),
            state.cache,
        )
        logits = score.head(hidden)
        if not self.reference_compat:  # a mask is no answer
            logits = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)
        keys = sampling.draw_keys(request.keys, state.counts.after_prefill(), index)
        token = sampling.sample(logits, keys, self.temperature)
        if self.reference_compat:  # the released code redrafts greedily at any temperature
            token = jnp.where((state.phase == REDRAFT)[:, None], sampling.likeliest(logits), token)
        total = jax.nn.logsumexp(logits, axis=-1)
        probability = lambda ids: jnp.exp(jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - total)
        return token, probability(token), probability(queries.following[:, take]), cache

    def _run(self, score: Scorer, request: Request, state: State):
        """Runs the window and the tail, or the tail alone when no row needs the window."""
        W, n = self.block_length, self._slots
        queries = self._queries(request, state)

        def everything():
            return self._forward(score, request, state, queries, slice(None))

        def tail():
            *read, cache = self._forward(score, request, state, queries, slice(W, W + n))
            return *(jnp.pad(x, ((0, 0), (W, 0))) for x in read), cache

        if self._redrafts:  # infills by window only
            *read, cache = everything()
        else:
            *read, cache = jax.lax.cond(jnp.any(queries.active[:, :W]), everything, tail)
        return queries, read, cache

    # ---- the decisions -----------------------------------------------------------------------------------

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `state.Decoder.step`."""
        B, n, k, W = request.batch, self._slots, self.slot_size, self.block_length
        s = state
        queries, (token, confidence, following), cache = self._run(score, request, s)
        window = lambda x: x[:, :W].reshape(B, n, k)
        token_w, tail_token = window(token), token[:, W:]
        # a token inside a slot is judged by the logits of the token before it
        judged = jnp.roll(window(following), 1, axis=-1) > self.token_threshold
        live = ~s.done
        at = lambda *phases: live & jnp.isin(s.phase, jnp.array(phases))
        wide = lambda row: row[:, None, None]
        kind = jnp.array(KIND)[s.phase]
        counts = s.counts.add(kind, jnp.sum(queries.active, axis=1), live)

        # PLAN: draft, score, choose
        plan = at(PLAN)
        score_of = rules.certainty(window(confidence), self.certainty)
        if self.confidence_aware:
            chosen = rules.choose_confident(score_of, s.open_slots, self.slot_threshold)
        else:
            chosen = rules.choose_top(score_of, s.open_slots, self.slots_per_round)
        chosen = jnp.where(plan[:, None], chosen, s.chosen)
        draft = jnp.where(wide(plan) & s.open_slots[..., None], token_w, s.draft)
        origin = jnp.where(wide(plan), DRAFTED, s.origin)
        first_only = jnp.zeros((B, n, k), bool).at[..., 0].set(True) & chosen[..., None]
        tagged = jnp.where(wide(plan), first_only, s.tagged)
        first_ok = window(confidence)[..., 0] > self.token_threshold
        first_ok = jnp.where(plan[:, None], first_ok | self.reference_compat, s.first_accepted)
        rank = jnp.where(plan[:, None] & (s.rank == FRESH), COMMITTED, s.rank)
        pending = jnp.where(plan[:, None], -1, s.pending)

        # JUDGE: the accepted prefix of the joint draft
        judge = at(JUDGE)
        is_eos = draft == request.eos_id
        run = rules.accepted_run(judged.at[..., 0].set(s.first_accepted), chosen)
        full = jnp.all(run, axis=-1)
        eos_in_run = jnp.any(run & is_eos, axis=(1, 2))
        prefix = judge & (eos_in_run | jnp.any(full, axis=1))
        prefix_tokens = run & jnp.where(wide(eos_in_run), rules.through_first(run & is_eos), full[..., None])
        refine = judge & ~prefix
        runs = rules.slot_runs(judged, chosen)
        if not self._redrafts:  # Eq. 7: all slots are cut to their common length
            runs &= jnp.arange(k) < wide(rules.common_length(runs, chosen))
        tagged = jnp.where(wide(refine), runs, tagged)

        # INFILL: one more token in every chosen slot that is not complete
        complete = lambda tags: jnp.all(tags, axis=-1) | jnp.any(tags & is_eos, axis=-1)
        length = jnp.sum(tagged, axis=-1)
        ahead = jnp.take_along_axis(token_w, jnp.maximum(length - 1, 0)[..., None], axis=-1)[..., 0]
        new = jnp.where(at(INFILL_MANY)[:, None], ahead, tail_token)
        infill = at(INFILL_MANY, INFILL_ONE)
        grow = (infill[:, None] & chosen & ~complete(tagged))[..., None] & (jnp.arange(k) == length[..., None])
        draft = jnp.where(grow, new[..., None], draft)
        origin = jnp.where(grow, AUTOREGRESSIVE, origin)
        tagged = tagged | grow

        # REDRAFT and REJUDGE: the released code's completion
        redraft, rejudge = at(REDRAFT), at(REJUDGE)
        draft = jnp.where(wide(redraft) & chosen[..., None] & ~tagged, token_w, draft)
        forced = jnp.roll(tagged, 1, axis=-1).at[..., 0].set(True)
        tagged = jnp.where(wide(rejudge), rules.slot_runs(judged | forced, chosen), tagged)

        # an EOS ends its slot and drops the chosen slots behind it
        is_eos = draft == request.eos_id
        unjudged = plan & (not self.confidence_aware)
        settling = refine | infill | rejudge | unjudged
        has_eos = jnp.any(tagged & is_eos, axis=-1) & chosen
        survivors = rules.drop_after_eos(chosen, has_eos)
        chosen_then, chosen = chosen, jnp.where(settling[:, None], survivors, chosen)
        tagged = tagged & chosen[..., None]
        finished = settling & jnp.all(complete(tagged) | ~chosen, axis=1)

        # commit
        recomputed = at(RECOMPUTE)
        if self.kv == "recompute":
            to_recompute, refined = finished, recomputed
        else:
            to_recompute, refined = jnp.zeros_like(finished), finished
        refined_tokens = tagged & rules.through_first(tagged & is_eos)
        tokens = jnp.where(wide(prefix), prefix_tokens, refined_tokens) & wide(prefix | refined)
        commit = prefix | refined
        canvas = s.canvas.commit(
            queries.index[:, :W], tokens.reshape(B, W), draft.reshape(B, W), origin.reshape(B, W),
            counts.after_prefill())
        # the last token of an infilled slot was predicted but never fed: its key and value are still to come
        wait = refined & (infill | unjudged)
        count = jnp.sum(tokens, axis=-1)
        last = self._window_index(s.block)[..., 0] + count - 1
        pending = jnp.where(wait[:, None] & (count > 0), last, pending)
        rank = _scatter(rank, queries.index[:, :W], tokens.reshape(B, W), jnp.where(wait, FRESH, COMMITTED))

        # close slots, open the next block, or end
        eos_slot = jnp.any(tokens & is_eos, axis=-1)
        by_row = refined if self.reference_compat else jnp.zeros_like(refined)
        closed = jnp.any(tokens, axis=-1) | rules.closed_by_eos(eos_slot, s.open_slots, chosen_then, by_row)
        if self.reference_compat:  # slots dropped behind an EOS are gone too
            closed = closed | (refined[:, None] & chosen_then)
        open_slots = s.open_slots & ~(closed & commit[:, None])
        eos_seen = s.eos_seen | (commit & jnp.any(eos_slot, axis=1))
        exhausted = commit & ~jnp.any(open_slots, axis=1)
        more = self._open(request, s.block + 1)
        done = s.done | (exhausted & (eos_seen | ~jnp.any(more, axis=1)))
        advance = exhausted & ~done
        open_slots = jnp.where(advance[:, None], more, open_slots)

        many = jnp.max(jnp.sum(tagged, axis=-1), axis=1) > 1
        start_infill = jnp.where(many, INFILL_MANY, INFILL_ONE)
        phase = jnp.select(
            [commit, to_recompute, plan, refine | rejudge, redraft, infill],
            [
                jnp.full_like(s.phase, PLAN),
                jnp.full_like(s.phase, RECOMPUTE),
                jnp.full_like(s.phase, JUDGE if self.confidence_aware else INFILL_ONE),
                jnp.full_like(s.phase, REDRAFT) if self._redrafts else start_infill,
                jnp.full_like(s.phase, REJUDGE),
                jnp.full_like(s.phase, INFILL_ONE),
            ],
            s.phase,
        )
        return State(
            canvas=canvas,
            draft=draft,
            origin=origin,
            tagged=tagged & ~wide(commit),
            first_accepted=first_ok,
            open_slots=open_slots,
            chosen=chosen & ~commit[:, None],
            pending=pending,
            rank=rank,
            block=s.block + advance,
            phase=phase,
            eos_seen=eos_seen,
            done=done,
            cache=cache,
            counts=counts,
        )

    def finish(self, request: Request, state: State) -> Canvas:
        """See `state.Decoder.finish`."""
        del request
        return state.canvas

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `state.Decoder.provisional`: drafts of chosen slots, and what has been infilled so far."""
        B, G = state.rank.shape
        index = self._window_index(state.block).reshape(B, -1)
        shown = (state.chosen[..., None] | state.tagged).reshape(B, -1) & ~state.done[:, None]
        tokens = _scatter(state.canvas.tokens, index, shown, state.draft.reshape(B, -1))
        return tokens, _scatter(jnp.zeros((B, G), bool), index, shown, jnp.ones(B, bool))


def _scatter(into: Array, index: Array, mask: Array, value: Array) -> Array:
    """Writes `value` ((B,) or (B, W)) at (B, W) indices where the mask holds."""
    row = jnp.arange(index.shape[0])[:, None]
    value = value if value.ndim == 2 else value[:, None]
    return into.at[row, jnp.where(mask, index, into.shape[1])].set(
        jnp.broadcast_to(value, index.shape), mode="drop")
