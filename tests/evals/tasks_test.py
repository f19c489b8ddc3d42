"""Answers are judged by their final result, wherever it is said, as numbers where it is one."""

import pytest

from dlm_jax.data import word_problems
from dlm_jax.data.sources import parse_row
from dlm_jax.evals import tasks


@pytest.mark.parametrize("left, right, same", [
    ("18", "18", True), ("18.00", "18", True), ("$1,800.", "1800", True), ("-3", "3", False),
    ("18 apples", "18", False), ("7%", "7", True), ("yes", "yes", True), ("yes", "no", False), (None, "1", False),
    ("1", None, False), (None, None, False),
    ("18.", "18", True), ("18", "18.00", True), ("1800", "1,800", True),
    ("-$5", "−5", True), ("$-5", "-5", True), (r"\$1{,}800", "1800", True), (r"7\%", "7", True), ("18.5", "18", False),
    (r"\frac{3}{4}", "0.75", True), ("3/4", r"\dfrac{3}{4}", True), ("1/0", "1", False), ("1e999999999", "1", False),
    ("nan", "nan", True), ("Yes", "yes", True), ("(B)", "B", True), ("$1,800.00", "1800", True),
    ("b.", "(B)", True), ("(C)", "B", False),
    ("Answer 3", "answer3", True), ("Answer3", "Answer2", False), ("**18**", "18", True), ("", "18", False),
    (r"\text{(B)}", "B", True), ("x^2 + 1", "x^2+1", False), ("1 800", "1800", True)])
def test_same_answer(left, right, same):
    assert tasks.same_answer(left, right) is same


def test_a_reference_judges_itself_right_and_another_rows_wrong():
    rows = [parse_row(row) for row in word_problems.generate(50, seed=0, split="test")]
    task = tasks.task_of("words", rows, ("hash",))
    assert task.metric == "exact match of the number after ####"
    for row, other in zip(rows, rows[1:]):
        assert task.judge(row.response, row) == (True, "hash")
        assert task.judge(other.response, row) == (row.answer == other.answer, "hash")
        assert task.judge(row.response.split("####")[0], row) == (False, None)


def test_only_the_last_mark_counts():
    row = parse_row({"question": "q", "answer": "#### 4"})
    assert tasks.exact_match("#### 5\n#### 4", row) and not tasks.exact_match("#### 4\n#### 5", row)


def test_rows_without_a_final_answer_are_judged_whole():
    rows = [parse_row({"query": "q", "response": "a  b"}), parse_row({"query": "q", "response": "#### 1"})]
    task = tasks.task_of("mixed", rows)
    assert task.judge("a b\n", rows[0]) and not task.judge("a", rows[0]) and "whole" in task.metric


NUMBER = parse_row({"question": "q", "answer": "9 * 2 = 18\n#### 18"})
LETTER = parse_row({"query": "q", "response": "Rock erodes. The answer is (B)."})
LABEL = parse_row({"query": "q", "response": "The correct answer is Answer3"})


@pytest.mark.parametrize("row, text, verdict", [
    # GSM8K, as fine-tuned models, chat models and chain-of-thought prompts end it
    (NUMBER, "She sells 9 * 2 = <<9*2=18>>18 a day.\n#### 18", (True, "hash")),
    (NUMBER, "#### 17\nThe answer is 18.", (False, "hash")),
    (NUMBER, "Therefore, Janet makes $\\boxed{18}$ every day at the farmers' market.", (True, "boxed")),
    (NUMBER, "\\[ 9 \\times 2 = 18 \\]\nThe final answer is: $\\boxed{\\$18.00}$.", (True, "boxed")),
    (NUMBER, "So \\boxed{9 + 9 = \\boxed{18}} dollars", (True, "boxed")),
    (NUMBER, "16 - 3 - 4 = 9 and 9 * 2 = 18.\nThe final answer is 18", (True, "final_answer")),
    (NUMBER, "**Final Answer:** $18.00 per day, from 9 eggs at $2.", (True, "final_answer")),
    (NUMBER, "The final answer is 9 * 2 = 18.", (True, "final_answer")),
    (NUMBER, "She makes 9 * 2 = $18. The answer is 18.\n\n", (True, "answer_is")),
    (NUMBER, "The answer is 3.\nWait, that is wrong. The answer is $18.", (True, "answer_is")),
    (NUMBER, "The answer is 18.\nWait, that is wrong. The answer is 3.", (False, "answer_is")),
    (NUMBER, "### Answer:\n18 dollars", (True, "answer_is")),
    (NUMBER, "Janet makes 9 x 2 = $18 every day at the market.", (True, "last_number")),
    (NUMBER, "Janet makes 18 dollars, from 10-3 eggs.", (False, "last_number")),
    (NUMBER, "I do not know.", (False, None)),
    # multiple choice: MMLU-Pro's form, FlashDLM's labels, bare letters
    (LETTER, "Let's think step by step. Wind moves sand. The answer is (B).", (True, "answer_is")),
    (LETTER, "The answer is B: wind and water.", (True, "answer_is")),
    (LETTER, "Answer: (C) gravity", (False, "answer_is")),
    (LETTER, "\\boxed{\\text{B}}", (True, "boxed")),
    (LETTER, "Of the 4 options only B fits 2 facts", (True, "last_choice")),
    (LABEL, "It warms the hands.\nThe final answer is Answer3", (True, "final_answer")),
    (LABEL, "The final answer is [Answer3].", (True, "final_answer")),
    (LABEL, "The final answer is **Answer2**.", (False, "final_answer")),
    (LABEL, "so Answer3 makes most sense, I think", (True, "last_choice")),
])
def test_what_published_models_say(row, text, verdict):
    assert tasks.task_of("t", [row]).judge(text, row) == verdict


def test_references_may_be_bare_or_boxed():
    for response, right in (("18", "The answer is 18."), ("B", "(B)\n\nThe answer is B."),
                            ("so $x = \\boxed{\\frac{3}{4}}$", "hence \\boxed{\\tfrac{3}{4}} of it")):
        row = parse_row({"query": "q", "response": response})
        assert tasks.task_of("t", [row]).judge(right, row)
        assert not tasks.task_of("t", [row]).judge("The answer is 17.", row)
    # an answer that happens to be short is no final result for GSM8K's own rule
    assert "whole" in tasks.task_of("t", [parse_row({"query": "q", "response": "18"})], ("hash",)).metric


def test_the_order_is_the_callers():
    text = "#### 18\nThe answer is 17."
    assert tasks.task_of("t", [NUMBER]).judge(text, NUMBER) == (True, "hash")
    # references are read in the same order
    assert tasks.task_of("t", [NUMBER], ("answer_is", "hash")).judge(text, NUMBER) == (False, "answer_is")
    assert tasks.task_of("t", [NUMBER], ("answer_is", "hash")).judge("#### 18", NUMBER) == (True, "hash")


def test_unknown_extractors_are_refused():
    for names in ((), ("hash", "oracle")):
        with pytest.raises(ValueError, match=r"expected some of \['hash', 'boxed', 'final_answer', 'answer_is'"):
            tasks.task_of("t", [NUMBER], names)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        tasks.task_of("none", [])
