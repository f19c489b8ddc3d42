"""What comes back to the host.

Letters: B prompts.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.ledger import Counts, Ledger
from dlm_jax.decode.request import Request


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers to a list of prompts.

    Attributes:
      tokens: per prompt, the generated ids, prompt excluded, cut after EOS.
      canvas: (B, max_new_tokens) int array as committed, the mask id where nothing was.
      committed_at: (B, max_new_tokens) forward after prefill that committed each token, -1 where none did.
      origin: (B, max_new_tokens) 0 drafted, 1 autoregressive, -1 nothing.
      ledger: counts per row.
      seconds: "prefill", "decode" (device-synchronised) and "compile", wall time; empty where nothing was timed.
      record: name -> (B, ...) array, what else a decoder tells of its rows, see `Decoder.record`.
    """

    tokens: list[np.ndarray]
    canvas: np.ndarray
    committed_at: np.ndarray
    origin: np.ndarray
    ledger: Ledger
    seconds: dict[str, float]
    record: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens of all rows over wall seconds, prefill included, compile excluded."""
        return float(self.ledger.committed.sum()) / (self.seconds["prefill"] + self.seconds["decode"])


def read(request: Request, canvas: Canvas, counts: Counts, rows: np.ndarray, width: int | None = None,
         record: Mapping[str, Any] = types.MappingProxyType({})) -> Generation:
    """Takes the answers of some rows to the host.

    Args:
      request, canvas, counts: of the batch.
      rows: (R,) int row indices.
      width: tokens of the canvas that are read; None for the longest of the rows.
      record: of the batch, see `Decoder.record`.
    """
    limits = np.asarray(request.max_new_tokens)[rows]
    width = int(limits.max(initial=0)) if width is None else width
    host = lambda x: np.asarray(x)[rows, :width]
    grid, committed_at, eos_id = host(canvas.tokens), host(canvas.committed_at), int(request.eos_id)
    tokens = []
    for ids, at, limit in zip(grid, committed_at, limits):
        ids = ids[:limit][at[:limit] >= 0]
        ends = np.flatnonzero(ids == eos_id)
        tokens.append(ids[: ends[0] + 1] if ends.size else ids)
    committed = np.array([len(t) for t in tokens], int)
    yielding = np.any(committed_at == 0, axis=1).astype(int)
    return Generation(tokens, grid, committed_at, host(canvas.origin),
                      Ledger.read(counts, committed, yielding, rows), {},
                      {name: np.asarray(x)[rows] for name, x in record.items()})


def join(parts: list[Generation]) -> Generation:
    """Returns the generations of several batches as one; times add up."""
    stack = lambda name: np.concatenate([getattr(p, name) for p in parts])
    return Generation(
        [t for p in parts for t in p.tokens], stack("canvas"), stack("committed_at"), stack("origin"),
        Ledger.concatenate([p.ledger for p in parts]),
        {name: sum(p.seconds[name] for p in parts) for name in parts[0].seconds},
        {name: np.concatenate([p.record[name] for p in parts]) for name in parts[0].record})
