"""How far the future ran ahead of the past, read from the lane tables of a finished generation.

Letters: B prompts, M lanes of a table.

Source: AsyncLane (arXiv 2606.08411), Eqs. 7 and 13, Tables 4 and 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from dlm_jax.decode.asynclane.lanes import COMMIT, EMPTY, ENDS, FORK, GENERATE, REFINE, ROLES
from dlm_jax.decode.ledger import Ledger

Record = Mapping[str, np.ndarray]  # of `Generation.record`


@dataclasses.dataclass(frozen=True)
class Lane:
    """One lane of an answer; fields as of `lanes.Lanes`, with role and end by name."""

    number: int
    role: str
    start: int
    length: int
    step: int
    parent: int
    group: int
    end: str
    valid: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """Table 4 and the split columns of Table 6, over all rows.

    Attributes:
      fork_pairs: lanes forked into a lane that refines and one that generates.
      pairs_measured: those whose prefix was finished and whose continuation had begun.
      average_lead: iterations from a continuation's first to its prefix's last.
      positive_lead_ratio: share of pairs that lead.
      overlap_ratio: mean share of a prefix's iterations in which its continuation ran, too.
      splits: tokens of each prefix, in order.
    """

    fork_pairs: int
    pairs_measured: int
    average_lead: float
    positive_lead_ratio: float
    overlap_ratio: float
    splits: tuple[int, ...]

    @property
    def split_quartiles(self) -> list[float]:
        """The 25th, 50th and 75th percentile of the splits, none where there are none."""
        return np.percentile(self.splits, (25, 50, 75)).tolist() if self.splits else []


def history(record: Record, row: int) -> list[Lane]:
    """Returns the lanes of a prompt's answer in order of creation."""
    of = {name: values[row] for name, values in record.items() if values.ndim == 2}
    made = int(np.sum(of.pop("state") != EMPTY))
    number = {name: [int(x) for x in values[:made]] for name, values in of.items()}
    number |= {"role": [ROLES[i] for i in number["role"]], "end": [ENDS[i] for i in number["end"]]}
    return [Lane(number=i, **{name: values[i] for name, values in number.items()}) for i in range(made)]


def diagnose(record: Record) -> Diagnostics:
    """Measures the fork pairs of all rows.

    Args:
      record: of a `Generation`.
    """
    pairs = [pair for row in range(len(record["iterations"])) for pair in _pairs(record, row)]
    measured = [(r, c, total) for r, c, total in pairs if r.last and c.first]
    lead = [r.last - c.first for r, c, _ in measured]
    overlap = [max(0, min(r.last, c.last or total) - c.first) / max(1, r.last - r.first) for r, c, total in measured]
    mean = lambda values: float(np.mean(values)) if values else 0.0
    return Diagnostics(len(pairs), len(measured), mean(lead), mean([x > 0 for x in lead]), mean(overlap),
                       tuple(split for row in range(len(record["iterations"])) for split in _splits(record, row)))


def _pairs(record: Record, row: int) -> Iterator[tuple[Lane, Lane, int]]:
    found = history(record, row)
    for lane in found:
        if lane.role == ROLES[REFINE]:  # its continuation is the lane made with it
            yield lane, found[lane.number + 1], int(record["iterations"][row])


def _splits(record: Record, row: int) -> Iterator[int]:
    found = history(record, row)
    children = {lane.parent: lane for lane in reversed(found)}  # the first child of each
    for lane in found:
        if lane.role == ROLES[GENERATE] and lane.end == ENDS[FORK]:
            yield children[lane.number].length
        elif lane.role == ROLES[GENERATE] and lane.end == ENDS[COMMIT]:
            yield lane.valid


def model_calls(ledger: Ledger) -> np.ndarray:
    """Returns (B,) model calls by Eq. 13, those of grouped execution; the ledger's own forwards are the executed ones.

    Args:
      ledger: of an AsyncLane generation. Lanes that share a window are one group, and a pass over all that a shared
        cache keeps is a refresh whose logits are used.
    """
    of = ledger.tallies
    return ledger.forwards["prefill"] + of["groups"] + ledger.forwards["refresh"] - of["reuse"]
