"""How sure a share or a ratio is that some questions gave: percentile bootstrap over questions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
_AT_ONCE = 1 << 20  # draws held at a time


def bootstrap(
    values: Sequence[float], per: Sequence[float] | None = None, *, samples: int = 2000, level: float = LEVEL,
    seed: int = 0,
) -> list[float] | None:
    """Returns the interval that holds the middle of what resampled questions give.

    Args:
      values: (N,) one a question.
      per: (N,) what a question's value is divided by; the ratio is that of the sums (micro), as tokens per forward is.
        None counts questions: the mean.
      samples: times that N questions are drawn, with replacement.
      level: of confidence.
      seed: of the draws.

    Returns:
      Its ends; None where there is nothing to divide by.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", Sec. 13.3.
    """
    over = np.asarray(values, float)
    under = np.ones_like(over) if per is None else np.asarray(per, float)
    if not over.size or not under.sum() > 0:
        return None
    random, found = np.random.default_rng(seed), []
    for start in range(0, samples, max(1, _AT_ONCE // over.size)):
        count = min(max(1, _AT_ONCE // over.size), samples - start)
        drawn = random.integers(over.size, size=(count, over.size))
        sums = under[drawn].sum(1)
        found.append(over[drawn].sum(1)[sums > 0] / sums[sums > 0])
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return [float(low), float(high)]


def macro(values: Sequence[float], per: Sequence[float]) -> float | None:
    """Returns the mean of the questions' own ratios, those aside that divide by nothing; None where all do.

    Args:
      values, per: (N,) as in `bootstrap`.
    """
    ratios = [value / by for value, by in zip(values, per) if by]
    return float(np.mean(ratios)) if ratios else None


def by_group(values: Sequence[float], groups: Sequence[str]) -> dict[str, float]:
    """Returns the mean of every group's values, in the groups' alphabetical order.

    Args:
      values: (N,) one a question.
      groups: (N,) what each belongs to.
    """
    return {group: float(np.mean([value for value, name in zip(values, groups) if name == group]))
            for group in sorted(set(groups))}
