"""Generation that outlives its process: every batch is written when it is done, and not decoded again.

A row draws from the seed and its own number, so that what is taken up is what one run would have made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlm_jax.decode import answers
from dlm_jax.decode.answers import Generation
from dlm_jax.decode.ledger import KINDS, Ledger
from dlm_jax.decode.request import halves
from dlm_jax.decode.runner import Runner
from dlm_jax.types import Params

_BY_KIND = ("forwards", "positions")
_ARRAYS = ("canvas", "committed_at", "origin")


def generate(
    model: Any, params: Params, prompts: Sequence[Any], folder: Path, identity: str, *, decoder: Any,
    max_new_tokens: int, batch_size: int, progress: Callable[[int], None] | None = None, **options: Any,
) -> Generation:
    """Decodes a list of prompts like `decode.generate`, taking up what a folder holds of the same.

    Args:
      model, params, prompts, decoder, max_new_tokens, batch_size, progress: as there.
      folder: where the batches go; made with the first.
      identity: of what cannot be seen from here, the model's weights above all.
      **options: eos_id, mask_id and seed, as there.

    Raises:
      ValueError: as there, and for a folder that holds batches of something else.
    """
    runner = Runner(model, params, decoder)
    longest, theirs = (max(map(len, ids or [()])) for ids in halves(prompts))
    same = [identity, repr(runner.decoder), repr(model.config), max_new_tokens, batch_size, sorted(options.items()),
            [list(map(list, ids or [])) for ids in halves(prompts)]]
    digest = hashlib.sha256(json.dumps(same, default=int).encode()).hexdigest()
    parts = []
    for start in range(0, len(prompts), batch_size):
        rows = prompts[start:start + batch_size]
        path = folder / f"{start:08d}.npz"
        if not path.exists():
            request = runner.request(rows, max_new_tokens=max_new_tokens, first_row=start, batch=batch_size,
                                     prompt_capacity=longest, guide_capacity=theirs, capacity=max_new_tokens, **options)
            _write(path, _timed(runner, request, len(rows), max_new_tokens), digest)
        parts.append(_read(path, digest))
        if progress is not None:
            progress(start + len(rows))
    return answers.join(parts)


def _timed(runner: Runner, request: Any, count: int, width: int) -> Generation:
    """Decodes a batch; its times leave compilation out."""
    seconds, compiled = {}, runner.compile_seconds
    rows = request
    for name, stage in (("prefill", runner.start), ("decode", runner.run)):
        clock, before = time.perf_counter(), runner.compile_seconds
        rows = jax.block_until_ready(stage(rows))
        seconds[name] = time.perf_counter() - clock - (runner.compile_seconds - before)
    made = runner.read(rows, np.arange(count), width)
    return dataclasses.replace(made, seconds=seconds | {"compile": runner.compile_seconds - compiled})


def _write(path: Path, made: Generation, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    with half.open("wb") as file:
        np.savez(
            file, digest=digest, tokens=np.concatenate(made.tokens), lengths=[len(ids) for ids in made.tokens],
            **{name: getattr(made, name) for name in _ARRAYS},
            **{f"{name}_{kind}": getattr(made.ledger, name)[kind] for name in _BY_KIND for kind in KINDS},
            committed=made.ledger.committed, yielding=made.ledger.yielding,
            **{f"record_{name}": value for name, value in made.record.items()},
            **{f"seconds_{name}": value for name, value in made.seconds.items()})
    half.replace(path)  # whole or not at all


def _read(path: Path, digest: str) -> Generation:
    with np.load(path, allow_pickle=False) as file:
        held = dict(file)
    if str(held["digest"]) != digest:
        raise ValueError(f"{path} holds answers of another model, decoder, length, batch size, seed or other prompts; "
                         "go on with the same, or give a new directory")
    by_kind = lambda name: {kind: held[f"{name}_{kind}"] for kind in KINDS}
    ledger = Ledger(*map(by_kind, _BY_KIND), held["committed"], held["yielding"])
    return Generation(
        np.split(held["tokens"], np.cumsum(held["lengths"])[:-1]), *(held[name] for name in _ARRAYS), ledger,
        {name: float(held[f"seconds_{name}"]) for name in ("prefill", "decode", "compile")},
        {name.removeprefix("record_"): value for name, value in held.items() if name.startswith("record_")})
