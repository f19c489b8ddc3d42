"""Answers are judged by the number after their last ####, as numbers."""

import pytest

from dlm_jax.data import word_problems
from dlm_jax.data.sources import parse_row
from dlm_jax.evals import tasks


@pytest.mark.parametrize("left, right, same", [
    ("18", "18", True), ("18.00", "18", True), ("$1,800.", "1800", True), ("-3", "3", False),
    ("18 apples", "18", False), ("7%", "7", True), ("yes", "yes", True), ("yes", "no", False), (None, "1", False),
    ("1", None, False), (None, None, False)])
def test_same_answer(left, right, same):
    assert tasks.same_answer(left, right) is same


def test_a_reference_judges_itself_right_and_another_rows_wrong():
    rows = [parse_row(row) for row in word_problems.generate(50, seed=0, split="test")]
    task = tasks.task_of("words", rows)
    for row, other in zip(rows, rows[1:]):
        assert task.judge(row.response, row)
        assert task.judge(other.response, row) == (row.answer == other.answer)
        assert not task.judge(row.response.split("####")[0], row)


def test_only_the_last_mark_counts():
    row = parse_row({"question": "q", "answer": "#### 4"})
    assert tasks.exact_match("#### 5\n#### 4", row) and not tasks.exact_match("#### 4\n#### 5", row)


def test_rows_without_a_final_answer_are_judged_whole():
    rows = [parse_row({"query": "q", "response": "a  b"}), parse_row({"query": "q", "response": "#### 1"})]
    task = tasks.task_of("mixed", rows)
    assert task.judge("a b\n", rows[0]) and not task.judge("a", rows[0]) and "whole" in task.metric


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        tasks.task_of("none", [])
