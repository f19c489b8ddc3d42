"""One ledger for every decoder: what was computed for a row, and what came of it.

Tokens per forward (TPF) = committed tokens, up to and including EOS, over the model forwards that could commit any:
those after prefill, and the prefill where its output is a token, so that autoregression has exactly 1. A guide's
forwards are counted apart. Never a prompt token, never padding.

Letters: B batch, J kinds of forward.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

KINDS = ("prefill", "denoise", "draft", "verify", "decode", "guide", "refresh", "commit")
PREFILL, DENOISE, DRAFT, VERIFY, DECODE, GUIDE, REFRESH, COMMIT = range(len(KINDS))


@struct.dataclass
class Counts:
    """Running counts inside a decoding loop.

    Attributes:
      forwards: (B, J) int32 forwards by kind.
      positions: (B, J) int32 query positions evaluated by kind, padding excluded.
      tallies: name -> (B,) int32, what else a decoder counts.
    """

    forwards: Array
    positions: Array
    tallies: dict[str, Array] = struct.field(default_factory=dict)

    @classmethod
    def zeros(cls, batch: int) -> "Counts":
        """Returns empty counts for `batch` rows."""
        return cls(jnp.zeros((batch, len(KINDS)), jnp.int32), jnp.zeros((batch, len(KINDS)), jnp.int32))

    def add(self, kind: Array | int, positions: Array, active: Array) -> "Counts":
        """Counts one forward.

        Args:
          kind: () or (B,) int32 index into `KINDS`.
          positions: (B,) int32 query positions evaluated.
          active: (B,) bool, False for rows that were only padding.
        """
        one = jax.nn.one_hot(jnp.broadcast_to(kind, active.shape), len(KINDS), dtype=jnp.int32) * active[:, None]
        return self.replace(forwards=self.forwards + one, positions=self.positions + one * positions[:, None])

    def after_prefill(self) -> Array:
        """Returns (B,) int32 model forwards so far, prefill and guide excluded."""
        return jnp.sum(self.forwards, axis=1) - self.forwards[:, PREFILL] - self.forwards[:, GUIDE]


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Final counts of a generation, on the host.

    Attributes:
      forwards: kind -> (B,) int array.
      positions: kind -> (B,) int array of query positions evaluated.
      committed: (B,) int array of tokens, up to and including EOS.
      yielding: (B,) int array of prefills whose output was a token, 0 or 1.
      tallies: name -> (B,) int array, what else a decoder counts, see its `tallies`.
    """

    forwards: dict[str, np.ndarray]
    positions: dict[str, np.ndarray]
    committed: np.ndarray
    yielding: np.ndarray
    tallies: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, counts: Counts, committed: np.ndarray, yielding: np.ndarray, rows: np.ndarray) -> "Ledger":
        """Takes the chosen rows of device counts to the host.

        Args:
          counts: of B rows.
          committed, yielding: (R,) int of the chosen rows, see the class.
          rows: (R,) int numbers of the chosen rows.
        """
        forwards, positions = np.asarray(counts.forwards)[rows], np.asarray(counts.positions)[rows]
        by_kind = lambda x: {kind: x[:, j] for j, kind in enumerate(KINDS)}
        tallies = {name: np.asarray(x)[rows] for name, x in counts.tallies.items()}
        return cls(by_kind(forwards), by_kind(positions), committed, yielding, tallies)

    @classmethod
    def concatenate(cls, ledgers: list["Ledger"]) -> "Ledger":
        """Joins the rows of several ledgers."""
        join = lambda get: {name: np.concatenate([get(x)[name] for x in ledgers]) for name in get(ledgers[0])}
        return cls(join(lambda x: x.forwards), join(lambda x: x.positions),
                   *(np.concatenate([getattr(x, name) for x in ledgers]) for name in ("committed", "yielding")),
                   join(lambda x: x.tallies))

    def after_prefill(self) -> np.ndarray:
        """Returns (B,) model forwards after prefill, guide excluded."""
        return sum(self.forwards[kind] for kind in KINDS if kind not in ("prefill", "guide"))

    def committing(self) -> np.ndarray:
        """Returns (B,) model forwards that could commit tokens."""
        return self.after_prefill() + self.yielding

    def tokens_per_forward(self) -> float:
        """Returns all committed tokens over all model forwards that could commit any, summed over rows."""
        forwards = int(self.committing().sum())
        return float(self.committed.sum()) / forwards if forwards else float("nan")

    def totals(self) -> dict[str, int]:
        """Returns forwards by kind summed over rows, zero kinds left out."""
        return {kind: int(x.sum()) for kind, x in self.forwards.items() if x.any()}
