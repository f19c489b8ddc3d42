"""The parts of AsyncLane one by one: boundaries from tokenizers, the lane table, diagnostics."""

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.decode.asynclane import (
    BOUNDARIES, AsyncLane, Boundary, code_boundary, interval_boundary, math_boundary, punctuation_boundary)
from dlm_jax.decode.asynclane import boundary as boundaries
from dlm_jax.decode.asynclane import lanes as table
from dlm_jax.decode.asynclane.state import Rooms
from dlm_jax.decode.request import make

TEXTS = ["<pad>", ".", " .", "。", "2.5", "3.", "a", "7", "x7", "7x", "\n", ");\n", "(", "([", ")", '"', '""', ",",
         " =", " and", "band", "!", "。\n", "1", "?", ";"]


class Tokenizer:
    """Any object that decodes ids will do."""

    all_special_ids = (0,)

    def __init__(self, texts=TEXTS):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


def named(ids):
    return [TEXTS[i] for i in ids]


def test_math_boundary_reads_any_tokenizer():
    found = math_boundary(Tokenizer())
    assert named(found.delimiters) == [".", " .", "。", "。\n"]
    assert named(found.numeric_delimiters) == [".", " ."]
    assert named(found.digit_end) == ["2.5", "7", "x7", "1"]
    assert named(found.digit_start) == ["2.5", "3.", "7", "7x", "1"]
    assert found.numeric_rule == "left"


def test_punctuation_adds_to_it():
    found = punctuation_boundary(Tokenizer())
    assert named(found.delimiters) == [".", " .", "。", ");\n", ",", "!", "。\n", "?", ";"]
    assert named(found.numeric_delimiters) == [".", " .", ","]


def test_code_boundary_counts_brackets():
    found = code_boundary(Tokenizer())
    assert named(found.delimiters) == ["\n", ");\n", "。\n"]
    assert named(found.open) == ["(", "([", "(["] and named(found.close) == [");\n", ")"]
    assert named(found.quote) == ['"'] and named(found.no_fork_after) == [",", " =", " and"]


@pytest.mark.parametrize("rule", sorted(BOUNDARIES))
def test_a_tokenizer_without_delimiters_is_refused(rule):
    with pytest.raises(ValueError, match=f"the {rule} boundary splits behind .* this tokenizer has none"):
        BOUNDARIES[rule](Tokenizer(["<pad>", "a", "b"]))
    with pytest.raises(ValueError, match=f"the {rule} boundary"):
        AsyncLane(boundary=rule).reading(Tokenizer(["<pad>", "a"]))


def test_a_name_waits_for_its_tokenizer():
    assert AsyncLane(boundary="code").reading(Tokenizer()).boundary == code_boundary(Tokenizer())
    own = AsyncLane(boundary=Boundary((3,)))
    assert own.reading(Tokenizer()) is own
    with pytest.raises(ValueError, match="tokens = 0"):
        interval_boundary(0)


@pytest.mark.parametrize("text, found", [
    (["a", ".", "7", ".", "a"], [1]),  # behind a digit it may be a decimal point
    (["a", ".", "?", "."], [1, 3]),
    ([None, "."], []),  # nobody knows what will stand before it
])
def test_numbers_are_not_split(text, found):
    assert where(math_boundary(Tokenizer()), text) == found


@pytest.mark.parametrize("text, found", [
    (["a", "\n", "(", "a", "\n", ")", "a", "\n"], [1, 7]),
    (["([", "\n", ")", "\n", ")", "\n"], [5]),
    ([")", "a", "\n", "(", "a", "\n"], [2]),  # what was never opened closes nothing
    (["(", "a", ");\n"], [2]),
    (['"', "a", "\n", '"', "\n"], [4]),
    (["a", " =", "\n", "a", "\n"], [4]),
    ([None, "\n", "a", "\n"], [3]),
])
def test_code_is_split_behind_complete_statements(text, found):
    assert where(code_boundary(Tokenizer()), text) == found


def where(rule: Boundary, text: list) -> list[int]:
    """Places of a text, None for a mask, where a lane may be split; the prompt ends in an "a"."""
    ids = [0 if piece is None else TEXTS.index(piece) for piece in text]
    request = make([[TEXTS.index("a")]], max_new_tokens=len(ids), capacity=len(ids))
    flags = boundaries.valid(boundaries.classes(rule, len(TEXTS)), request, jnp.array([ids]),
                             jnp.array([[piece is not None for piece in text]]))
    return np.flatnonzero(flags[0]).tolist()


def test_the_last_boundary_before_an_end_splits():
    rule = boundaries.classes(Boundary(delimiters=(1,)), 4)
    filled = jnp.ones((1, 8), bool)
    delimiters, ends = jnp.array([[0, 1, 0, 1, 0, 0, 1, 0]], bool), jnp.array([[0, 0, 0, 0, 0, 1, 0, 0]], bool)
    at = lambda start, length, rule=rule: int(boundaries.split(
        rule, delimiters, filled, ends, jnp.array([start]), jnp.array([length]))[0])
    assert at(0, 8) == 4 and at(2, 6) == 2 and at(0, 3) == 2 and at(4, 4) == 0 and at(6, 2) == 1
    fixed = boundaries.classes(Boundary(interval=3), 4)
    assert at(0, 8, fixed) == 3 and at(0, 2, fixed) == 0 and at(3, 5, fixed) == 0


def test_seats_put_the_lane_that_generates_first():
    lanes = table.Lanes.root(jnp.array([8, 8]), jnp.int32(4), 8)
    fill = lambda *values: jnp.array(values, jnp.int32)
    lanes = lanes.put(fill(1, 1), jnp.array([True, True]), role=fill(1, 1), state=fill(1, 1))
    lanes = lanes.put(fill(2, 2), jnp.array([True, True]), role=fill(0, 1), state=fill(1, 1))
    lanes = lanes.put(fill(0, 0), jnp.array([True, True]), state=fill(3, 3))
    seats = table.seats(lanes, jnp.array([True, True]), 4)
    assert seats.number[:, :2].tolist() == [[2, 1], [1, 2]] and seats.generates.tolist() == [True, False]
    assert seats.active.tolist() == [[True, True, False, False]] * 2
    assert not table.seats(lanes, jnp.array([False, True]), 4).active[0].any()


def test_lengths_of_known_runs():
    known = jnp.array([[1, 1, 0, 1, 1, 1, 1, 0]], bool)
    start, length = jnp.array([[0, 1, 2, 3, 3, 8]]), jnp.array([[4, 1, 4, 2, 5, 0]])
    assert table.run_length(known, start, length).tolist() == [[2, 1, 0, 2, 4, 0]]


def test_events_are_counted_once():
    group = jnp.array([[1, 1, 2, 1], [3, 4, 5, 3]])
    where = jnp.array([[1, 1, 1, 0], [1, 1, 0, 1]], bool)
    assert table.events(group, where).tolist() == [2, 2]


def test_ablations_are_what_they_say_whatever_else_is_changed():
    cache = decode.asynclane.Compact(refresh_interval=4)
    for made in (decode.asynclane.without_reuse, decode.asynclane.without_both):
        assert made("math", cache=cache).cache == cache.replace(reuse_refresh_logits=False)
    for made in (decode.asynclane.without_lookahead, decode.asynclane.without_both):
        assert made("math", lookahead=16).lookahead == 0


def test_rooms_are_buckets():
    assert Rooms.of(32, 32, 8) == Rooms(32, 32, 8) and Rooms.of(9, 0, 3) == Rooms(12, 0, 4)
    assert Rooms.of(64, 5, 1).within(16) == Rooms(16, 8, 1)
    assert Rooms(8, 8, 8).counts == (1, 2, 4, 8) and Rooms(8, 8, 6).counts == (1, 2, 4, 6)
    assert Rooms(8, 8, 1).counts == (1,) and Rooms(8, 8, 2).counts == (1, 2)
