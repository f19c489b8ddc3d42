"""What every forward drafts and commits, told while it happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dlm_jax.decode.canvas import ORIGINS
from dlm_jax.decode.ledger import DENOISE, GUIDE, KINDS, PREFILL, REFRESH
from dlm_jax.decode.runner import Rows, Runner


@dataclasses.dataclass(frozen=True)
class Event:
    """What one forward changed in one row.

    Attributes:
      forward: forwards of this row after prefill, this one included.
      kind: ledger kind of the forward.
      row: index of the prompt.
      numbers: of the tokens, 0 for the first after the prompt.
      tokens: their ids.
      committed: True for final tokens, False for drafts that may still change.
      origin: "drafted" or "autoregressive" for each token.
      lanes: number of the lane that wrote each token; empty where a decoder has no lanes.
    """

    forward: int
    kind: str
    row: int
    numbers: list[int]
    tokens: list[int]
    committed: bool
    origin: list[str]
    lanes: list[int] = dataclasses.field(default_factory=list)


def watch(runner: Runner, rows: Rows, count: int) -> Iterator[Event]:
    """Steps a batch to its end and yields what changed in its first `count` rows."""
    inside = np.arange(rows.request.capacity) < np.asarray(rows.request.max_new_tokens)[:, None]
    before = None
    while True:
        now = _seen(runner, rows, inside)
        if before is None:
            before = {**now, "at": np.full_like(now["at"], -1), "forwards": np.zeros_like(now["forwards"]),
                      "drafts": np.full_like(now["drafts"], -1)}
        for row in range(count):
            yield from _changes(row, *({name: value[row] for name, value in x.items()} for x in (before, now)))
            if ((now["at"][row] >= 0) & (before["at"][row] < 0)).any():
                now["drafts"][row] = -1  # what is still drafted after a commit is shown again
        if rows.done.all():
            return
        before, rows = now, runner.step(rows)


def _seen(runner, rows, inside) -> dict[str, np.ndarray]:
    drafts, shown = runner.provisional(rows)
    canvas, counts = rows.state.canvas, rows.state.counts
    lanes = runner.decoder.lanes(rows.state)
    lanes = np.zeros((len(shown), 0), int) if lanes is None else np.asarray(lanes)
    return {"lanes": lanes, "tokens": np.asarray(canvas.tokens),
            "at": np.where(inside, np.asarray(canvas.committed_at), -1),
            "origin": np.asarray(canvas.origin), "forwards": np.asarray(counts.forwards),
            "after_prefill": np.asarray(counts.after_prefill()), "drafts": np.where(shown & inside, drafts, -1)}


def _changes(row: int, before: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> Iterator[Event]:
    changed = now["forwards"] - before["forwards"]
    if not changed.any():
        return
    kinds = np.flatnonzero(changed).tolist()  # of a round of two, the draft's comes first
    if DENOISE in kinds:  # what fills the cache before it commits nothing
        kinds = [kind for kind in kinds if kind not in (PREFILL, REFRESH)]
    later = sum(int(changed[kind]) for kind in kinds[1:] if kind != GUIDE)
    event = lambda which, *rest: Event(
        int(now["after_prefill"]) - later * (which == 0), KINDS[kinds[which]], row, *rest)
    lanes = lambda numbers: now["lanes"][numbers].tolist() if now["lanes"].size else []
    fresh = np.flatnonzero((now["at"] >= 0) & (before["at"] < 0))
    drafted = np.flatnonzero((now["drafts"] >= 0) & (now["drafts"] != before["drafts"]))
    if drafted.size:
        yield event(0, drafted.tolist(), now["drafts"][drafted].tolist(), False, ["drafted"] * drafted.size,
                    lanes(drafted))
    if fresh.size:
        yield event(-1, fresh.tolist(), now["tokens"][fresh].tolist(), True,
                    [ORIGINS[int(o)] for o in now["origin"][fresh]], lanes(fresh))
