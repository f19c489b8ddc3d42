"""AR-Trust: the noisy stream of a FLARE checkpoint drafts, its clean stream keeps what it would have said.

One forward a round does both. Its window is the newest token (the anchor) and the drafts held, which are token-causal
and verify, then masks, which see one another and all before them and draft for the round after:

    number   n-1    n ... n+K-1    n+K ...
    token  anchor   d_1 ... d_K    MASK x (N-1)

A row at position P predicts P + 1, so the masks' rows draft what follows the token that this round ends with.

Letters: B batch, N horizon, K drafts held (0 to N-1), W = 2N - 1, D width, G generation capacity.
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
from dlm_jax.decode.flare import policies, tiles
from dlm_jax.decode.flare.policies import DraftPolicy, ExactTruncated
from dlm_jax.decode.flare.tiles import Rows
from dlm_jax.decode.ledger import DRAFT, VERIFY, Counts
from dlm_jax.decode.parts import check_kinds, static
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.queries import Keys, Queries, ask
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Scorer, Window

_NAMES = {"on_reject": ("restart", "hold"), "cold_start": ("compact", "wide_first", "wide_last")}
_COIN, _CORRECTION, _DRAFT = range(3)  # draws that may stand at one place of a forward


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: committed tokens.
      last: (B,) int32 newest token, the next anchor; the cache does not hold it yet.
      length: (B,) int32 committed tokens.
      drafts: (B, N-1) int32 for the next round.
      held: (B,) int32 K, how many of them there are.
      noisy: (B, N-1, D) hidden states they came from; (B, 0, D) where the policy needs none.
      accepted: (B,) int32 drafts that the latest round kept.
      cache: of what is committed, the newest token left out.
    """

    canvas: Canvas
    last: Array
    length: Array
    drafts: Array
    held: Array
    noisy: Array
    accepted: Array
    cache: Cache
    counts: Counts
    done: Array


@decoder
class ARTrust(Decoder):
    """Drafts of the noisy stream, verified left to right by the clean stream of the same forward.

    Greedy output equals `Autoregressive()` on the same model; how sampled output is distributed is the policy's matter.
    The model must have been trained to denoise (FLARE) for drafts to be kept; any causal model with a mask token gives
    its own answers.

    Attributes:
      horizon: N, at most N tokens a forward: N - 1 drafts and the clean stream's own.
      policy: how drafts are drawn and judged where the temperature is above 0.
      on_reject: "restart" drops the drafts of a round that rejected one: their rows stood behind tokens that were
        never said; the next round is a cold start. "hold" keeps them (Algorithm 11, line 19), out of place for good.
      cold_start: the window of a round without drafts. "compact": N - 1 masks. "wide_last": 2(N - 1) masks, of which
        the last draft (Algorithm 11, line 1), N - 1 places off. "wide_first": as many, of which the first draft.
      sampler: of clean and noisy rows.
      tile: tokens of the vocabulary that are read at once, see `flare.tiles`.

    Source: FLARE, Algorithms 2 and 11, B.2.
    """

    needs = Needs(bidirectional=False, mask=True, recurrent=True)
    lossless = True
    horizon: int = static(4, least=2)
    policy: DraftPolicy = ExactTruncated()
    on_reject: str = static("restart")
    cold_start: str = static("compact")
    sampler: Sampler = Sampler()
    tile: int = static(tiles.TILE, least=1)

    def __post_init__(self):
        super().__post_init__()
        check_kinds(self, {"policy": (DraftPolicy, ExactTruncated())})
        for name, accepted in _NAMES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")

    def capacity(self, max_new_tokens: int) -> int:
        """See `Decoder.capacity`: the last window reaches beyond the answer."""
        return max_new_tokens + 2 * self.horizon - 3

    @property
    def span(self) -> int:
        """See `Decoder.span`."""
        return self.horizon

    def replay(self, score: Scorer, request: Request, start: Array, tokens: Array, size: Array, cache: Cache
               ) -> tuple[Array, Cache]:
        """See `Decoder.replay`: the window with its masks."""
        offset, N = jnp.arange(2 * self.horizon - 1, dtype=jnp.int32), self.horizon
        window = jnp.where(offset < size[:, None], jnp.pad(tokens, ((0, 0), (0, N - 1))), request.mask_id)
        clean = jnp.broadcast_to(offset[:N], tokens.shape)
        return forward(score, request, start, window, size, jnp.where(size > 0, N - 1, 0), cache, clean)

    def doubt(self, config: Any) -> str | None:
        """See `Decoder.doubt`."""
        if config.noisy_shift != 1:
            why = ("the model was trained to denoise by a mask's own output (noisy_shift = 0), and drafts are read "
                   "from the one before" if config.noisy_shift == 0 else "the model's config names no noisy_shift, so "
                   "nothing says that it was trained to denoise (objectives.Flare)")
            return (f"{why}: its drafts will hardly ever be kept: answers stay the clean stream's own, at more work "
                    "than Autoregressive's")
        if config.block_size is not None and self.horizon > config.block_size:
            return (f"horizon = {self.horizon} drafts from {self.horizon - 1} masks in a row, of which blocks of "
                    f"{config.block_size}, which the model was trained on, have fewer: the last drafts will hardly "
                    "ever be kept")
        return None

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; the prefill yields the first token, as in `Autoregressive`."""
        sampler = policies.of_sampler(self.policy, self.sampler)
        draw = lambda hidden, keys: tiles.draw(Rows(score, hidden, self.tile), sampler, keys)
        first = first_token(draw, score, request, window=self.horizon)
        zero, N = jnp.zeros_like(first.length), self.horizon
        width = jax.eval_shape(lambda: forward(score, request, zero, jnp.zeros((request.batch, 1), jnp.int32), zero,
                                               zero, first.cache)[0])
        noisy = jnp.zeros((request.batch, N - 1 if self.policy.holds else 0, width.shape[-1]), width.dtype)
        return State(first.canvas, first.last, first.length, jnp.zeros((request.batch, N - 1), jnp.int32), zero, noisy,
                     zero, first.cache, first.counts, first.done)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one forward."""
        N, K, active = self.horizon, state.held, ~state.done
        offset, cold = jnp.arange(2 * N - 1, dtype=jnp.int32), state.held == 0
        wide, late = (cold & (self.cold_start in names) for names in (("wide_first", "wide_last"), ("wide_last",)))
        advance = jnp.where(active, 1 + K, 0)
        read = jnp.where(active, jnp.where(wide, 2 * N - 2, N - 1), 0)
        shown = jnp.concatenate([state.last[:, None], state.drafts, jnp.zeros_like(state.drafts)], axis=1)
        tokens = jnp.where(offset <= K[:, None], shown, request.mask_id)
        first = K + 1 + jnp.where(late, N - 1, 0)  # row of the first draft
        wanted = jnp.concatenate([jnp.broadcast_to(offset[:N], (request.batch, N)),
                                  first[:, None] + offset[: N - 1]], axis=1)

        counts = state.counts.add(jnp.where(cold, DRAFT, VERIFY), advance + read, active)
        hidden, cache = forward(score, request, state.length - 1, tokens, advance, read, state.cache, wanted)
        keys = sampling.draw_keys(  # of the number that each output predicts
            request.keys, counts.after_prefill(), state.length[:, None] + wanted)
        accepted, own, drafts = self._judged(score, hidden, state, keys)

        offset = offset[:N]
        place, mine = state.length[:, None] + offset, offset == accepted[:, None]
        tokens = jnp.where(mine, own[:, None], jnp.pad(state.drafts, ((0, 0), (0, 1))))
        keep = (offset <= accepted[:, None]) & (place < request.max_new_tokens[:, None]) & active[:, None]
        keep = speculative.through_eos(tokens, keep, request.eos_id)
        canvas = state.canvas.commit(
            place, keep, tokens, jnp.where(mine, AUTOREGRESSIVE, DRAFTED), counts.after_prefill())
        gained = jnp.sum(keep, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(tokens, jnp.maximum(gained - 1, 0)[:, None], axis=1)[:, 0]
        last, length = jnp.where(active, last, state.last), state.length + gained
        holds = (accepted == K) | (self.on_reject == "hold")
        done = state.done | (last == request.eos_id) | (length >= request.max_new_tokens)
        return State(
            canvas, last, length, jnp.where(active[:, None], drafts, state.drafts),
            jnp.where(active, jnp.where(holds, N - 1, 0), K),
            jnp.where(active[:, None, None], hidden[:, N:], state.noisy) if self.policy.holds else state.noisy,
            jnp.where(active, accepted, state.accepted), cache.commit(gained), counts, done)

    def _judged(self, score: Scorer, hidden: Array, state: State, keys: Array) -> tuple[Array, Array, Array]:
        """Returns (B,) drafts kept in a row, the (B,) token behind them, and (B, N-1) drafts for the next round.

        Args:
          score: the model.
          hidden: (B, 2N-1, D) of N clean and N-1 noisy rows.
          state: before the round.
          keys: (B, 2N-1) PRNG keys.
        """
        N, B = self.horizon, len(state.held)
        count = lambda kept: speculative.prefix_length(kept & (jnp.arange(N - 1) < state.held[:, None]))
        pick = lambda x, at: jnp.take_along_axis(x, at.reshape(B, 1, *(1,) * (x.ndim - 2)), axis=1)

        def greedy():
            found = policies.likeliest(Rows(score, hidden, self.tile))
            accepted = count(state.drafts == found[:, : N - 1])
            return accepted, pick(found, accepted)[:, 0], found[:, N:]

        def sampled():
            policy, ends = self.policy, (N - 1, 2 * N - 1)  # of the rows that judge drafts, and of the noisy ones
            rows = Rows(score, jnp.concatenate([hidden, state.noisy], axis=1), self.tile)  # those of the drafts behind
            judged = jnp.concatenate(
                [state.drafts, jnp.zeros((B, N), jnp.int32)] + [state.drafts] * policy.holds, axis=1)
            law, ((likeliest, _), logits) = tiles.law(
                rows, policies.of_sampler(policy, self.sampler), tiles.best(rows.shape), tiles.of(judged))
            clean, noisy = law.cut(0, ends[0]), law.cut(ends[1], ends[1] + N - 1) if policy.holds else None
            p = clean.log(logits[:, : ends[0], None])[..., 0]
            q = noisy.log(logits[:, ends[1] :, None])[..., 0] if policy.holds else jnp.zeros_like(p)
            coins = policies.coins(policies.apart(keys[:, : ends[0]], _COIN))
            accepted = count(coins < policies.chance(policy, p, q))

            proposed = jnp.minimum(accepted, N - 2)
            pair = [pick(hidden, accepted)] + [pick(state.noisy, proposed)] * policy.holds
            own = policies.correct(
                policy, Rows(score, jnp.concatenate(pair, axis=1), self.tile), law.take(accepted[:, None]),
                noisy.take(proposed[:, None]) if policy.holds else None, pick(state.drafts, proposed),
                (accepted < state.held)[:, None], policies.apart(pick(keys, accepted), _CORRECTION))
            if not policy.draws:
                return accepted, own, likeliest[:, N : ends[1]]
            ahead = tiles.drawn(law.cut(N, ends[1]), policies.apart(keys[:, N:], _DRAFT))
            return accepted, own, Rows(score, hidden[:, N:], self.tile).read(ahead)[0][0]

        return jax.lax.cond(self.sampler.warm, sampled, greedy)

    def provisional(self, state: State) -> tuple[Array, Array]:
        """See `Decoder.provisional`: the drafts that the next round will judge."""
        empty, offset = jnp.zeros_like(state.canvas.tokens), jnp.arange(self.horizon - 1, dtype=jnp.int32)
        number, held = state.length[:, None] + offset, (offset < state.held[:, None]) & ~state.done[:, None]
        return scatter(empty, number, held, state.drafts), scatter(empty > 0, number, held, True)


def forward(score: Scorer, request: Request, start: Array, tokens: Array, advance: Array, read: Array, cache: Cache,
            wanted: Array | None = None) -> tuple[Array, Cache]:
    """Runs a window of clean tokens, masks and padding behind the committed tokens; `Cache.commit` must follow.

    Args:
      score: the model.
      request: the batch.
      start: (B,) int32 number of the window's first token.
      tokens: (B, W) int32.
      advance: (B,) int32 clean tokens, token-causal.
      read: (B,) int32 masks after them, which see the whole window.
      cache: capacity S; entries before the window are the committed tokens'.
      wanted: (B, C) int32 tokens of the window whose outputs are computed; None for all.

    Returns:
      (B, C, D) hidden states and the cache.
    """
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    number, end = start[:, None] + offset, (start + advance)[:, None]
    noisy = offset >= advance[:, None]
    entries, row = request.numbers(), jnp.zeros_like(request.numbers())
    rank = jnp.where(entries < end, request.prompt_length[:, None] + entries, vis.NONE)
    group = jnp.where((entries >= end) & (entries < end + read[:, None]), row, vis.NONE)
    position = request.position(number)
    queries = Queries(tokens, number, offset < (advance + read)[:, None],
                      jnp.where(noisy, request.position(end) - 1, position), jnp.where(noisy, 0, vis.NONE))
    return ask(score, request, queries, cache, wanted, keys=Keys(rank, group),
               recurrence=Window(advance, read, tentative=True))
