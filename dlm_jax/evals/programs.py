"""Answers that are programs: put together with what was asked, run against their tests, judged by what comes of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from dlm_jax.evals import extractors
from dlm_jax.evals.benchmarks import Item
from dlm_jax.evals.sandbox import host
from dlm_jax.evals.verdicts import Verdict


def program(text: str, item: Item, names: Sequence[str]) -> str | None:
    """Returns the program that an answer stands for, None where it holds none.

    An answer to HumanEval that does not define the function continues the prompt, which ends inside of it.

    Args:
      text: a model's answer.
      item: what was asked.
      names: of the extractors to try on it.
    """
    found, _ = extractors.extract(text, names)
    if found is None or item.exam is None or not item.exam.prelude:
        return found
    defines = re.search(rf"(?m)^(?:async )?(?:def|class) {re.escape(item.exam.names[0])}\b", found)
    start = item.exam.prelude.rstrip("\n") + "\n"
    return f"{start}\n{found}\n" if defines else f"{start}{found}\n"


def judge(texts: Sequence[str], items: Sequence[Item], names: Sequence[str], limits: host.Limits, confined: bool
          ) -> list[Verdict]:
    """Runs the programs of answers against their tests.

    Args:
      texts: the answers.
      items: what was asked.
      names: of the extractors to try on each.
      limits, confined: as in `host.examine`.

    Returns:
      A verdict each, whose `by` says how the program ended: "passed", the name of an error, "no end within ...".
    """
    made = [program(text, item, names) for text, item in zip(texts, items)]
    exams = [dataclasses.replace(item.exam, program=source) for source, item in zip(made, items) if source is not None]
    outcomes = iter(host.examine(exams, limits, confined=confined))
    ended = [None if source is None else next(outcomes) for source in made]
    return [Verdict(False, None) if each is None else
            Verdict(each.passed, "passed" if each.passed else each.reason.split(":")[0]) for each in ended]
