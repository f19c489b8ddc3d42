"""Rows of benchmarks as published, and complaints that name the line."""

import gzip
import json

import pytest

from dlm_jax.evals import benchmarks

CODE = {"task_id": 11, "text": "Add one.", "code": "def f(x):\r\n    return x + 1", "test_list": ["assert f(1) == 2"],
        "test_setup_code": "", "challenge_test_list": []}
EVAL = {"task_id": "HumanEval/0", "prompt": "def f(x):\n    \"\"\"Adds one.\"\"\"\n", "entry_point": "f",
        "canonical_solution": "    return x + 1\n", "test": "def check(candidate):\n    assert candidate(1) == 2\n"}
MARKED = {"instruction": "Please choose the correct answer to the question: Why?\n\nAnswer1: It rains. Answer2: No\n\n"
                         "Answer format: answer1/answer2", "input": "", "output": "the correct answer is answer2"}


@pytest.mark.parametrize("raw", [
    {"question": "Why?", "choices": {"text": ["It rains.", "No"], "label": ["A", "B"]}, "answerKey": "B"},
    {"question": "Why?", "choices": {"text": ["It rains.", "No"], "label": ["1", "2"]}, "answerKey": "2"},
    {"question": {"stem": "Why?", "choices": [{"text": "It rains.", "label": "A"}, {"text": "No", "label": "B"}]},
     "answerKey": "B"},
    {"question": "Why?", "choices": ["It rains.", "No"], "answer": 1, "subject": "rain"},
    {"question": "Why?", "options": ["It rains.", "No"], "answer": "B", "answer_index": 1, "category": "rain"},
    {"ctx": "Why?", "endings": ["It rains.", "No"], "label": "1"},
    {"goal": "Why?", "sol1": "It rains.", "sol2": "No", "label": 1}, MARKED])
def test_choices_of_every_form_say_the_same(raw):
    item = benchmarks.choice(raw)
    assert (item.question, item.choices, item.result) == ("Why?", ("It rains.", "No"), "1")
    assert item.group == ("rain" if "rain" in raw.values() else "")


def test_gpqa_is_shuffled_always_alike():
    rows = [{"Question": f"{n}?", "Correct Answer": "yes ", "Subdomain": "s",
             **{f"Incorrect Answer {k}": f"no {k}" for k in (1, 2, 3)}} for n in range(40)]
    items = [benchmarks.choice(row) for row in rows]
    assert all(item.choices[int(item.result)] == "yes" and len(set(item.choices)) == 4 for item in items)
    assert {item.result for item in items} == set("0123") and items == [benchmarks.choice(row) for row in rows]


def test_other_kinds():
    item = benchmarks.gsm8k({"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4 eggs.\n#### 1,004"})
    assert (item.result, item.solution) == ("1004", "2 + 2 = 4 eggs.")
    item = benchmarks.mathematics({"problem": "x?", "solution": "So $x=\\boxed{\\frac{1}{2}}$.", "type": "Algebra"})
    assert (item.result, item.group) == ("\\frac{1}{2}", "Algebra")
    assert benchmarks.mathematics({"problem": "x?", "solution": "…", "answer": "7"}).result == "7"
    item = benchmarks.mbpp(CODE)
    assert item.solution == "def f(x):\n    return x + 1" and item.exam.names == ("f",) and item.name == "11"
    item = benchmarks.humaneval(EVAL)
    assert item.exam.names == ("f",) and item.exam.tests.endswith("\ncheck(f)\n") and item.question == EVAL["prompt"]


def test_files_packed_or_not(tmp_path):
    text = json.dumps(CODE) + "\n\n" + json.dumps({**CODE, "task_id": 2}) + "\n"
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain, packed = (benchmarks.read(tmp_path / name, "mbpp") for name in ("rows.jsonl", "rows.jsonl.gz"))
    assert plain == packed and [item.name for item in plain] == ["11", "2"]
    assert [item.name for item in benchmarks.asked(plain, "mbpp")] == ["11"]
    with pytest.raises(ValueError, match="task_id of 11 to 510"):
        benchmarks.asked(plain[1:], "mbpp")


@pytest.mark.parametrize("kind, row, reason", [
    ("gsm8k", {"question": "q"}, '"answer" is missing; the row has question'),
    ("gsm8k", {"question": "q", "answer": "18"}, "expected one behind ####"),
    ("gsm8k", {"question": " ", "answer": "#### 1"}, "\"question\" is ' ', expected text"),
    ("gsm8k", [1], "a row of gsm8k is list"),
    ("math", {"problem": "p", "solution": "s"}, "expected one in .boxed"),
    ("choice", {"question": "q", "choices": ["a"], "answer": 0}, "expected 2 to 10 texts"),
    ("choice", {"question": "q", "choices": ["a", "b"], "answer": 2}, "the right answer is 2"),
    ("choice", {"question": "q", "choices": ["a", "b"]}, "the right answer is None"),
    ("choice", {"question": "q", "choices": ["a", "b"], "answer": True}, "the right answer is True"),
    ("choice", {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"}, "no choice"),
    ("choice", {"goal": "g", "sol1": "s", "label": 0}, '"sol2" is missing'),
    ("choice", {"instruction": "Why?", "output": "answer1"}, "name no choices"),
    ("humaneval", {k: v for k, v in EVAL.items() if k != "test"}, '"test" is missing'),
    ("mbpp", {**CODE, "test_list": []}, "expected a list of assertions"),
    ("mbpp", {**CODE, "code": "def f(:"}, "no Python"), ("mbpp", {**CODE, "task_id": None}, '"task_id" is None')])
def test_a_bad_row_is_named_by_its_line(tmp_path, kind, row, reason):
    good = {"gsm8k": {"question": "q", "answer": "#### 1"}, "math": {"problem": "p", "solution": "\\boxed{1}"},
            "choice": MARKED, "humaneval": EVAL, "mbpp": CODE}[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=reason) as raised:
        benchmarks.read(path, kind)
    assert str(raised.value).startswith(f"{path}:3: ")


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no rows of math"):
        benchmarks.read(tmp_path / "empty.jsonl", "math")
    with pytest.raises(ValueError, match="no such file"):
        benchmarks.read(tmp_path / "none.jsonl", "math")
    with pytest.raises(ValueError, match="'chess' is not known; accepted: gsm8k, math, choice, humaneval, mbpp"):
        benchmarks.read(tmp_path / "empty.jsonl", "chess")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(ValueError, match="not a whole gzip file"):
        benchmarks.read(tmp_path / "broken.jsonl.gz", "math")
