"""What a benchmark asks and how an answer is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlm_jax.data.sources import Row
from dlm_jax.evals import extractors


class Verdict(NamedTuple):
    """A judge's word; true where the answer is right.

    Attributes:
      right: whether it is.
      by: the extractor that found the answer's final result, None where none did.
    """

    right: bool
    by: str | None

    def __bool__(self) -> bool:
        return self.right


def same_answer(predicted: str | None, expected: str | None) -> bool:
    """Whether two final answers say the same: as numbers where both are ("18.00" = "18" = "$18"), else as texts.

    Args:
      predicted: what the model said, None where it gave no final answer (never right).
      expected: the reference, None where the row has none (never right).
    """
    if predicted is None or expected is None:
        return False
    left, right = extractors.number(predicted), extractors.number(expected)
    if left is not None and right is not None:
        return left == right
    if extractors.choice(expected) is not None:
        return extractors.choice(predicted) == extractors.choice(expected)
    bare = lambda text: " ".join(extractors.plain(text).strip("$%. ").replace(",", "").split()).casefold()
    return bare(predicted) == bare(expected)


def final_result(names: Sequence[str] = extractors.DEFAULT) -> Callable[[str, Row], Verdict]:
    """Returns the judge that compares an answer's final result with the reference's.

    Args:
      names: of the extractors to try, in order.

    Raises:
      ValueError: an unknown name.
    """
    extractors.check(names)

    def judge(text: str, row: Row) -> Verdict:
        expected = extractors.reference(row.response, names)
        found, by = extractors.extract(text, names, expected)
        return Verdict(same_answer(found, expected), by)

    return judge


# GSM8K's own rule: Cobbe et al., "Training Verifiers to Solve Math Word Problems", Sec. 2
exact_match = final_result(("hash",))


def same_text(text: str, row: Row) -> Verdict:
    """Judges an answer without a final result: it must repeat the reference, up to white space.

    Args:
      text: the model's whole answer.
      row: the question with its reference.
    """
    return Verdict(text.split() == row.response.split(), None)


@dataclasses.dataclass(frozen=True)
class Task:
    """Held-out questions and the judge of their answers.

    Attributes:
      name: what the table calls it.
      rows: the questions.
      judge: (answer text, row) -> right or wrong, and what found the result.
      metric: what the judge measures, in words.
    """

    name: str
    rows: Sequence[Row]
    judge: Callable[[str, Row], Verdict]
    metric: str


def task_of(name: str, rows: Sequence[Row], names: Sequence[str] = extractors.DEFAULT) -> Task:
    """Returns a task over rows, judged by final results where every reference has one, by the whole text otherwise.

    Args:
      name: what the table calls it.
      rows: the held-out rows.
      names: of the extractors to try on an answer, in order.

    Raises:
      ValueError: no rows, or an unknown extractor.
    """
    judge = final_result(names)
    if not rows:
        raise ValueError(f"task {name!r} has no rows; hold at least one back")
    if any(extractors.reference(row.response, names) is None for row in rows):
        return Task(name, tuple(rows), same_text, "exact match of the whole answer")
    where = "number after ####" if tuple(names) == ("hash",) else f"result, sought by {', '.join(names)}"
    return Task(name, tuple(rows), judge, f"exact match of the {where}")
