"""Rows of a decoder on a device: started, stepped, run, admitted and released; `generate` and `stream` host it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from dlm_jax.decode import executables, parts
from dlm_jax.decode import request as requests
from dlm_jax.decode.answers import Generation, read
from dlm_jax.decode.executables import EXECUTABLES, Executables
from dlm_jax.decode.parts import check_number
from dlm_jax.decode.protocol import Decoder
from dlm_jax.decode.request import Pair, Request, bucket, halves
from dlm_jax.scoring import Model, Scorer
from dlm_jax.types import Params

FOREVER = np.int32(2**31 - 1)


@functools.cache  # once, however many answers are asked for
def _warn(doubt: str) -> None:
    logging.getLogger(__name__).warning("%s", doubt)


@struct.dataclass
class Rows:
    """A batch on a device: what was asked of each row, and how far it has come.

    Attributes:
      request: see `Request`.
      state: the decoder's.
    """

    request: Request
    state: Any

    @property
    def done(self) -> np.ndarray:
        """(B,) bool, the rows that are finished or empty; waits for the device."""
        return np.asarray(self.state.done)


class Runner:
    """Owns the executables of a model, its parameters and a decoder, and the loops over them.

    Every method returns new rows; those given to `step`, `run` and `admit` are used up, their memory is the new ones'.
    A row's answer depends neither on the other rows nor on when they come and go.

    Attributes:
      compile_seconds: spent compiling so far.
    """

    def __init__(self, model: Model, params: Params, decoder: Decoder, executables: Executables = EXECUTABLES):
        """Checks the decoder and the model; what to expect of one not trained for the other is logged once.

        Args:
          model: the module, as `load` returns it.
          params: its parameters.
          decoder: `Autoregressive(...)`, `ReFusion(...)`, …
          executables: where compiled programs are kept.

        Raises:
          ValueError: a model that the decoder is not made for.
        """
        if isinstance(decoder, type):
            raise ValueError(f"decoder is the class {decoder.__name__}: make one, as in {decoder.__name__}()")
        if not isinstance(decoder, Decoder):
            raise ValueError(f"decoder = {decoder!r}: expected a Decoder, such as decode.Autoregressive()")
        decoder.check_model(model.config)
        doubt = decoder.doubt(model.config)
        if doubt is not None:
            _warn(doubt)
        self.model, self.params, self.decoder = model, params, decoder.fitted(model.config)
        self.compile_seconds = 0.0
        self._rows_over = requests.rows_over(params)
        self._executables = executables
        self._traced = requests.placed(parts.traced(self.decoder), self._rows_over)

    def _call(self, function, *arguments):
        executable, seconds = self._executables.get(function, self.model, arguments)
        self.compile_seconds += seconds
        return executable(*arguments)

    def request(
        self, prompts: Sequence[Sequence[int] | Pair], *, max_new_tokens: int | Sequence[int],
        eos_id: int | None = None, mask_id: int | None = None, seed: int = 0, first_row: int = 0, batch: int = 1,
        prompt_capacity: int = 1, guide_capacity: int = 1, capacity: int = 1,
    ) -> Request:
        """Checks prompts and lays them out in a bucketed batch.

        Args:
          prompts: ragged lists of token ids, or pairs of them where a guide reads prompts of its own.
          max_new_tokens: tokens to generate at most, one number or one a prompt.
          eos_id: id that ends an answer; None takes the model config's, -1 ignores EOS.
          mask_id: id of the mask token; None takes the model config's.
          seed: of sampling; prompt i draws from (seed, first_row + i), whatever batch it is in.
          first_row: number of the first prompt.
          batch, prompt_capacity, guide_capacity: least B, P and P'.
          capacity: tokens that the canvas must hold at least.

        Raises:
          ValueError: bad prompts, lengths or ids, before anything is compiled.
        """
        check_number("first_row", first_row, 0, 2**31, kind=int)
        prompts, theirs, limits, eos_id, mask_id = self._checked(prompts, max_new_tokens, eos_id, mask_id)
        return requests.make(
            prompts, max_new_tokens=limits, capacity=self.decoder.capacity(bucket(max(int(limits.max()), capacity))),
            eos_id=eos_id, mask_id=mask_id, seed=seed, first_row=first_row, batch=batch,
            prompt_capacity=prompt_capacity, guide_prompts=theirs, guide_capacity=guide_capacity, over=self._rows_over)

    def _checked(self, prompts, max_new_tokens, eos_id, mask_id):
        """Returns prompts, those of a guide, (B,) limits, eos and mask ids of a request that makes sense."""
        config = self.model.config
        if len(prompts) == 0:
            raise ValueError("no prompts: pass a list of at least one list of token ids")
        prompts, theirs = halves(prompts)
        if theirs is not None and not self.decoder.guided:
            raise ValueError(f"prompts are pairs, and {type(self.decoder).__name__} asks no guide: pass plain ids")
        for i, prompt in enumerate(prompts):
            check_prompt(f"prompt {i}", prompt, config.vocab_size)
        limits = np.asarray(max_new_tokens)
        if not np.issubdtype(limits.dtype, np.integer) or (limits.ndim and limits.shape != (len(prompts),)):
            raise ValueError(f"max_new_tokens = {max_new_tokens!r}: expected an int, or one for each of "
                             f"{len(prompts)} prompts")
        if limits.min() < 1:
            raise ValueError(f"max_new_tokens = {int(limits.min())}: at least 1")
        limits = np.broadcast_to(limits.astype(np.int32), (len(prompts),))
        check_room("prompt", prompts, limits, config.max_position_embeddings)
        if theirs is not None:
            for i, prompt in enumerate(theirs):
                check_prompt(f"the guide's prompt {i}", prompt, config.guide.vocab_size)
            check_room("the guide's prompt", theirs, limits, config.guide.max_position_embeddings)
        eos_id = config.eos_token_id if eos_id is None else eos_id
        mask_id = config.mask_token_id if mask_id is None else mask_id
        eos_id = None if eos_id == -1 else eos_id
        for name, value in (("eos_id", eos_id), ("mask_id", mask_id)):
            if value is not None and not 0 <= value < config.vocab_size:
                raise ValueError(f"{name} = {value} lies outside the vocabulary of {config.vocab_size} ids")
        self.decoder.check_request(prompts, limits, eos_id, mask_id)
        return prompts, theirs, limits, eos_id, mask_id

    def start(self, request: Request) -> Rows:
        """Prefills a batch."""
        return Rows(request, self._call(executables.init, self.params, self._traced, request))

    def step(self, rows: Rows) -> Rows:
        """Runs one round for every row that is not done."""
        return Rows(rows.request, self._call(executables.step, self.params, self._traced, rows.request, rows.state))

    def run(self, rows: Rows, steps: int | None = None) -> Rows:
        """Runs rounds in one compiled loop until every row is done.

        Args:
          rows: the batch.
          steps: rounds at most; None for no bound.
        """
        bound = FOREVER if steps is None else np.int32(steps)
        return Rows(rows.request, self._call(
            executables.loop, self.params, self._traced, rows.request, rows.state, bound))

    def provisional(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Returns (B, G) tokens and which of them are drafts that may come to nothing."""
        return tuple(map(np.asarray, self._call(executables.provisional, self._traced, rows.state)))

    def admit(self, rows: Rows, row: int, prompt: Sequence[int] | Pair, *, max_new_tokens: int, seed: int = 0,
              number: int = 0) -> Rows:
        """Prefills a prompt in the place of a row that is done; the others stay as they are.

        Args:
          rows: the batch; its EOS and mask hold for the newcomer too.
          row: its place in the batch; what is there and was not released is lost.
          prompt: token ids, or a pair where the batch was started with pairs.
          max_new_tokens: tokens to generate at most.
          seed, number: the row draws as prompt `number` of `generate(..., seed=seed)` does.

        Raises:
          ValueError: a place that is taken or not there, or a prompt or length that does not fit the batch.
        """
        old = rows.request
        if not 0 <= row < old.batch:
            raise ValueError(f"row = {row}: the batch has rows 0 to {old.batch - 1}")
        if not rows.done[row]:
            raise ValueError(f"row {row} is still being decoded: run it to its end, or release it first")
        none = lambda x: None if int(x) < 0 else int(x)
        [prompt], theirs, limits, *_ = self._checked([prompt], max_new_tokens, int(old.eos_id), none(old.mask_id))
        if (theirs is None) != (old.guide_prompt is None):
            raise ValueError("a batch takes pairs of prompts or plain ones, as it was started")
        room = 1 if theirs is None else old.guide_prompt.shape[1]
        limit = int(limits[0])
        spare = self.decoder.capacity(limit) - limit  # of whole blocks, or windows beyond the answer
        for name, length, most in (("prompt", len(prompt), old.prompt_capacity),
                                   ("the guide's prompt", 0 if theirs is None else len(theirs[0]), room),
                                   ("max_new_tokens", limit, old.capacity - spare)):
            if length > most:
                raise ValueError(f"{name}: {length} tokens do not fit a batch made for {most}; start it with longer "
                                 "prompts or answers (prompt_capacity, guide_capacity, capacity)")
        check_number("number", number, 0, 2**31, kind=int)
        one = requests.make([prompt], max_new_tokens=limits, capacity=old.capacity, eos_id=none(old.eos_id),
                            mask_id=none(old.mask_id), seed=seed, first_row=number, guide_prompts=theirs,
                            prompt_capacity=old.prompt_capacity, guide_capacity=room)
        fresh = self.start(one)
        return Rows(*self._call(executables.insert, old, rows.state, np.int32(row), (one, fresh.state)))

    def release(self, rows: Rows, chosen: Sequence[int]) -> tuple[Generation, Rows]:
        """Reads the answers of some rows and empties their places.

        Args:
          rows: the batch.
          chosen: rows, finished or not.

        Returns:
          The answers so far, without times, and the batch.
        """
        answers, chosen = self.read(rows, chosen), np.asarray(chosen, np.int32)
        request = rows.request.replace(max_new_tokens=rows.request.max_new_tokens.at[chosen].set(0))
        return answers, Rows(request, rows.state.replace(done=rows.state.done.at[chosen].set(True)))

    def read(self, rows: Rows, chosen: Sequence[int], width: int | None = None) -> Generation:
        """Returns the answers of some rows as they stand.

        Args:
          rows: the batch.
          chosen: rows.
          width: tokens of the canvas that are read; None for the longest of those rows.

        Raises:
          ValueError: a row that is not there.
        """
        chosen = np.asarray(chosen, np.int32)
        if chosen.size and not (0 <= chosen.min() and chosen.max() < rows.request.batch):
            raise ValueError(f"rows = {chosen.tolist()}: the batch has rows 0 to {rows.request.batch - 1}")
        return read(rows.request, rows.state.canvas, rows.state.counts, chosen, width,
                    self.decoder.record(rows.state))


def check_prompt(name: str, prompt: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for a prompt, called `name`, that is no list of ids of a vocabulary."""
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise ValueError(f"{name} is empty: a prompt holds at least one token (a BOS, for instance)")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} = {str(prompt)[:60]}: expected a list of integer token ids, and prompts a list of "
                         "such lists")
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(f"{name} holds token id {bad[0]}, outside the vocabulary of {vocab_size} ids: was it made "
                         "with this model's tokenizer?")


def check_room(name: str, prompts: Sequence[Sequence[int]], limits: np.ndarray, positions: int) -> None:
    """Raises ValueError for prompts and (B,) lengths of answers that reach beyond the positions a model knows."""
    longest = int(np.max(np.array([len(p) for p in prompts]) + limits))
    if longest > positions:
        raise ValueError(f"{name} and answer reach {longest} tokens, the model was made for {positions} "
                         "(max_position_embeddings): shorten the prompt or lower max_new_tokens")


def python_loop(score: Scorer, decoder: Decoder, request: Request) -> Any:
    """Runs `init` and `step` without compiling them; the reference for the other loops.

    Args:
      score: a `scoring.Scorer`.
      decoder: the decoder.
      request: the batch.

    Returns:
      The final state.
    """
    state = decoder.init(score, request)
    while not bool(jnp.all(state.done)):
        state = decoder.step(score, request, state)
    return state
