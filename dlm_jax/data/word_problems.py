"""A small real task inside the package: worked arithmetic word problems in GSM8K's row format.

Every row is `{"question": ..., "answer": ...}`; the answer works the problem line by line and ends in
`#### number`. A row belongs to the train or the test split by a hash of its arithmetic (story and numbers, not
names and things), so no calculation chain of the test split is ever seen in training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable

SPLITS = ("train", "test")
_TEST_SHARE = 8  # one calculation chain in so many is held out

_PEOPLE = (
    ("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"), ("Zoe", "she"), ("Leo", "he"),
    ("Ivy", "she"), ("Sam", "he"), ("Eva", "she"), ("Max", "he"), ("Amy", "she"), ("Dan", "he"),
)
_THINGS = ("apples", "books", "coins", "pens", "shells", "stamps", "cards", "eggs", "balls", "cups")

Numbers = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Story:
    """A kind of problem: how numbers are drawn, and the texts they are put into.

    Attributes:
      name: what the story is called in a row's signature.
      draw: random source -> the numbers named in the texts; `answer` is the result.
      questions: phrasings of the question.
      lines: the worked solution, one calculation a line.
    """

    name: str
    draw: Callable[[random.Random], Numbers]
    questions: tuple[str, ...]
    lines: tuple[str, ...]


def _gain_and_give(rng: random.Random) -> Numbers:
    a, b, c = rng.randint(4, 30), rng.randint(2, 9), rng.randint(2, 9)
    c = min(c, a + b - 1)
    return dict(a=a, b=b, c=c, x=a + b, answer=a + b - c)


def _packs(rng: random.Random) -> Numbers:
    a, b, c = rng.randint(2, 6), rng.randint(2, 6), rng.randint(2, 9)
    return dict(a=a, b=b, c=c, x=a * b, answer=a * b + c)


def _spend(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 6), rng.randint(2, 6)
    c = rng.randint(1, min(9, a * b - 1))
    return dict(a=a, b=b, c=c, x=a * b, answer=a * b - c)


def _together(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 12), rng.randint(2, 9)
    return dict(a=a, b=b, x=a + b, answer=a + b + a)


def _share(rng: random.Random) -> Numbers:
    c, each = rng.randint(2, 5), rng.randint(2, 6)
    b = rng.randint(1, min(9, c * each - 1))
    return dict(a=c * each - b, b=b, c=c, x=c * each, answer=each)


STORIES = (
    Story("gain and give", _gain_and_give, (
        "{name} has {a} {things}. {Pro} finds {b} more and gives {c} to {other}. How many {things} are left?",
        "{name} owns {a} {things}, buys {b} more and then loses {c}. How many {things} does {pro} have now?",
    ), (
        "First {name} has {a}+{b}={x} {things}.",
        "Then {pro} has {x}-{c}={answer} {things}.",
    )),
    Story("packs", _packs, (
        "{name} buys {a} boxes with {b} {things} each. {Pro} already had {c} {things}. How many {things} in all?",
        "There are {b} {things} in each of {a} bags. {name} adds {c} {things}. How many {things} are there?",
    ), (
        "The boxes hold {a}*{b}={x} {things}.",
        "In all there are {x}+{c}={answer} {things}.",
    )),
    Story("spend", _spend, (
        "{name} earns ${a} an hour and works {b} hours. {Pro} spends ${c}. How many dollars are left?",
        "{name} works {b} hours for ${a} an hour, then pays {other} ${c}. How many dollars does {pro} keep?",
    ), (
        "{name} earns {a}*{b}={x} dollars.",
        "Then {pro} has {x}-{c}={answer} dollars left.",
    )),
    Story("together", _together, (
        "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} do they have together?",
        "{other} found {b} {things} more than {name}, who found {a}. How many {things} did both find?",
    ), (
        "{other} has {a}+{b}={x} {things}.",
        "Both have {a}+{x}={answer} {things}.",
    )),
    Story("share", _share, (
        "{name} has {a} {things} and gets {b} more. {Pro} shares all among {c} friends. How many does each get?",
        "{a} {things} and {b} more are shared by {c} friends of {name}. How many {things} for each?",
    ), (
        "There are {a}+{b}={x} {things}.",
        "Each friend gets {x}/{c}={answer} {things}.",
    )),
)


def split_of(story: Story, numbers: Numbers) -> str:
    """Returns the split a calculation chain belongs to, whoever it is told about.

    Args:
      story: the kind of problem.
      numbers: its numbers.
    """
    signature = story.name + "".join(f" {k}={v}" for k, v in sorted(numbers.items()))
    held_out = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:8], "big") % _TEST_SHARE == 0
    return SPLITS[held_out]


def tell(story: Story, numbers: Numbers, rng: random.Random) -> dict[str, str]:
    """Puts a calculation chain into words.

    Args:
      story: the kind of problem.
      numbers: its numbers.
      rng: source of names, things and phrasing.

    Returns:
      A row {"question", "answer"}.
    """
    (name, pro), (other, _) = rng.sample(_PEOPLE, 2)
    words = dict(numbers, name=name, pro=pro, Pro=pro.capitalize(), other=other, things=rng.choice(_THINGS))
    lines = [*story.lines, "#### {answer}"]
    return {"question": rng.choice(story.questions).format(**words), "answer": "\n".join(lines).format(**words)}


def generate(count: int, *, seed: int = 0, split: str = "train") -> list[dict[str, str]]:
    """Makes rows of the task, all different.

    Args:
      count: number of rows.
      seed: the same seed gives the same rows, on any machine.
      split: "train" or "test"; the two share no calculation chain, whatever their seeds.

    Returns:
      Rows {"question", "answer"}.

    Raises:
      ValueError: an unknown split, or a count that is not positive.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {list(SPLITS)}")
    if count < 1:
        raise ValueError(f"count = {count}: ask for at least 1 row")
    rng = random.Random(f"word problems/{split}/{seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        story = rng.choice(STORIES)
        numbers = story.draw(rng)
        if split_of(story, numbers) == split:
            row = tell(story, numbers, rng)
            rows.setdefault(row["question"], row)
    return list(rows.values())
