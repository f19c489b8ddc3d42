"""From ragged prompts to answers: checks, buckets, runs a decoder, and reads the result to the host."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dlm_jax.decode import loop
from dlm_jax.decode.ledger import GUIDE, KINDS, Ledger
from dlm_jax.decode.state import ORIGINS, Canvas, Decoder, Request, bucket, check_number
from dlm_jax.types import Params

EXECUTABLES = loop.Executables()


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers to a list of prompts.

    Attributes:
      tokens: per prompt, the generated ids, prompt excluded, cut after EOS.
      canvas: (B, max_new_tokens) int array as committed, the mask id where nothing was.
      committed_at: (B, max_new_tokens) forward after prefill that committed each token, -1 where none did.
      origin: (B, max_new_tokens) 0 drafted, 1 autoregressive, -1 nothing.
      ledger: counts per row.
      seconds: "prefill", "decode" (device-synchronised) and "compile", wall time.
    """

    tokens: list[np.ndarray]
    canvas: np.ndarray
    committed_at: np.ndarray
    origin: np.ndarray
    ledger: Ledger
    seconds: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens of all rows over wall seconds, prefill included, compile excluded."""
        return float(self.ledger.committed.sum()) / (self.seconds["prefill"] + self.seconds["decode"])


@dataclasses.dataclass(frozen=True)
class Event:
    """What one forward changed in one row.

    Attributes:
      forward: forwards of this row after prefill, this one included.
      kind: ledger kind of the forward.
      row: index of the prompt.
      positions: generated-token indices, 0 for the first token after the prompt.
      tokens: their ids.
      committed: True for final tokens, False for drafts that may still change.
      origin: "drafted" or "autoregressive" for each token.
    """

    forward: int
    kind: str
    row: int
    positions: list[int]
    tokens: list[int]
    committed: bool
    origin: list[str]


def bind(model: Any, params: Params) -> Any:
    """Returns the scorer of a model, which knows how to bind its own parameters."""
    return model.scorer(params)


def make_request(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    capacity: int,
    eos_id: int | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    first_row: int = 0,
    batch: int = 1,
    prompt_capacity: int = 1,
) -> Request:
    """Lays prompts out in a bucketed batch.

    Args:
      prompts: ragged lists of token ids, checked.
      max_new_tokens: tokens to generate, one number or one a prompt.
      capacity: G, canvas length.
      eos_id: id that ends a row, or None.
      mask_id: id of the mask token, or None.
      seed: of sampling; row i draws from (seed, first_row + i), whatever batch it is in.
      first_row: number of the first prompt.
      batch, prompt_capacity: least B and P, so that several batches share a shape.

    Returns:
      The request.
    """
    rows = [np.asarray(p, np.int32) for p in prompts]
    lengths = np.array([len(r) for r in rows], np.int32)
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int32), lengths.shape)
    B, P = bucket(max(len(rows), batch), least=1), bucket(max(int(lengths.max()), prompt_capacity))
    tokens = np.zeros((B, P), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    pad = lambda x, value: np.concatenate([x, np.full(B - len(rows), value, np.int32)])
    no = lambda x: np.int32(-1 if x is None else x)
    keys = _row_keys(jax.random.key(seed), first_row + np.arange(B, dtype=np.uint32))
    return Request(*jax.device_put((tokens, pad(lengths, 1), pad(limits, 0), no(eos_id), no(mask_id))), keys, capacity)


@jax.jit
def _row_keys(key, rows):
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def _check(model, prompts, decoder, max_new_tokens, eos_id, mask_id):
    """Raises for bad input, before any compile; returns eos and mask ids, and the canvas length."""
    config = model.config
    if isinstance(decoder, type):
        raise ValueError(f"decoder is the class {decoder.__name__}: make one, as in {decoder.__name__}()")
    if len(prompts) == 0:
        raise ValueError("no prompts: pass a list of at least one list of token ids")
    for i, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise ValueError(f"prompt {i} is empty: a prompt holds at least one token (a BOS, for instance)")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt {i} = {str(prompt)[:60]}: expected a list of integer token ids, and prompts a "
                             "list of such lists")
        bad = ids[(ids < 0) | (ids >= config.vocab_size)]
        if bad.size:
            raise ValueError(f"prompt {i} holds token id {bad[0]}, outside the vocabulary of {config.vocab_size} ids: "
                             "was it made with this model's tokenizer?")
    limits = np.asarray(max_new_tokens)
    if not np.issubdtype(limits.dtype, np.integer) or (limits.ndim and limits.shape != (len(prompts),)):
        raise ValueError(f"max_new_tokens = {max_new_tokens!r}: expected an int, or one for each of {len(prompts)} "
                         "prompts")
    if limits.min() < 1:
        raise ValueError(f"max_new_tokens = {int(limits.min())}: at least 1")
    longest = int(np.max(np.array([len(p) for p in prompts]) + limits))
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"prompt and answer reach {longest} tokens, the model was made for {config.max_position_embeddings} "
            "(max_position_embeddings): shorten the prompt or lower max_new_tokens")
    eos_id = config.eos_token_id if eos_id is None else eos_id
    mask_id = config.mask_token_id if mask_id is None else mask_id
    eos_id = None if eos_id == -1 else eos_id
    for name, value in (("eos_id", eos_id), ("mask_id", mask_id)):
        if value is not None and not 0 <= value < config.vocab_size:
            raise ValueError(f"{name} = {value} lies outside the vocabulary of {config.vocab_size} ids")
    decoder.check()
    decoder.check_model(config)
    decoder.check_request(prompts, np.broadcast_to(limits, len(prompts)), eos_id, mask_id)
    return eos_id, mask_id, decoder.generation_capacity(bucket(int(limits.max())))


def generate(
    model: Any,
    params: Params,
    prompts: Sequence[Sequence[int]],
    decoder: Decoder,
    *,
    max_new_tokens: int | Sequence[int],
    eos_id: int | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Generation:
    """Decodes a list of prompts.

    A row's answer does not depend on the other rows, on the order they come in beyond its own number (which
    seeds its sampling), or on padding.

    Args:
      model: the module, as `load` returns it.
      params: its parameters.
      prompts: ragged lists of token ids.
      decoder: `Autoregressive(...)`, `ReFusion(...)`, …
      max_new_tokens: tokens to generate at most, one number or one a prompt.
      eos_id: id that ends an answer; None takes the model config's, -1 ignores EOS.
      mask_id: id of the mask token; None takes the model config's.
      seed: of sampling.
      batch_size: prompts decoded at once; None takes them all.
      progress: called after every batch with the number of prompts answered so far.

    Returns:
      The answers, their trace and their ledger.

    Raises:
      ValueError: bad prompts, lengths, ids or hyperparameters, before anything is compiled.
    """
    eos_id, mask_id, capacity = _check(model, prompts, decoder, max_new_tokens, eos_id, mask_id)
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (len(prompts),))
    size = len(prompts) if batch_size is None else batch_size
    if size < 1:
        raise ValueError(f"batch_size = {size}: at least 1")
    parts = []
    longest = max(len(p) for p in prompts)
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        request = make_request(
            prompts[rows], max_new_tokens=limits[rows], capacity=capacity, eos_id=eos_id, mask_id=mask_id, seed=seed,
            first_row=start, batch=min(size, len(prompts)), prompt_capacity=longest)
        parts.append(_run(model, params, decoder, request, len(prompts[rows]), int(limits.max()), eos_id))
        if progress is not None:
            progress(start + len(prompts[rows]))
    return parts[0] if len(parts) == 1 else _join(parts)


def _run(model, params, decoder, request, rows, width, eos_id) -> Generation:
    traced = loop.traced(decoder)
    start, compile_start = EXECUTABLES.get(bind, model, "init", (params, traced, request))
    begin = time.perf_counter()
    state = jax.block_until_ready(start(params, traced, request))
    prefill_seconds = time.perf_counter() - begin
    go, compile_loop = EXECUTABLES.get(bind, model, "loop", (params, traced, request, state))
    begin = time.perf_counter()
    state = jax.block_until_ready(go(params, traced, request, state))
    decode_seconds = time.perf_counter() - begin
    seconds = {"prefill": prefill_seconds, "decode": decode_seconds, "compile": compile_start + compile_loop}
    return _read(decoder.finish(request, state), state.counts, request, rows, width, eos_id, seconds)


def _read(canvas: Canvas, counts, request, rows, width, eos_id, seconds) -> Generation:
    host = lambda x: np.asarray(x)[:rows, :width]
    grid, committed_at = host(canvas.tokens), host(canvas.committed_at)
    limits = np.asarray(request.max_new_tokens)[:rows]
    tokens = []
    for row in range(rows):
        ids = grid[row, : limits[row]][committed_at[row, : limits[row]] >= 0]
        ends = np.flatnonzero(ids == eos_id) if eos_id is not None else np.array([], int)
        tokens.append(ids[: ends[0] + 1] if ends.size else ids)
    committed = np.array([len(t) for t in tokens])
    return Generation(tokens, grid, committed_at, host(canvas.origin), Ledger.read(counts, committed, rows), seconds)


def _join(parts: list[Generation]) -> Generation:
    stack = lambda name: np.concatenate([getattr(p, name) for p in parts])
    return Generation(
        [t for p in parts for t in p.tokens], stack("canvas"), stack("committed_at"), stack("origin"),
        Ledger.concatenate([p.ledger for p in parts]),
        {name: sum(p.seconds[name] for p in parts) for name in parts[0].seconds})


@functools.partial(jax.jit, static_argnums=0)
def _provisional(decoder_type, decoder, state):
    del decoder_type
    return decoder.provisional(state)


def stream(
    model: Any,
    params: Params,
    prompts: Sequence[int] | Sequence[Sequence[int]],
    decoder: Decoder,
    *,
    max_new_tokens: int | Sequence[int],
    eos_id: int | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    first_row: int = 0,
) -> Iterator[Event]:
    """Decodes like `generate`, and yields what every forward drafts and commits while it happens.

    Args:
      model, params, decoder, max_new_tokens, eos_id, mask_id, seed: as in `generate`.
      prompts: one prompt, or several decoded side by side.
      first_row: number of the first prompt, which seeds its sampling; `generate` counts from 0.

    Yields:
      An event for every row and forward that changed something: drafts first, then what was committed. Drafts are
      those that are new or that a commit has come after.

    Raises:
      ValueError: as `generate`.
    """
    check_number("first_row", first_row, 0, 2**31, kind=int)
    single = len(prompts) > 0 and np.ndim(prompts[0]) == 0
    prompts = [prompts] if single else prompts
    eos_id, mask_id, capacity = _check(model, prompts, decoder, max_new_tokens, eos_id, mask_id)
    request = make_request(
        prompts, max_new_tokens=max_new_tokens, capacity=capacity, eos_id=eos_id, mask_id=mask_id, seed=seed,
        first_row=first_row)
    return _events(model, params, loop.traced(decoder), request, len(prompts))


def _events(model, params, decoder, request, rows) -> Iterator[Event]:
    before = None
    inside = np.arange(request.capacity) < np.asarray(request.max_new_tokens)[:, None]
    for state in loop.step_loop(EXECUTABLES, bind, model, params, decoder, request):
        drafts, shown = (np.asarray(x) for x in _provisional(type(decoder), decoder, state))
        now = {"tokens": np.asarray(state.canvas.tokens),
               "at": np.where(inside, np.asarray(state.canvas.committed_at), -1),
               "origin": np.asarray(state.canvas.origin), "forwards": np.asarray(state.counts.forwards),
               "drafts": np.where(shown & inside, drafts, -1)}
        if before is None:
            before = {**now, "at": np.full_like(now["at"], -1), "forwards": np.zeros_like(now["forwards"]),
                      "drafts": np.full_like(now["drafts"], -1)}
        after_prefill = np.asarray(state.counts.after_prefill())
        for row in range(rows):
            changed = now["forwards"][row] - before["forwards"][row]
            if not changed.any():
                continue
            kinds = np.flatnonzero(changed).tolist()  # of a round of two, the draft's comes first
            later = sum(int(changed[kind]) for kind in kinds[1:] if kind != GUIDE)
            event = lambda which, *rest: Event(
                int(after_prefill[row]) - later * (which == 0), KINDS[kinds[which]], row, *rest)
            fresh = np.flatnonzero((now["at"][row] >= 0) & (before["at"][row] < 0))
            drafted = np.flatnonzero((now["drafts"][row] >= 0) & (now["drafts"][row] != before["drafts"][row]))
            if drafted.size:
                yield event(0, drafted.tolist(), now["drafts"][row, drafted].tolist(), False,
                            ["drafted"] * drafted.size)
            if fresh.size:
                yield event(-1, fresh.tolist(), now["tokens"][row, fresh].tolist(), True,
                            [ORIGINS[int(o)] for o in now["origin"][row, fresh]])
                now["drafts"][row] = -1  # what is still drafted after a commit is shown again
        before = now
