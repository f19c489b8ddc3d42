"""ReFusion decoding: plan slots by diffusion, infill them autoregressively, in any order, every KV reused.

Each row is a small state machine whose every transition costs one forward, so rows of a batch may plan, verify
and infill side by side. Slots that are refined together are told apart by the visibility rule's groups inside
one window (no copies of the cache), and a committed token never moves: it only gains rank.

Letters: B batch, n slots of a block, k slot size, G generation capacity.

Source: "ReFusion", Sec. 4.2, A.2, B.1, C.2, C.5, Table 4.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dlm_jax.decode.canvas import DRAFTED, Canvas, scatter
from dlm_jax.decode.parts import number, static, whole
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.queries import prefill
from dlm_jax.decode.refusion import forward, phases, rules
from dlm_jax.decode.refusion.state import (
    INFILL_MANY, INFILL_ONE, JUDGE, PLAN, RECOMPUTE, REJUDGE, State, open_slots, window)
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Scorer

_KINDS = {"certainty": ("first", "mean"), "kv": ("reuse", "recompute"), "completion": ("autoregressive", "redraft")}


@decoder
class ReFusion(Decoder):
    """Plan-and-infill decoding over slots.

    Attributes:
      slot_size: k, tokens of a slot (Figure 4).
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
      sampler: of drafts and infilled tokens; certainties are the model's own, whatever it is.
      reference_compat: do as the released code does where it leaves the paper: completion by redraft, every
        slot's first token accepted, the mask token not excluded, keys and values of slots refined together kept
        row-wise, and an EOS in refinement closing slots by row index, so that earlier slots may be lost and their
        positions stay empty.
    """

    needs = Needs(bidirectional=False, mask=True, masked_canvas=True)
    slot_size: int = static(16, least=2)
    block_length: int = static(32, least=2)
    slot_threshold: float = number(0.6, most=1.0)
    token_threshold: float | None = number(None, most=1.0)
    certainty: str = static("first")
    kv: str = static("reuse")
    completion: str = static("autoregressive")
    confidence_aware: bool = static(True)
    slots_per_round: int = whole(1, least=1)
    sampler: Sampler = Sampler()
    reference_compat: bool = static(False)

    def __post_init__(self):
        super().__post_init__()
        if self.block_length % self.slot_size:
            raise ValueError(
                f"block_length = {self.block_length} is not a multiple of slot_size = {self.slot_size}; "
                f"try {max(1, round(self.block_length / self.slot_size)) * self.slot_size}")
        for name, accepted in _KINDS.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        if self.reference_compat and self.kv == "recompute":
            raise ValueError("reference_compat keeps row-wise keys and values, kv = 'recompute' does not: drop one")
        if self.reference_compat and not self.confidence_aware:
            raise ValueError("reference_compat needs confidence_aware: the released code always verifies")

    @property
    def _redrafts(self) -> bool:
        return self.confidence_aware and (self.reference_compat or self.completion == "redraft")

    def capacity(self, max_new_tokens: int) -> int:
        """See `Decoder.capacity`: whole blocks."""
        return -(-max_new_tokens // self.block_length) * self.block_length

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`."""
        _, cache, counts = prefill(score, request)
        B, n, k = request.batch, self.block_length // self.slot_size, self.slot_size
        zero, no = jnp.zeros(B, jnp.int32), jnp.zeros((B, n), bool)
        return State(
            canvas=Canvas.empty(request), block=zero, phase=jnp.full(B, PLAN, jnp.int32),
            draft=jnp.zeros((B, n, k), jnp.int32), origin=jnp.full((B, n, k), DRAFTED, jnp.int32),
            tagged=jnp.zeros((B, n, k), bool), slot_open=open_slots(request, zero, n, k), slot_chosen=no,
            slot_first_accepted=no, slot_pending=jnp.full((B, n), -1, jnp.int32),
            canvas_rank=jnp.full((B, request.capacity), vis.NONE, jnp.int32), eos_seen=jnp.zeros(B, bool),
            done=request.max_new_tokens <= 0, cache=cache, counts=counts)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one forward, of which every row takes what its phase is about."""
        eos_id = request.eos_id
        read, state = forward.run(score, request, state, self.sampler, tails=not self._redrafts,
                                  compat=self.reference_compat)
        tau = self.slot_threshold if self.token_threshold is None else self.token_threshold
        accepted = read.of_draft > tau

        state = phases.plan(state, read, self._chosen(state, read.confidence),
                            (read.confidence[..., 0] > tau) | self.reference_compat)
        state, prefix = phases.judge(state, accepted, eos_id, common=not self._redrafts)
        if self._redrafts:
            state = phases.redraft(state, read, accepted)
        else:
            state = phases.infill(state, read, eos_id)

        slot_together = state.slot_chosen
        unjudged = () if self.confidence_aware else (PLAN,)
        refines = state.at(JUDGE, INFILL_MANY, INFILL_ONE, REJUDGE, *unjudged) & ~jnp.any(prefix, axis=(1, 2))
        state, complete = phases.settle(state, refines, eos_id)
        recompute = complete & (self.kv == "recompute")
        refined = state.at(RECOMPUTE) if self.kv == "recompute" else complete
        tokens = prefix | phases.refined(state, refined, eos_id)

        state = phases.commit(state, tokens)
        state = phases.close(request, state, tokens, slot_together, refined & self.reference_compat)
        return phases.advance(state, jnp.any(tokens, axis=(1, 2)), recompute, self.confidence_aware, self._redrafts)

    def _chosen(self, state: State, confidence: Array) -> Array:
        """Returns the (B, n) slots to go on with, given (B, n, k) probabilities of their drafts."""
        slot_score = rules.certainty(confidence, self.certainty)
        if self.confidence_aware:
            return rules.choose_confident(slot_score, state.slot_open, self.slot_threshold)
        return rules.choose_top(slot_score, state.slot_open, self.slots_per_round)

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `Decoder.provisional`: drafts of chosen slots, and what has been infilled so far."""
        shown = window(state.slot_chosen[..., None] | state.tagged) & ~state.done[:, None]
        window_number = state.window_number()
        return (scatter(state.canvas.tokens, window_number, shown, window(state.draft)),
                scatter(jnp.zeros(state.canvas_rank.shape, bool), window_number, shown, True))
