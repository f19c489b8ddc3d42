"""The clock: medians of samples taken in turn, warm-ups left out; and what a file of results says of its origin."""
import re

import jax
import pytest

from pallas_kernels import timing
from pallas_kernels.timing import Entry


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls move: `clock(name, seconds...)` makes a function that takes these."""
    now, log = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def function(name, *seconds):
        left = iter(seconds)

        def call():
            log.append(name)
            now[0] += next(left)
        return call
    function.log = log
    return function


def test_seconds_are_medians_of_turns_after_a_warm_up(clock):
    found = timing.seconds({"a": clock("a", 100, 1, 2, 30), "b": clock("b", 100, 5, 5, 5)}, 3)
    assert found == {"a": 2, "b": 5} and clock.log == ["a", "b"] * 4
    assert timing.seconds({"a": clock("a", 4, 2)}, 2, warm_up=False) == {"a": 3}


def test_rows_have_the_best_and_the_median_of_a_call(clock):
    waited = []
    entries = [Entry({"form": "a"}, clock("a", 9, 9, 1, 1, 2, 4, 8, 8), waited.append),
               Entry({"form": "b", "failed": "no compiler"}, None)]
    first, second = timing.measure(entries, 3, 2)
    assert (first["best_ms"], first["median_ms"]) == (1000, 3000) and len(waited) == 4
    assert second == {"form": "b", "failed": "no compiler"}


def test_what_fails_says_so_in_its_row_or_is_passed_on(clock):
    def fail():
        raise MemoryError("out of | memory")
    good, bad = timing.measure([Entry({}, clock("a", 1, 1)), Entry({}, fail)], 1, 1)
    assert good["median_ms"] == 1000 and bad == {"failed": "MemoryError: out of / memory"}
    with pytest.raises(MemoryError):
        timing.seconds({"bad": fail}, 1)


def test_a_record_names_command_date_versions_and_device():
    found = timing.record("python -m x")
    assert found["command"] == "python -m x"
    environment = found["environment"]
    assert environment["jax"] == jax.__version__ and re.fullmatch(r"20\d\d-\d\d-\d\d", environment["date"])
    assert (environment["platform"], environment["devices"]) == ("cpu", jax.device_count())
