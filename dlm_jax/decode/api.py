"""From ragged prompts to answers: hosts over a `Runner`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dlm_jax.decode import answers, events
from dlm_jax.decode.answers import Generation
from dlm_jax.decode.events import Event
from dlm_jax.decode.protocol import Decoder
from dlm_jax.decode.request import Pair, halves
from dlm_jax.decode.runner import Runner
from dlm_jax.scoring import Model
from dlm_jax.types import Params


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int] | Pair],
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
      params: its parameters; where they lie on a mesh, the rows of a batch are split over its data axes.
      prompts: ragged lists of token ids; for a guided model a `Pair` each where its guide reads prompts of its own.
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
    runner = Runner(model, params, decoder)
    options = dict(eos_id=eos_id, mask_id=mask_id, seed=seed)
    request = runner.request(prompts, max_new_tokens=max_new_tokens, **options)
    size, count = len(prompts) if batch_size is None else batch_size, len(prompts)
    if size < 1:
        raise ValueError(f"batch_size = {size}: at least 1")
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (count,))
    longest, theirs = (max(map(len, ids or [()])) for ids in halves(prompts))
    width = int(limits.max())
    parts = []
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        if size < count:
            request = runner.request(prompts[rows], max_new_tokens=limits[rows], first_row=start, batch=size,
                                     prompt_capacity=longest, guide_capacity=theirs, capacity=width, **options)
        parts.append(_timed(runner, request, rows.stop - start, width))
        if progress is not None:
            progress(rows.stop)
    return parts[0] if len(parts) == 1 else answers.join(parts)


def _timed(runner: Runner, request, count: int, width: int) -> Generation:
    compiled = runner.compile_seconds
    clock = [time.perf_counter()]
    rows = jax.block_until_ready(runner.start(request))
    clock.append(time.perf_counter())
    prefill = clock[1] - clock[0] - (runner.compile_seconds - compiled)
    between = runner.compile_seconds
    rows = jax.block_until_ready(runner.run(rows))
    decode = time.perf_counter() - clock[1] - (runner.compile_seconds - between)
    seconds = {"prefill": prefill, "decode": decode, "compile": runner.compile_seconds - compiled}
    return dataclasses.replace(runner.read(rows, np.arange(count), width), seconds=seconds)


def stream(
    model: Model,
    params: Params,
    prompts: Sequence[int] | Pair | Sequence[Sequence[int] | Pair],
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
    if isinstance(prompts, Pair) or (len(prompts) > 0 and not isinstance(prompts[0], Pair)
                                     and np.ndim(prompts[0]) == 0):
        prompts = [prompts]
    runner = Runner(model, params, decoder)
    request = runner.request(prompts, max_new_tokens=max_new_tokens, eos_id=eos_id, mask_id=mask_id, seed=seed,
                             first_row=first_row)
    return _events(runner, request, len(prompts))


def _events(runner: Runner, request, count: int) -> Iterator[Event]:
    yield from events.watch(runner, runner.start(request), count)
