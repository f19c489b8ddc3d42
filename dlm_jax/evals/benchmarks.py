"""Benchmarks as their authors publish them: files of questions, read row by row into one shape.

| kind | a row | judged by |
|---|---|---|
| `gsm8k` | {"question", "answer"} with `#### result` in the answer | its number |
| `math` | {"problem", "solution"} with `\\boxed{result}` in the solution, or "answer" beside | its expression |
| `choice` | ARC, MMLU, MMLU-Pro, GPQA, HellaSwag and PIQA as published, see `choice` | its letter |
| `humaneval` | {"task_id", "prompt", "entry_point", "test", "canonical_solution"} | its tests |
| `mbpp` | {"task_id", "text" or "prompt", "code", "test_list"}; test rows are 11 to 510 | its tests |
| `ifeval` | {"prompt", "instruction_id_list", "kwargs"} | every instruction, strictly |
"""

from __future__ import annotations

import ast
import dataclasses
import gzip
import os
import random
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlm_jax.data import sources
from dlm_jax.evals import constraints, extractors
from dlm_jax.evals.sandbox.host import Exam

_MARKED = re.compile(r"\b[Aa]nswer(\d+): *(.*?)(?= *\b[Aa]nswer\d+:|\s*\n\s*Answer format|\s*$)", re.DOTALL)
_LETTERS = "ABCDEFGHIJ"
MBPP_TEST = range(11, 511)  # Austin et al., "Program Synthesis with Large Language Models", Sec. 2.1


@dataclasses.dataclass(frozen=True)
class Item:
    """One question of a benchmark.

    Attributes:
      question: what is asked, without choices and tests.
      result: the right final result; of a choice its number from 0, of a program nothing.
      solution: a worked answer, as an example shows it.
      choices: texts to choose from.
      exam: a program's tests, without the program.
      rules: instructions that an answer must follow.
      name: by which the benchmark calls it.
      group: subject or level, where the benchmark has such.
    """

    question: str
    result: str = ""
    solution: str = ""
    choices: tuple[str, ...] = ()
    exam: Exam | None = None
    rules: tuple[constraints.Rule, ...] = ()
    name: str = ""
    group: str = ""


def gsm8k(raw: dict[str, Any]) -> Item:
    """Reads a row of GSM8K.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems".
    """
    solution = _text(raw, "answer")
    result = sources.final_answer(solution)
    if result is None:
        raise ValueError('"answer" has no final result; expected one behind ####')
    worked = re.sub(r"<<[^>]*>>", "", solution).rpartition("####")[0].strip()
    return Item(_text(raw, "question"), result, worked, name=_name(raw))


def mathematics(raw: dict[str, Any]) -> Item:
    """Reads a row of MATH or MATH-500.

    Source: Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset".
    """
    solution = _text(raw, "solution")
    result = raw["answer"] if isinstance(raw.get("answer"), str) else extractors.box(solution)
    if result is None:
        raise ValueError('"solution" has no final result; expected one in \\boxed{}, or "answer" beside it')
    return Item(_text(raw, "problem"), result, solution.strip(), name=_name(raw), group=_group(raw, "subject", "type"))


def choice(raw: dict[str, Any]) -> Item:
    """Reads a row of several choices, in any of the forms that benchmarks of them have.

    ARC {"question", "choices": {"text", "label"}, "answerKey"} and its first form {"question": {"stem", "choices"}};
    MMLU {"question", "choices", "answer"}; MMLU-Pro {"question", "options", "answer"}; GPQA {"Question",
    "Correct Answer", "Incorrect Answer 1" to 3}, shuffled by the question; HellaSwag {"ctx", "endings", "label"};
    PIQA {"goal", "sol1", "sol2", "label"}; {"instruction", "output"} with "Answer1: ..." in the one and the right
    label in the other.
    """
    if "instruction" in raw:
        return _instruction(raw)
    if "Correct Answer" in raw:
        wrong = [_text(raw, f"Incorrect Answer {n}").strip() for n in (1, 2, 3)]
        question, texts = _text(raw, "Question").strip(), [_text(raw, "Correct Answer").strip(), *wrong]
        order = random.Random(question).sample(range(4), 4)  # the right one stands first in every row
        return _choices(raw, question, [texts[n] for n in order], order.index(0), "Subdomain")
    if "goal" in raw:
        return _choices(raw, _text(raw, "goal"), [_text(raw, "sol1"), _text(raw, "sol2")], raw.get("label"))
    if "ctx" in raw:
        return _choices(raw, _text(raw, "ctx"), raw.get("endings"), raw.get("label"), "activity_label")
    if "answerKey" in raw:
        asked, options = raw.get("question"), raw.get("choices")
        if isinstance(asked, dict):
            asked, options = asked.get("stem"), asked.get("choices")
        if isinstance(options, list) and all(isinstance(option, dict) for option in options):
            options = {name: [option.get(name) for option in options] for name in ("text", "label")}
        if not isinstance(options, dict) or raw["answerKey"] not in (options.get("label") or ()):
            raise ValueError(f'"answerKey" {raw["answerKey"]!r} is the label of no choice')
        right = options["label"].index(raw["answerKey"])
        return _choices({**raw, "question": asked}, _text({"question": asked}, "question"), options.get("text"), right)
    options = raw.get("choices", raw.get("options"))
    return _choices(raw, _text(raw, "question"), options, raw.get("answer"), "subject", "category")


def humaneval(raw: dict[str, Any]) -> Item:
    """Reads a row of HumanEval.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code".
    """
    prompt, entry = _text(raw, "prompt"), _text(raw, "entry_point")
    exam = Exam("", f"{_text(raw, 'test')}\ncheck({entry})\n", names=(entry,), prelude=prompt)
    return Item(prompt, solution=str(raw.get("canonical_solution", "")), exam=exam, name=_name(raw))


def mbpp(raw: dict[str, Any]) -> Item:
    """Reads a row of MBPP, whole or sanitized.

    Source: Austin et al., "Program Synthesis with Large Language Models".
    """
    question = _text(raw, "text" if "text" in raw else "prompt")
    tests, code = raw.get("test_list"), _text(raw, "code").replace("\r\n", "\n")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f'"test_list" is {tests!r:.60}, expected a list of assertions')
    if not isinstance(raw.get("task_id"), int):
        raise ValueError(f'"task_id" is {raw.get("task_id")!r}, expected a number')
    try:
        defined = tuple(node.name for node in ast.parse(code).body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    except SyntaxError as error:
        raise ValueError(f'"code" is no Python: {error.msg}') from None
    imports, setup = "\n".join(raw.get("test_imports") or ()), raw.get("test_setup_code") or ""
    exam = Exam("", "\n".join([imports, *tests]), names=defined, setup=setup.replace("\r\n", "\n"))
    return Item(question, solution=code, exam=exam, name=str(raw["task_id"]))


def ifeval(raw: dict[str, Any]) -> Item:
    """Reads a row of IFEval.

    Source: Zhou et al., "Instruction-Following Evaluation for Large Language Models".
    """
    names, given = raw.get("instruction_id_list"), raw.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(given, list) or len(given) != len(names):
        raise ValueError(f'"instruction_id_list" is {names!r:.60} and "kwargs" {given!r:.60}, expected two lists of '
                         "one length")
    # published rows carry every argument of every instruction, those of others as null
    rules = tuple((name, {key: value for key, value in (each or {}).items() if value is not None})
                  for name, each in zip(names, given))
    constraints.check(rules)
    return Item(_text(raw, "prompt"), rules=rules, name=str(raw.get("key", "")))


KINDS: dict[str, Callable[[dict[str, Any]], Item]] = {
    "gsm8k": gsm8k, "math": mathematics, "choice": choice, "humaneval": humaneval, "mbpp": mbpp,
    "ifeval": ifeval}


def read(path: str | os.PathLike[str], kind: str) -> list[Item]:
    """Reads every row of a benchmark's file.

    Args:
      path: a JSONL file, or a .json file with one list; .gz of either.
      kind: one of `KINDS`.

    Raises:
      ValueError: an unknown kind, no such file, no rows, or a row without what its kind needs (with its line).
    """
    if kind not in KINDS:
        raise ValueError(f"task {kind!r} is not known; accepted: {', '.join(KINDS)}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{path}: no such file; give the benchmark's rows, a .jsonl or .json file, or a .gz of one")
    raw = file.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}); fetch it again") from None
    items = sources.parse_file(raw, path, lambda row: _item(row, kind))
    if not items:
        raise ValueError(f"{path}:1: the file holds no rows of {kind}")
    return items


def asked(items: Sequence[Item], kind: str) -> list[Item]:
    """Returns the items that are a benchmark's test set, where its files hold others, too.

    Raises:
      ValueError: there are none.
    """
    if kind != "mbpp":
        return list(items)
    found = [item for item in items if int(item.name) in MBPP_TEST]
    if not found:
        raise ValueError(f"no row has a task_id of {MBPP_TEST.start} to {MBPP_TEST.stop - 1}, MBPP's test set")
    return found


def _item(raw: Any, kind: str) -> Item:
    if not isinstance(raw, dict):
        raise ValueError(f"a row of {kind} is {type(raw).__name__}, expected a JSON object")
    return KINDS[kind](raw)


def _text(raw: dict[str, Any], name: str) -> str:
    if name not in raw:
        raise ValueError(f'"{name}" is missing; the row has {", ".join(sorted(map(str, raw)))}')
    if not isinstance(raw[name], str) or not raw[name].strip():
        raise ValueError(f'"{name}" is {raw[name]!r:.40}, expected text')
    return raw[name]


def _name(raw: dict[str, Any]) -> str:
    return str(next((raw[key] for key in ("task_id", "unique_id", "id", "question_id") if key in raw), ""))


def _group(raw: dict[str, Any], *names: str) -> str:
    return str(next((raw[name] for name in names if raw.get(name)), ""))


def _choices(raw: dict[str, Any], question: str, texts: Any, right: Any, *groups: str) -> Item:
    """An item of choices; `right` is a number from 0, as a text or not, or a letter."""
    texts = list(texts) if isinstance(texts, (list, tuple)) else []
    if not 2 <= len(texts) <= len(_LETTERS) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"the choices are {texts!r:.60}, expected 2 to {len(_LETTERS)} texts")
    label = str(right).strip()
    number = _LETTERS.find(label.upper()) if len(label) == 1 and label.isalpha() else (
        int(label) if label.isdecimal() else -1)
    if isinstance(right, bool) or not 0 <= number < len(texts):
        raise ValueError(f"the right answer is {right!r}, expected a letter or a number from 0, of {len(texts)}")
    return Item(question.strip(), str(number), choices=tuple(text.strip() for text in texts), name=_name(raw),
                group=_group(raw, *groups))


def _instruction(raw: dict[str, Any]) -> Item:
    text, answer = _text(raw, "instruction"), raw.get("answer") or _text(raw, "output")
    found, label = _MARKED.findall(text), re.findall(r"\d+", str(answer))
    if not found or not label:
        raise ValueError('"instruction" and "output" name no choices, such as Answer1: ..., expected those')
    question = text[:text.index(next(_MARKED.finditer(text))[0])]
    question = question.removeprefix("Please choose the correct answer to the question:").strip()
    return _choices(raw, question, [choice for _, choice in found], int(label[-1]) - 1)
