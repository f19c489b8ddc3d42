"""Benchmarks as tasks: references judge themselves right, programs by running, choices by the prompt's own labels."""

import gzip
import json

import pytest

from dlm_jax.evals import benchmarks, programs, prompts, tasks
from dlm_jax.evals.benchmarks import Item
from dlm_jax.evals.sandbox import host
from tests.conftest import ROOT

confined = pytest.mark.skipif(host.refusal() is not None, reason=f"no sandbox here: {host.refusal()}")
HELP = "import math\n\n\ndef twice(x):\n    \"\"\"Doubles.\"\"\"\n    return 2 * x\n\n\n"
EVAL = benchmarks.humaneval({
    "task_id": "HumanEval/0", "entry_point": "f", "prompt": HELP + "def f(x):\n    \"\"\"Adds one to twice x.\"\"\"\n",
    "canonical_solution": "    return twice(x) + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 3 and candidate(2) == twice(2) + 1\n"})
MBPP = benchmarks.mbpp({"task_id": 11, "text": "Add one.", "code": "def f(x):\r\n    return x + 1",
                        "test_list": ["assert f(1) == 2"], "test_imports": ["import math"]})


def verdicts(kind, item, prompt, answers):
    task = tasks.benchmark(kind, [item] * len(answers), prompts.find(prompt, kind))
    assert task.metric.startswith("pass@1")
    return task.verdicts(list(answers))


@confined
def test_answers_to_humaneval():
    whole = "def f(x):\n    return twice(x) + 1"
    right = [f"```python\n{whole}\n```", f"Here:\n```python\n{HELP}{whole}\n```\nIt works.", whole,
             "    return twice(x) + 1\n", "    y = twice(x)\n    return y + 1\n```\nDone."]
    wrong = {"```python\ndef f(x):\n    return x\n```": "AssertionError", "": None, "I cannot.": "SyntaxError",
             "def g(x):\n    return 3": "AssertionError", "import os\nos._exit(0)": "EOFError",
             "def f(x):\n    import os\n    os._exit(0)": "EOFError", "```python\n```": None}
    found = verdicts("humaneval", EVAL, "program", [*right, *wrong])
    assert found[:len(right)] == [(True, "passed")] * len(right)
    assert found[len(right):] == [(False, by) for by in wrong.values()]
    # continuations are cut at the stop texts first
    assert verdicts("humaneval", EVAL, "continue", ["    return twice(x) + 1\n\n\nprint(f('a') - 1)\n"])[0].right


@confined
def test_answers_to_mbpp():
    found = verdicts("mbpp", MBPP, "begin_done", [MBPP.solution + "\n[DONE]\nassert False", "def f(x):\n    return x"])
    assert found == [(True, "passed"), (False, "AssertionError")]
    assert verdicts("mbpp", MBPP, None, ["def g(x):\n    return x + 1"]) == [(False, "NameError")]


@confined
def test_published_references_pass():
    data = ROOT.parent / "shared" / "data"
    if not data.is_dir():
        pytest.skip("no data: ../shared/data does not exist beside the checkout")
    for kind, path, part in (("humaneval", "humaneval/HumanEval.jsonl.gz", slice(30, 52, 3)),
                             ("mbpp", "mbpp/mbpp.jsonl", slice(0, 500, 83))):
        items = benchmarks.asked(benchmarks.read(data / path, kind), kind)[part]
        task = tasks.benchmark(kind, items, prompts.find(None, kind))
        shown = [f"```python\n{item.solution}\n```" for item in items] if kind == "mbpp" else [
            item.solution for item in items]
        assert all(task.verdicts(shown)) and not any(task.verdicts(["pass"] * len(items)))


def test_an_answer_without_a_program_runs_nothing(monkeypatch):
    monkeypatch.setattr(host, "examine", lambda exams, *rest, **options: [host.Outcome(True, "")] * len(exams))
    assert programs.judge(["", " \n"], [EVAL, MBPP], ("code",), host.Limits(), True) == [(False, None)] * 2


def test_a_machine_without_a_sandbox_is_told_before_any_model_runs(monkeypatch):
    monkeypatch.setattr(host, "refusal", lambda: "no namespaces")
    with pytest.raises(ValueError, match="no namespaces"):
        tasks.benchmark("mbpp", [MBPP], prompts.find(None, "mbpp"))
    tasks.benchmark("mbpp", [MBPP], prompts.find(None, "mbpp"), confined=False)


def test_choices_are_judged_by_the_names_that_the_prompt_gives_them():
    item = Item("Why?", "1", choices=("Rain", "Sun"), group="sky")
    task = tasks.benchmark("choice", [item, item], prompts.find("letter", "choice"))
    assert task.verdicts(["The answer is (B).", "The answer is (A)."]) == [(True, "answer_is"), (False, "answer_is")]
    assert task.groups == ("sky", "sky") and task.rows[0].answer == "B"
    assert task.about == {"kind": "choice", "prompt": "letter@1", "prompt_source": "ours", "chat": True, "shots": 0,
                          "extract": list(prompts.PROMPTS["letter"].extract)}
    task = tasks.benchmark("choice", [item] * 3, prompts.find("flashdlm_arc", "choice"))
    said = ["The final answer is Answer2", "The final answer is (B)", "The final answer is Answer1"]
    assert [bool(each) for each in task.verdicts(said)] == [True, False, False]


def test_expressions_are_judged_by_the_rule_of_math():
    items = [Item("x?", "\\frac{1}{2}"), Item("x?", "(2, \\pi)"), Item("x?", "1,2")]
    task = tasks.benchmark("math", items, prompts.find(None, "math"))
    assert all(task.verdicts(["\\boxed{0.5}", "so $\\boxed{\\left( 2,\\pi \\right)}$", "The answer is $1, 2$."]))
    assert not any(task.verdicts(["\\boxed{2}", "\\boxed{(2,3)}", "\\boxed{1}"]))


def test_unknown_extractors_are_refused():
    with pytest.raises(ValueError, match="oracle"):
        tasks.benchmark("math", [Item("x?", "1")], prompts.find(None, "math"), extract=("oracle",))
