"""What a benchmark asks and how an answer is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

from dlm_jax.data.sources import Row, final_answer


def same_answer(predicted: str | None, expected: str | None) -> bool:
    """Whether two final answers say the same: as numbers where both are ("18.00" = "18" = "$18"), else as texts.

    Args:
      predicted: what the model said, None where it gave no final answer (never right).
      expected: the reference, None where the row has none (never right).
    """
    if predicted is None or expected is None:
        return False
    left, right = (text.strip().strip("$%. ").replace(",", "") for text in (predicted, expected))
    try:
        return Decimal(left) == Decimal(right)
    except InvalidOperation:
        return left == right


def exact_match(text: str, row: Row) -> bool:
    """Judges an answer in GSM8K's format by what follows its last `####`.

    Args:
      text: the model's whole answer.
      row: the question with its reference.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", Sec. 2.
    """
    return same_answer(final_answer(text), row.answer)


def same_text(text: str, row: Row) -> bool:
    """Judges an answer without a final result: it must repeat the reference, up to white space.

    Args:
      text: the model's whole answer.
      row: the question with its reference.
    """
    return text.split() == row.response.split()


@dataclasses.dataclass(frozen=True)
class Task:
    """Held-out questions and the judge of their answers.

    Attributes:
      name: what the table calls it.
      rows: the questions.
      judge: (answer text, row) -> right or wrong.
      metric: what the judge measures, in words.
    """

    name: str
    rows: Sequence[Row]
    judge: Callable[[str, Row], bool]
    metric: str


def task_of(name: str, rows: Sequence[Row]) -> Task:
    """Returns a task over rows, judged by `####` answers where every row has one, by the whole text otherwise.

    Args:
      name: what the table calls it.
      rows: the held-out rows.

    Raises:
      ValueError: no rows.
    """
    if not rows:
        raise ValueError(f"task {name!r} has no rows; hold at least one back")
    if all(row.answer is not None for row in rows):
        return Task(name, tuple(rows), exact_match, "exact match of the number after ####")
    return Task(name, tuple(rows), same_text, "exact match of the whole answer")
