"""A small real task inside the package: worked arithmetic word problems in GSM8K's row format.

Every row is `{"question": ..., "answer": ...}`; the answer works the problem line by line and ends in
`#### number`. A row belongs to the train or the test split by a hash of its arithmetic (story and numbers, not
names and things), so no calculation chain of the test split is ever seen in training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence

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
      draw: random source -> the given numbers a, b, c, d.
      calculations: "left sign right" by the names of numbers, three at most; their results are x, y and z, and the last
        one is the answer.
      questions: phrasings of the question.
      lines: the worked solution, one calculation a line.
    """

    name: str
    draw: Callable[[random.Random], Numbers]
    calculations: tuple[str, ...]
    questions: tuple[str, ...]
    lines: tuple[str, ...]


# Many calculation chains made of few different calculations: a model cannot learn the chains by heart, and a
# held-out chain asks for nothing but steps that it has seen.


def _gain_and_give(rng: random.Random) -> Numbers:
    a, b, c, d = rng.randint(5, 60), rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    return dict(a=a, b=b, c=min(c, a + b - 1), d=d)


def _packs(rng: random.Random) -> Numbers:
    return dict(a=rng.randint(2, 9), b=rng.randint(2, 9), c=rng.randint(2, 20), d=rng.randint(2, 5))


def _wages(rng: random.Random) -> Numbers:
    a, b, d = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20)
    return dict(a=a, b=b, c=rng.randint(1, min(9, a * b - 1)), d=d)


def _together(rng: random.Random) -> Numbers:
    return dict(a=rng.randint(5, 40), b=rng.randint(2, 20), c=rng.randint(2, 9))


def _share(rng: random.Random) -> Numbers:
    c, each, d = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20)
    b = rng.randint(1, min(9, c * each - 1))
    return dict(a=c * each - b, b=b, c=c, d=d)


STORIES = (
    Story("gain and give", _gain_and_give, ("a+b", "x-c", "y+d"), (
        "{name} has {a} {things}. {Pro} finds {b} more, gives {c} to {other} and buys {d}. How many {things} now?",
        "{name} owns {a} {things}, gets {b}, loses {c} and finds {d}. How many {things} does {pro} have now?",
    ), (
        "First {name} has {a}+{b}={x} {things}.",
        "Then {pro} has {x}-{c}={y} {things}.",
        "At last {pro} has {y}+{d}={z} {things}.",
    )),
    Story("packs", _packs, ("a*b", "x+c", "y-d"), (
        "{name} buys {a} boxes with {b} {things} each. {Pro} had {c} {things} and loses {d}. How many {things} remain?",
        "There are {b} {things} in each of {a} bags. {name} adds {c} and takes {d}. How many {things} remain?",
    ), (
        "The boxes hold {a}*{b}={x} {things}.",
        "In all there are {x}+{c}={y} {things}.",
        "There remain {y}-{d}={z} {things}.",
    )),
    Story("wages", _wages, ("a*b", "x-c", "y+d"), (
        "{name} earns ${a} an hour for {b} hours, spends ${c} and finds ${d}. How many dollars does {pro} have?",
        "{name} works {b} hours for ${a} an hour, pays {other} ${c} and gets a tip of ${d}. How many dollars are left?",
    ), (
        "{name} earns {a}*{b}={x} dollars.",
        "Then {pro} has {x}-{c}={y} dollars.",
        "At last {pro} has {y}+{d}={z} dollars.",
    )),
    Story("together", _together, ("a+b", "a+x", "y-c"), (
        "{name} has {a} {things}. {other} has {b} more than {name}. They give {c} away. How many {things} are left?",
        "{other} found {b} {things} more than {name}, who found {a}. They lose {c}. How many {things} do both have?",
    ), (
        "{other} has {a}+{b}={x} {things}.",
        "Both have {a}+{x}={y} {things}.",
        "They keep {y}-{c}={z} {things}.",
    )),
    Story("share", _share, ("a+b", "x/c", "y+d"), (
        "{name} has {a} {things} and gets {b}. {c} friends share them. Each had {d} {things}. How many does each have?",
        "{a} {things} and {b} more are shared by {c} friends of {name}, who had {d} each. How many {things} for each?",
    ), (
        "There are {a}+{b}={x} {things}.",
        "Each friend gets {x}/{c}={y} {things}.",
        "Each friend has {y}+{d}={z} {things}.",
    )),
)

# What the quickstart's models learn in minutes: two calculations of small numbers. Every sum and difference of other
# stories also occurs in "gain and give" and "more than", whose chains are many, so that none is asked for unseen.


def _few(rng: random.Random) -> Numbers:
    first = rng.randint(4, 40)  # a sum is made of several pairs
    b = rng.randint(2, min(7, first - 2))
    return dict(a=first - b, b=b, c=rng.randint(2, min(6, first - 2)))


def _product(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 6), rng.randint(2, 6)
    return dict(a=a, b=b, c=rng.randint(2, min(6, a * b - 1)))


def _shares(rng: random.Random) -> Numbers:
    c, each = rng.randint(2, 6), rng.randint(3, 6)
    b = rng.randint(2, min(7, c * each - 2))
    return dict(a=c * each - b, b=b, c=c)


SHORT = (
    Story("gain and give", _few, ("a+b", "x-c"), (
        "{name} has {a} {things}, finds {b} more and gives {c} to {other}. How many {things} now?",
        "{name} owns {a} {things}, gets {b} and loses {c}. How many {things} does {pro} have now?",
    ), ("First {name} has {a}+{b}={x} {things}.", "Then {pro} has {x}-{c}={y} {things}.")),
    Story("packs", _product, ("a*b", "x+c"), (
        "{name} buys {a} boxes with {b} {things} each. {Pro} had {c} {things}. How many {things} now?",
        "There are {b} {things} in each of {a} bags. {name} adds {c}. How many {things} now?",
    ), ("The boxes hold {a}*{b}={x} {things}.", "In all there are {x}+{c}={y} {things}.")),
    Story("wages", _product, ("a*b", "x-c"), (
        "{name} earns ${a} an hour for {b} hours and spends ${c}. How many dollars does {pro} have?",
        "{name} works {b} hours for ${a} an hour and pays {other} ${c}. How many dollars are left?",
    ), ("{name} earns {a}*{b}={x} dollars.", "Then {pro} has {x}-{c}={y} dollars.")),
    Story("more than", _few, ("a+b", "x+c"), (
        "{name} has {a} {things}. {other} has {b} more than {name} and buys {c}. How many does {other} have now?",
        "{other} had {b} {things} more than {name}, who has {a}, and gets {c}. How many does {other} have now?",
    ), ("{other} had {a}+{b}={x} {things}.", "Now {other} has {x}+{c}={y} {things}.")),
    Story("share", _shares, ("a+b", "x/c"), (
        "{name} has {a} {things} and gets {b}. {c} friends share them. How many does each have?",
        "{a} {things} and {b} more are shared by {c} friends of {name}. How many {things} for each?",
    ), ("There are {a}+{b}={x} {things}.", "Each friend gets {x}/{c}={y} {things}.")),
)

_SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def solve(story: Story, numbers: Numbers) -> Numbers:
    """Returns the numbers with the results x, y and z of the story's calculations.

    Args:
      story: the kind of problem.
      numbers: the drawn numbers.
    """
    known = dict(numbers)
    for name, (left, sign, right) in zip("xyz", story.calculations):
        known[name] = _SIGNS[sign](known[left], known[right])
    return known


def split_of(story: Story, numbers: Numbers) -> str:
    """Returns the split a calculation chain belongs to, whoever it is told about.

    Args:
      story: the kind of problem.
      numbers: the drawn numbers.
    """
    signature = story.name + "".join(f" {k}={v}" for k, v in sorted(numbers.items()))
    held_out = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:8], "big") % _TEST_SHARE == 0
    return SPLITS[held_out]


def tell(story: Story, numbers: Numbers, rng: random.Random) -> dict[str, str]:
    """Puts a calculation chain into words.

    Args:
      story: the kind of problem.
      numbers: the drawn numbers.
      rng: source of names, things and phrasing.

    Returns:
      A row {"question", "answer"}.
    """
    (name, pro), (other, _) = rng.sample(_PEOPLE, 2)
    things = rng.choice(_THINGS)
    words = dict(solve(story, numbers), name=name, pro=pro, Pro=pro.capitalize(), other=other, things=things)
    lines = [*story.lines, "#### {" + "xyz"[len(story.calculations) - 1] + "}"]
    return {"question": rng.choice(story.questions).format(**words), "answer": "\n".join(lines).format(**words)}


def generate(count: int, *, seed: int = 0, split: str = "train",
             stories: Sequence[Story] = STORIES) -> list[dict[str, str]]:
    """Makes rows of the task, all different.

    Args:
      count: number of rows.
      seed: the same seed gives the same rows, on any machine.
      split: "train" or "test"; the two share no calculation chain, whatever their seeds.
      stories: kinds of problems that are told.

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
        story = rng.choice(stories)
        numbers = story.draw(rng)
        if split_of(story, numbers) == split:
            row = tell(story, numbers, rng)
            rows.setdefault(row["question"], row)
    return list(rows.values())
