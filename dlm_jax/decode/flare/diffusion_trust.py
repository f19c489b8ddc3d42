"""Diffusion-Trust: the noisy stream of a FLARE checkpoint fills block after block, its clean stream commits them.

A row is a small state machine of one forward a step: while its block has open places, a denoise pass, bidirectional
inside the block, that reads what layers keep and writes nothing that lasts; then a token-causal pass that does, and
whose last output gives the next block's first token. Rows of a batch may do either side by side.

Letters: B batch, K block size, D width, G generation capacity.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.canvas import AUTOREGRESSIVE, DRAFTED, Canvas
from dlm_jax.decode.flare import tiles
from dlm_jax.decode.flare.schedules import Constant, Thresholds
from dlm_jax.decode.flare.tiles import Rows
from dlm_jax.decode.ledger import COMMIT, DENOISE, Counts
from dlm_jax.decode.parts import check_kinds, static, whole
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.queries import Queries, ask, prefill
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Scorer, Window

_NAMES = {"first": ("seed", "judged"), "score": ("model", "sampler"), "shift": (None, 0, 1)}
_SIZE = 4  # tokens of a block, the paper's (Sec. 5)


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: tokens as they were chosen.
      block: (B, K) int32 the present block, masks where open.
      open: (B, K) bool places without a token.
      start: (B,) int32 number of the block's first token.
      taken: (B,) int32 denoise passes over it.
      behind: (B, 1, D) hidden state of the last committed token.
      cache: of what is committed.
    """

    canvas: Canvas
    block: Array
    open: Array
    start: Array
    taken: Array
    behind: Array
    cache: Cache
    counts: Counts
    done: Array


@decoder
class DiffusionTrust(Decoder):
    """Parallel denoising of blocks by the noisy stream, committed by a causal pass of the clean one.

    The model must have been trained to denoise (FLARE): what the noisy stream says is the answer.

    Attributes:
      block_size: B of the paper; None takes what the model was trained on, 4 where its config does not say.
      steps: S, denoise passes a block at most; the last one fills what is open. 0 takes the block size.
      thresholds: gamma_s, the probability from which on a token is kept at step s.
      first: "seed" draws a block's first token from the last clean row (Algorithm 12); "judged" masks it, too, and
        judges what predicts it at every step like the others (Algorithm 1).
      shift: which output predicts a masked token, 1 the one before it (a block's first is the last clean row's), 0 its
        own (Table 12, rows b to d); None takes what the model was trained on, 1 where its config does not say.
      score: whose probability of a drawn token counts, the "model"'s, or the "sampler"'s after temperature, top-k and
        top-p (Algorithm 1), which is 1 for a greedy one.
      sampler: of every token.
      tile: tokens of the vocabulary that are read at once, see `flare.tiles`.

    Source: FLARE, Algorithms 1 and 12, B.3.
    """

    needs = Needs(bidirectional=False, mask=True, recurrent=True)
    block_size: int | None = static(None, least=1)
    steps: int = whole(0)
    thresholds: Thresholds = Constant()
    first: str = static("seed")
    shift: int | None = static(None)
    score: str = static("model")
    sampler: Sampler = Sampler()
    tile: int = static(tiles.TILE, least=1)

    def __post_init__(self):
        super().__post_init__()
        check_kinds(self, {"thresholds": (Thresholds, Constant(0.9))})
        for name, accepted in _NAMES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")

    def size(self, model: Any) -> int:
        """Returns the block size for a model, given as its config or its scorer."""
        return self.block_size or model.block_size or _SIZE

    def shifted(self, model: Any) -> bool:
        """Returns whether the output before a masked token predicts it; the model is given as its config or scorer."""
        return 0 not in (self.shift, model.noisy_shift if self.shift is None else 1)

    def fitted(self, config: Any) -> "DiffusionTrust":
        """See `Decoder.fitted`."""
        return self.replace(block_size=self.size(config), shift=int(self.shifted(config)))

    def capacity(self, max_new_tokens: int) -> int:
        """See `Decoder.capacity`: whole blocks."""
        size = self.block_size or _SIZE
        return -(-max_new_tokens // size) * size

    def doubt(self, config: Any) -> str | None:
        """See `Decoder.doubt`."""
        if config.noisy_shift is None:
            return ("the model's config names no noisy_shift, so nothing says that it was trained to denoise "
                    "(objectives.Flare): its noisy stream will hardly make sense, and what it says is the answer: "
                    "decode with Autoregressive or ARTrust")
        return None if self.shift in (None, config.noisy_shift) else (
            f"shift = {self.shift}, and the model was trained on {config.noisy_shift}: its outputs will be taken for "
            "neighbours' and hardly make sense; leave shift out")

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; the prefill yields the first block's seed, where it has one."""
        behind, cache, counts = prefill(score, request)
        K, zero = self.size(score), jnp.zeros(request.batch, jnp.int32)
        state = State(
            Canvas.empty(request), jnp.full((request.batch, K), request.mask_id, jnp.int32),
            jnp.ones((request.batch, K), bool), zero, zero, behind, cache, counts, request.max_new_tokens <= 0)
        if self.first == "judged":
            return state
        token, _ = self._drawn(score, behind, sampling.draw_keys(request.keys, zero, zero[:, None]))
        return self._closed(request, self._placed(
            request, state, jnp.arange(K) == 0, jnp.broadcast_to(token, (request.batch, K)), AUTOREGRESSIVE))

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one forward, a denoise or a commit pass, whichever the row is at."""
        K, active = self.size(score), ~state.done
        offset, seeded = jnp.arange(K, dtype=jnp.int32), self.first == "seed"
        denoise = jnp.any(state.open, axis=1) & active
        commit = active & ~denoise
        counts = state.counts.add(jnp.where(denoise, DENOISE, COMMIT), jnp.full_like(state.start, K), active)
        # a denoise pass is asked for what predicts the masked offsets, a commit pass for its last row
        borrows = self.shifted(score)
        first = int(seeded and not borrows and K > 1)
        wanted = jnp.where(denoise[:, None], offset[first : max(K - borrows, 1)], K - 1)
        hidden, cache = self._forward(score, request, state, denoise, commit, wanted)

        # (B, C): what each drawn token would be, of this block's numbers or, after a commit, of the next one's first
        rows = hidden if seeded or not borrows else jnp.concatenate([state.behind, hidden], axis=1)[:, :K]
        places = jnp.where(commit[:, None], K, jnp.arange(rows.shape[1]) + seeded)
        keys = sampling.draw_keys(request.keys, counts.after_prefill(), state.start[:, None] + places)
        tokens, probability = self._drawn(score, rows, keys)
        last = state.taken + 1 >= jnp.where(jnp.asarray(self.steps) > 0, self.steps, K)
        sure = (probability >= jnp.reshape(self.thresholds.at(state.taken), (-1, 1))) | last[:, None]
        if seeded:
            seed, tokens, sure = tokens[:, :1], *(jnp.pad(x, ((0, 0), (1, 0)))[:, :K] for x in (tokens, sure))
        state = state.replace(counts=counts, cache=cache, taken=state.taken + denoise,
                              behind=jnp.where(commit[:, None, None], hidden[:, :1], state.behind))
        state = self._placed(request, state, state.open & sure & denoise[:, None], tokens, DRAFTED)
        state = self._next_block(request, state, commit)
        if seeded:
            state = self._placed(request, state, commit[:, None] & (offset == 0), jnp.broadcast_to(
                seed, tokens.shape), AUTOREGRESSIVE)
        return self._closed(request, state)

    def _forward(self, score: Scorer, request: Request, state: State, denoise: Array, commit: Array, wanted: Array
                 ) -> tuple[Array, Cache]:
        """Runs the block, with keys of its own in a denoise pass, as a continuation in a commit pass."""
        offset = jnp.arange(state.block.shape[1], dtype=jnp.int32)
        number = state.start[:, None] + offset
        position, noisy = request.position(number), denoise[:, None]
        queries = Queries(
            state.block, number, jnp.broadcast_to((denoise | commit)[:, None], number.shape),
            jnp.where(noisy, position[:, :1] - 1, position),
            jnp.broadcast_to(jnp.where(noisy, 0, vis.NONE), number.shape))
        return ask(score, request, queries, state.cache, wanted,
                   recurrence=Window(jnp.where(commit, len(offset), 0), jnp.where(denoise, len(offset), 0)))

    def _drawn(self, score: Scorer, hidden: Array, keys: Array) -> tuple[Array, Array]:
        """Returns (B, C) int32 tokens drawn from outputs, and their (B, C) float32 probabilities."""
        rows = Rows(score, hidden, self.tile)

        def greedy():
            (token, logit), total = rows.read(tiles.best(rows.shape), tiles.log_sum(rows.shape))
            return token, jnp.ones_like(logit) if self.score == "sampler" else jnp.exp(logit - total)

        def sampled():
            law, (total,) = tiles.law(rows, self.sampler, tiles.log_sum(rows.shape))
            (token, _), = rows.read(tiles.drawn(law, keys))
            logit, = rows.read(tiles.of(token))
            chance = law.log(logit[..., None])[..., 0] if self.score == "sampler" else logit - total
            return token, jnp.exp(chance)

        return jax.lax.cond(self.sampler.warm, sampled, greedy)

    def _placed(self, request: Request, state: State, mask: Array, tokens: Array, origin: int) -> State:
        """Returns the state with (B, K) tokens put where the mask holds, and on the canvas as far as it is asked."""
        mask = jnp.broadcast_to(mask, tokens.shape) & ~state.done[:, None]
        number = state.start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        canvas = state.canvas.commit(number, mask & (number < request.max_new_tokens[:, None]), tokens, origin,
                                     state.counts.after_prefill())
        return state.replace(canvas=canvas, block=jnp.where(mask, tokens, state.block), open=state.open & ~mask)

    def _next_block(self, request: Request, state: State, commit: Array) -> State:
        """Returns the state with a block of masks behind the one that was committed."""
        fresh = commit[:, None]
        return state.replace(
            block=jnp.where(fresh, request.mask_id, state.block), open=state.open | fresh,
            start=state.start + jnp.where(commit, state.block.shape[1], 0), taken=jnp.where(commit, 0, state.taken))

    def _closed(self, request: Request, state: State) -> State:
        """Returns the state with the rows done where, up to an EOS or their limit, nothing is open."""
        number = state.start[:, None] + jnp.arange(state.block.shape[1], dtype=jnp.int32)
        settled = (jnp.cumsum(state.open, axis=1) == 0) & (number < request.max_new_tokens[:, None])
        ends = settled & ((state.block == request.eos_id) | (number == request.max_new_tokens[:, None] - 1))
        return state.replace(done=state.done | jnp.any(ends, axis=1))
