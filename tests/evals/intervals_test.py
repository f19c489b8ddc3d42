"""Bootstrap intervals: known cases, coverage of the truth, ratios of sums, and the same numbers every time."""

import numpy as np
import pytest

from dlm_jax.evals import intervals


def test_known_cases():
    assert intervals.bootstrap([1.0] * 10) == [1.0, 1.0]
    assert intervals.bootstrap([]) is None and intervals.bootstrap([1.0, 2.0], [0.0, 0.0]) is None
    assert intervals.bootstrap([0, 1] * 50) == intervals.bootstrap([0, 1] * 50)
    low, high = intervals.bootstrap([0, 1] * 200)
    assert [0.5 - low, high - 0.5] == pytest.approx([1.96 * 0.5 / 20] * 2, rel=0.15)
    assert intervals.bootstrap([2, 4, 6], [1, 2, 3]) == [2.0, 2.0]  # every ratio of sums is 2


def test_the_truth_lies_inside_as_often_as_promised():
    random = np.random.default_rng(0)
    inside = 0
    for seed in range(200):
        low, high = intervals.bootstrap(random.random(60) < 0.7, samples=500, seed=seed)
        inside += low <= 0.7 <= high
    assert 0.89 <= inside / 200 <= 0.99


def test_micro_and_macro():
    assert intervals.macro([1, 9, 5], [1, 3, 0]) == 2.0  # (1 + 3) / 2
    assert intervals.macro([1], [0]) is None
    assert intervals.by_group([1, 0, 1], ["b", "b", "a"]) == {"a": 1.0, "b": 0.5}
