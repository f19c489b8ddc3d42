"""What is asked and how an answer is judged: rows with their own answers, or a benchmark's items under a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlm_jax.data.sources import Row
from dlm_jax.evals import constraints, expressions, extractors, programs
from dlm_jax.evals.benchmarks import Item
from dlm_jax.evals.prompts import Prompt
from dlm_jax.evals.sandbox import host
from dlm_jax.evals.verdicts import Verdict


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
      cut: answer text -> what of it is judged.
      together: judges all answers at once, (texts, in the rows' order) -> verdicts; None judges one by one.
      groups: what each row belongs to, where a mean over groups is of interest.
      about: how it was asked, in plain values for the results.
    """

    name: str
    rows: Sequence[Row]
    judge: Callable[[str, Row], Verdict]
    metric: str
    cut: Callable[[str], str] = str
    together: Callable[[Sequence[str]], list[Verdict]] | None = None
    groups: Sequence[str] = ()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def verdicts(self, texts: Sequence[str]) -> list[Verdict]:
        """Judges the answers to all rows.

        Args:
          texts: whole answers, in the rows' order.
        """
        texts = [self.cut(text) for text in texts]
        return self.together(texts) if self.together else [self.judge(*each) for each in zip(texts, self.rows)]


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


def benchmark(
    kind: str, items: Sequence[Item], prompt: tuple[str, Prompt], shots: Sequence[Item] = (), *,
    extract: Sequence[str] | None = None, limits: host.Limits = host.Limits(), confined: bool = True,
) -> Task:
    """Returns a task over a benchmark's items.

    Args:
      kind: of `benchmarks.KINDS`.
      items: the questions.
      prompt: the name in results and the prompt, of `prompts.find`.
      shots: examples to go before every question.
      extract: names of the extractors to try; None takes the prompt's.
      limits: of programs.
      confined: whether programs run in a sandbox, see `host.examine`.

    Raises:
      ValueError: an unknown extractor, or programs that cannot be confined here.
    """
    (called, asked), names = prompt, tuple(extract or prompt[1].extract)
    extractors.check(names)
    rows = tuple(Row(asked.messages(item, shots), item.solution or asked.result(item), asked.result(item) or None)
                 for item in items)
    about = {"kind": kind, "prompt": called, "prompt_source": asked.source, "chat": asked.chat,
             "shots": len(shots), "extract": list(names)}
    shared = dict(cut=asked.cut, groups=tuple(item.group for item in items), about=about)
    if items[0].exam is not None:
        host.check(confined)
        together = lambda texts: programs.judge(texts, items, names, limits, confined)
        alone = lambda text, row: programs.judge([text], [items[rows.index(row)]], names, limits, confined)[0]
        return Task(kind, rows, alone, "pass@1: programs that pass their tests", together=together, **shared)
    if items[0].rules:
        def follow(text: str, item: Item) -> Verdict:
            broken = constraints.broken(text, item.rules)
            return Verdict(broken is None, broken or "all followed")

        return Task(kind, rows, lambda text, row: follow(text, items[rows.index(row)]),
                    "every instruction of a prompt followed, strictly",
                    together=lambda texts: list(map(follow, texts, items)), **shared)
    same = expressions.same if kind == "math" else same_answer

    def judge(text: str, row: Row) -> Verdict:
        found, by = extractors.extract(text, names, row.answer)
        return Verdict(same(found, row.answer), by)

    return Task(kind, rows, judge, f"exact match of the result, sought by {', '.join(names)}", **shared)
