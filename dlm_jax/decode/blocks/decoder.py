"""Block diffusion for models of any conventions: blocks from left to right, each filled in parallel, then committed.

A row is a small state machine of one forward a step: while its block has masks, a denoise pass, whose keys and values
the next pass overwrites; then, where the model's conventions ask for one, a pass over the finished block that keeps
them, and whose last output may give the next block's first token. Rows of a batch may do either side by side.

Letters: B batch, K block size, G canvas length, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from dlm_jax.conventions import Conventions
from dlm_jax.decode import parts, sampling
from dlm_jax.decode.blocks.editing import Editing, Thinking
from dlm_jax.decode.blocks.reading import Grid, Part, run_block, run_prompts, run_row
from dlm_jax.decode.canvas import AUTOREGRESSIVE, DRAFTED, Canvas
from dlm_jax.decode.ledger import COMMIT, DENOISE, Counts
from dlm_jax.decode.masked import commit as rules
from dlm_jax.decode.masked import stops
from dlm_jax.decode.masked.commit import CommitRule, Threshold
from dlm_jax.decode.masked.confidence import Confidence, Probability
from dlm_jax.decode.masked.drafts import Clock, Drafts
from dlm_jax.decode.masked.stops import Settled, Stop
from dlm_jax.decode.parts import static, whole
from dlm_jax.decode.protocol import Decoder, Needs, decoder, refuse_masks
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache, Scorer

_EXAMPLES = {"commit": (CommitRule, Threshold()), "confidence": (Confidence, Probability()), "stop": (Stop, Settled()),
             "sampler": (Sampler, Sampler())}
CLOSING = ("never", "length", "always")


@struct.dataclass
class State:
    """Loop carry.

    Attributes:
      canvas: tokens as they were chosen, those of the last block beyond the answer included.
      start: (B,) int32 number of the block's first token.
      step: (B,) int32 denoise passes over the block.
      taken: (B,) int32 of these, passes over the full block (`Editing`).
      due: (B,) bool rows whose next pass commits the block.
      ending: (B,) bool rows that are done once it has.
      behind: (B, 1, D) hidden state of the last committed token; None where nothing is kept.
      cache: of what is committed, or None.
    """

    canvas: Canvas
    start: Array
    step: Array
    taken: Array
    due: Array
    ending: Array
    behind: Array | None
    cache: Cache | None
    counts: Counts
    done: Array


@decoder
class BlockDiffusion(Decoder):
    """Denoising of one block after the other, as the model was taught.

    Attributes:
      block_size: tokens of a block; None takes what the model was trained on.
      sub_block: of these, tokens that are open at once, from left to right; None opens all.
      commit: which drafts stay, see `masked.commit`; steps of a rule that plans them are those of the whole answer, but
        where it says otherwise.
      confidence: how sure a draft is.
      stop: what an EOS does; one of those that fill nothing.
      sampler: draws drafts and seeds.
      editing: `Editing(...)`, or None.
      thinking: `Thinking(...)`, or None.
      cut: whether the last block ends with the answer; else it is whole, and what lies behind the answer is dropped.
      inner: whether, between forwards over the whole block, the sub-block alone is run, its neighbours' keys as they
        were; the whole one is run where the sub-block's first token is a mask (Fast-dLLM v2's block cache).
      passes: denoise passes over a block at most, after which it is committed as it is, masks and all; 0 for no bound.
      closing: whether the last block is committed, too, though nothing follows: "never"; "length", where no EOS has
        ended the answer; or "always".
      conventions: in place of the model's own, `Conventions(...)`.
      literal_mask: whether prompts may hold the mask token.
    """

    needs = Needs(bidirectional=None, mask=True, masked_canvas=True)
    block_size: int | None = static(None, least=1)
    sub_block: int | None = static(None, least=1)
    commit: CommitRule = Threshold()
    confidence: Confidence = Probability()
    stop: Stop = Settled()
    sampler: Sampler = Sampler()
    editing: Editing | None = None
    thinking: Thinking | None = None
    cut: bool = static(False)
    inner: bool = static(False)
    passes: int = whole(0)
    closing: str = static("never")
    conventions: Conventions | None = static(None)
    literal_mask: bool = static(False)

    def __post_init__(self):
        super().__post_init__()
        parts.check_kinds(self, _EXAMPLES)
        self.commit.check(self.confidence)
        if self.closing not in CLOSING:
            raise ValueError(f"closing = {self.closing!r}: accepted are {CLOSING}")
        if self.stop.fills or self.stop.late:
            raise ValueError(f"stop = {self.stop!r} fills what follows an EOS, and blocks that follow are not there "
                             "yet: take Settled(), AfterBlock() or Never()")
        if self.inner and not self.sub_block:
            raise ValueError("inner = True with sub_block = None: sub-blocks are what it runs alone; name their size")
        if self.sub_block and self.block_size and self.block_size % self.sub_block:
            raise ValueError(f"sub_block = {self.sub_block} does not divide block_size = {self.block_size}")

    def check_model(self, config: Any) -> None:
        """See `Decoder.check_model`: a model with conventions that blocks can follow."""
        super().check_model(config)
        told = self.conventions or config.convention
        if told is None:
            raise ValueError(f"nothing says how this {config.family} model was taught to denoise: decode it with "
                             "Autoregressive, or name its conventions (BlockDiffusion(conventions=Conventions(...)))")
        if told.prompt == "full" and told.commit == "none":
            raise ValueError("prompt = 'full' with commit = 'none': every token sees the whole answer, which has no "
                             "blocks then; decode it with MaskedDiffusion")
        if told.prompt == "full" and told.grid == "absolute":
            raise ValueError("prompt = 'full' with grid = 'absolute': prompts that end within a block would see its "
                             "masks; name grid = 'anchored', or prompt = 'block-causal'")
        size = self.block_size or config.block_size
        if size is None:
            raise ValueError("block_size = None, and the model's config names none: name that of its training, as in "
                             "BlockDiffusion(block_size=32)")
        self.fitted(config)

    def fitted(self, config: Any) -> "BlockDiffusion":
        """See `Decoder.fitted`."""
        return self.replace(block_size=self.block_size or config.block_size,
                            conventions=self.conventions or config.convention)

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """See `Decoder.check_request`: prompts without masks."""
        super().check_request(prompts, limits, eos_id, mask_id)
        refuse_masks(prompts, mask_id, self.literal_mask)

    def capacity(self, max_new_tokens: int) -> int:
        """See `Decoder.capacity`: whole blocks, wherever the first begins."""
        return -(-max_new_tokens // self.block_size) * self.block_size + self.block_size

    def init(self, score: Scorer, request: Request) -> State:
        """See `Decoder.init`; the prefill yields the first block's seed, where blocks have one and it begins there."""
        grid = self._grid(request)
        behind, cache, counts = run_prompts(score, request, grid)
        zero, no = jnp.zeros(request.batch, jnp.int32), jnp.zeros(request.batch, bool)
        state = State(Canvas.empty(request), grid.first, zero, zero, no, no, behind, cache, counts,
                      request.max_new_tokens <= 0)
        return self._begun(score, request, grid, state, ~state.done, grid.first == 0)

    def step(self, score: Scorer, request: Request, state: State) -> State:
        """See `Decoder.step`: one forward, a denoise or a commit pass, whichever the row is at."""
        grid, live = self._grid(request), ~state.done
        commit, denoise = live & state.due, live & ~state.due
        open_ = self._open(grid, state.canvas)
        hidden, cache, positions = self._forward(score, request, grid, state, open_, live, commit)
        state = state.replace(cache=cache, counts=state.counts.add(
            jnp.where(commit, COMMIT, DENOISE), positions, live))
        state = self._denoised(score, request, grid, state, hidden, open_, denoise)
        if grid.conventions.commit == "none":
            moved = state.due
            return self._begun(score, request, grid, self._next(grid, state, moved), moved, moved)
        state = state.replace(
            behind=jnp.where(commit[:, None, None], hidden[:, :1], state.behind), due=state.due & ~commit,
            done=state.done | commit & state.ending)
        moved = commit & ~state.done
        return self._begun(score, request, grid, self._next(grid, state, commit), moved, moved)

    def _grid(self, request: Request) -> Grid:
        return Grid.of(request, self.conventions, self.block_size, self.cut)

    def _open(self, grid: Grid, canvas: Canvas) -> Array:
        """Returns (B, G) bool: masks of all blocks."""
        return (jnp.arange(canvas.tokens.shape[1]) < grid.stop[:, None]) & (canvas.committed_at < 0)

    def _forward(self, score, request, grid, state, open_, live, commit):
        """Returns (B, K, D) hidden states that predict the block, the cache, and (B,) positions that were read."""
        whole, end = grid.whole(request), jnp.minimum(state.start + grid.size, grid.stop)
        if grid.conventions.commit == "none":
            hidden = run_row(score, whole, grid, state.start, state.canvas.tokens, open_, live)
            return hidden, None, request.prompt_length + end
        alone = self._alone(grid, state, open_, ~commit) if self.inner else None
        hidden, cache = run_block(score, whole, grid, state.start, state.canvas.tokens, live, commit, state.cache,
                                  alone)
        if grid.conventions.shift and grid.conventions.seed == "mask":  # the first token's is a block behind
            first = jnp.where(commit[:, None, None], hidden[:, :1], state.behind)
            hidden = jnp.concatenate([first, hidden[:, 1:]], axis=1)
        return hidden, cache, end - state.start if alone is None else jnp.where(
            alone.active, jnp.minimum(alone.size, end - state.start - alone.offset), end - state.start)

    def _alone(self, grid: Grid, state: State, open_: Array, denoise: Array) -> Part:
        """Returns the sub-blocks that are run alone."""
        number = grid.numbers(state.start)
        masked = (number >= 0) & jnp.take_along_axis(open_, jnp.clip(number, 0, open_.shape[1] - 1), axis=1)
        first = jnp.argmax(masked, axis=1)
        offset = first // self.sub_block * self.sub_block
        return Part(self.sub_block, offset, denoise & (state.step > 0) & (first > offset))

    def _denoised(self, score, request, grid, state, hidden, open_, denoise) -> State:
        """Returns the state with the drafts of a denoise pass that stay, and rows that are done or due told."""
        number, forward = grid.numbers(state.start), state.counts.after_prefill()
        at = lambda x: jnp.take_along_axis(x, jnp.clip(number, 0, x.shape[1] - 1), axis=1)
        ours = (number >= 0) & (number < grid.stop[:, None]) & denoise[:, None]
        masked = at(open_) & ours
        known = ours & ~masked
        drafts = self._drafts(request, score.head(hidden), number, self._eligible(masked), forward,
                              self.editing and self.editing.retracts(state.step, grid.size, known))
        sure = drafts.order
        opened = jnp.minimum(grid.size, grid.stop - state.start) - jnp.maximum(-state.start, 0)
        clock = Clock(state.step, (state.start - grid.first) // grid.size, jnp.sum(open_, axis=1),
                      request.max_new_tokens, grid.size, jnp.maximum(opened, 1))
        eligible = drafts.eligible
        drafts = drafts.replace(confidence=jnp.where(eligible, sure, -jnp.inf),
                                order=jnp.where(eligible, sure, -jnp.inf))
        chosen = rules.chosen(self.commit, drafts, clock)
        left = jnp.any(masked & ~chosen, axis=1)
        closed, taken = denoise & ~left, state.taken
        bound = jnp.asarray(self.passes)
        closed |= denoise & (bound > 0) & (state.step + 1 >= bound)
        if self.editing is not None:
            edited = self.editing.edits(drafts, sure, at(state.canvas.tokens), known)
            began = denoise & ~jnp.any(masked, axis=1)
            taken = taken + began
            closed &= self.editing.over(began, jnp.any(edited, axis=1), taken)
            chosen |= edited
        canvas = state.canvas.commit(number, chosen, drafts.tokens, DRAFTED, forward)
        if self.editing is not None:
            back = edited & (drafts.tokens == request.mask_id)
            canvas, closed = canvas.retract(number, back), closed & ~jnp.any(back, axis=1)
        return self._ended(request, grid, state.replace(
            canvas=canvas, step=state.step + denoise, taken=taken), closed, denoise)

    def _eligible(self, masked: Array) -> Array:
        """Returns (B, K) bool: the masks of the first sub-block that has any."""
        if self.sub_block is None:
            return masked
        part = jnp.arange(masked.shape[1]) // self.sub_block
        return masked & (part == part[jnp.argmax(masked, axis=1)][:, None])

    def _drafts(self, request, logits, number, eligible, forward, masks=None) -> Drafts:
        """Returns the drafts of a block; their `order` is the confidence of all of them, eligible or not. Those of
        `masks`, (B, K) bool, may be masks."""
        keys = sampling.draw_keys(request.keys, forward, number)
        draws, ties = (jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, use)))(keys) for use in (0, 1))
        drafts = Drafts(self._drawn(request, logits, draws, masks), logits, eligible, number, ties, self.sampler,
                        self.confidence)
        return drafts.replace(order=parts.shaped(self.confidence, "of", self.confidence.of(drafts), number.shape))

    def _drawn(self, request: Request, logits: Array, keys: Array, masks: Array | None = None) -> Array:
        """Returns (B, C) int32 tokens of (B, C, V) logits; a mask is no answer but where (B, C) `masks` say so."""
        barred = jnp.arange(logits.shape[-1]) == request.mask_id
        barred = barred if masks is None else barred & ~masks[..., None]
        return self.sampler.draw(jnp.where(barred, -jnp.inf, logits), keys)

    def _ended(self, request, grid, state, closed, moved) -> State:
        """Returns the state with rows told done or due, of those that have moved; `closed` blocks are finished."""
        board = stops.board(request, state.canvas)
        finished = closed[:, None] & (board.index < (state.start + grid.size)[:, None])
        stopped = moved & self.stop.ends(board, finished)
        over = closed & (state.start + grid.size >= request.max_new_tokens)
        if self.editing is None:
            over |= moved & ~jnp.any(board.masked, axis=1)
        ending = {"never": stopped & False, "length": over & ~stopped, "always": stopped | over}[self.closing]
        if grid.conventions.commit == "none":
            ending &= False
        done = state.done | ((stopped | over) & ~ending)
        return state.replace(done=done, ending=state.ending | ending, due=state.due | ((closed | ending) & ~done))

    def _next(self, grid: Grid, state: State, moved: Array) -> State:
        """Returns the state at the next block, of the rows that have moved."""
        none = grid.conventions.commit == "none"
        return state.replace(
            start=state.start + jnp.where(moved, grid.size, 0), step=jnp.where(moved, 0, state.step),
            taken=jnp.where(moved, 0, state.taken), due=state.due & ~moved if none else state.due)

    def _begun(self, score: Scorer, request: Request, grid: Grid, state: State, begun: Array, seeded: Array) -> State:
        """Returns the state with what blocks begin with: `seeded` ones a first token, where the model gives them one,
        and all that have `begun` the end of thinking, where it is due."""
        seeded, forward = seeded & ~state.done, state.counts.after_prefill()
        if grid.conventions.seed == "autoregressive":
            number = state.start[:, None]
            token = self._drawn(request, score.head(state.behind), sampling.draw_keys(request.keys, forward, number))
            state = state.replace(canvas=state.canvas.commit(number, seeded[:, None], token, AUTOREGRESSIVE, forward))
        elif self.thinking is None:
            return state
        if self.thinking is not None:
            number, due = self.thinking.place(state.canvas, state.start, grid.size)
            due &= begun & (number < grid.stop)
            token = jnp.broadcast_to(jnp.asarray(self.thinking.end, jnp.int32), number[:, None].shape)
            state = state.replace(canvas=state.canvas.commit(
                number[:, None], due[:, None], token, AUTOREGRESSIVE, forward))
        closed = begun & ~jnp.any(self._open(grid, state.canvas) & self._within(grid, state), axis=1)
        return self._ended(request, grid, state, closed, begun & ~state.done)

    def _within(self, grid: Grid, state: State) -> Array:
        index = jnp.arange(state.canvas.tokens.shape[1])
        return (index >= state.start[:, None]) & (index < (state.start + grid.size)[:, None])
