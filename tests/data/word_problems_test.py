"""The generated task: right by its own arithmetic, reproducible, and split without leaks."""

import re

import pytest

from dlm_jax.data import word_problems
from dlm_jax.data.sources import parse_row


def test_same_seed_same_rows_and_another_seed_others():
    first = word_problems.generate(200, seed=3)
    assert first == word_problems.generate(200, seed=3)
    assert first[:50] == word_problems.generate(50, seed=3)
    assert {row["question"] for row in first} != {row["question"] for row in word_problems.generate(200, seed=4)}


TASKS = pytest.mark.parametrize("stories", [word_problems.STORIES, word_problems.SHORT], ids=["three", "short"])


@TASKS
@pytest.mark.parametrize("split", word_problems.SPLITS)
def test_every_calculation_is_right_and_the_last_one_is_the_answer(split, stories):
    for row in word_problems.generate(400, seed=1, split=split, stories=stories):
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", row["answer"])
        assert len(steps) == len(stories[0].calculations)
        for left, sign, right, result in steps:
            left, right = int(left), int(right)
            if sign == "/":
                assert left % right == 0
            value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
            assert value == int(result) > 0
        assert parse_row(row).answer == steps[-1][-1]


@TASKS
def test_splits_share_no_question_and_no_calculation_chain_whatever_their_seeds(stories):
    def chains(split, seed):
        rows = word_problems.generate(1500, seed=seed, split=split, stories=stories)
        sums = {tuple(re.findall(r"\d+[-+*/]\d+=\d+", row["answer"])) for row in rows}
        return {row["question"] for row in rows}, sums

    train_questions, train_chains = chains("train", 0)
    for seed in (0, 1):
        questions, sums = chains("test", seed)
        assert not questions & train_questions
        # every story has its own calculations, so equal sums mean equal stories
        assert not sums & train_chains


def test_short_problems_ask_for_no_calculation_unseen_in_training():
    def calculations(count, split):
        rows = word_problems.generate(count, split=split, stories=word_problems.SHORT)
        return {found for row in rows for found in re.findall(r"\d+[-+*/]\d+=\d+", row["answer"])}

    assert not calculations(3000, "test") - calculations(30_000, "train")


@TASKS
def test_rows_are_all_different_and_every_story_occurs(stories):
    rows = word_problems.generate(500, seed=0, stories=stories)
    assert len({row["question"] for row in rows}) == 500
    for story in stories:
        opening = story.lines[0].split("{")[0]
        assert any(row["answer"].startswith(opening) for row in rows)


def test_one_chain_in_eight_is_held_out_whoever_it_is_told_about():
    story, held = word_problems.STORIES[0], []
    for a in range(1, 401):
        numbers = dict(a=a, b=2, c=3, d=4)
        held.append(word_problems.split_of(story, numbers) == "test")
        assert word_problems.split_of(story, dict(reversed(numbers.items()))) == word_problems.SPLITS[held[-1]]
    assert 30 < sum(held) < 75


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="split 'dev'"):
        word_problems.generate(3, split="dev")
    with pytest.raises(ValueError, match="count = 0"):
        word_problems.generate(0)
