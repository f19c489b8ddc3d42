"""Prompts: what the papers print, examples before questions, stops; protocols that hold together."""

import dataclasses
import re

import pytest

from configs import asynclane
from dlm_jax.evals import benchmarks, extractors, prompts, protocols
from dlm_jax.evals.benchmarks import Item
from launch import decoders
from tests.conftest import ROOT

SUM = Item("What is {choices}?", "3", "1 + 2 = 3.")
OTHER = Item("And 2 + 2?", "4", "2 + 2 = 4.")
WHY = Item("Why?", "1", choices=("Rain", "It {tests}"))
EVAL = benchmarks.humaneval({
    "task_id": "HumanEval/0", "prompt": "def f(x):\n    \"\"\"{question}\"\"\"\n", "entry_point": "f",
    "test": "def check(candidate): pass", "canonical_solution": "  pass\n"})
MBPP = benchmarks.mbpp({"task_id": 11, "text": "Add.", "code": "def f(): {}", "test_list": ["assert f({1}) == 2"]})
ITEMS = {
    "gsm8k": SUM, "math": Item("What is {choices}?", "3", "So \\boxed{3}."),
    "choice": WHY, "humaneval": EVAL, "mbpp": MBPP,
    "ifeval": Item("Write {choices} in capitals.", rules=(("change_case:english_capital", {}),))}


def test_the_prompts_are_the_papers():
    paper = ROOT.parent / "shared" / "papers" / "flashdlm.txt"
    if not paper.is_file():
        pytest.skip("no papers: ../shared/papers/flashdlm.txt does not exist beside the checkout")
    bare = lambda text: " ".join(text.split())
    text = bare(re.sub(r": <\w+>", ": {question}", paper.read_text()))
    named = {name: prompt for name, prompt in prompts.PROMPTS.items() if name.startswith("flashdlm_")}
    assert len(named) == 6
    for name, prompt in named.items():
        words = prompt.question.replace("\n{choices}", "").removesuffix("\n\n{question}")
        assert bare(words) in text, name


@pytest.mark.parametrize("name", prompts.PROMPTS)
def test_every_prompt_says_all_of_its_question(name):
    prompt = prompts.PROMPTS[name]
    assert prompt.source and prompt.version >= 1
    extractors.check(prompt.extract)
    for kind in prompt.kinds:
        item = ITEMS[kind]
        message, = prompt.messages(item)
        assert message["role"] == "user" and item.question in message["content"]  # braces of the question included
        assert "{" not in prompt.put(Item("q", "0", choices=("a", "b"), exam=item.exam and dataclasses.replace(
            item.exam, tests="t"))).replace("\\boxed{}", "")
        if "{choices}" in prompt.question:
            assert all(choice in message["content"] for choice in item.choices)
        found, _ = extractors.extract(prompt.show(item), prompt.extract, prompt.result(item))
        if kind not in ("humaneval", "mbpp") and (item.solution or kind == "choice") and name != "question":
            assert found is not None and prompt.result(item) in found  # an example's answer is one that counts


def test_examples_are_turns_or_text():
    chat = prompts.PROMPTS["boxed"].messages(SUM, [OTHER])
    assert [message["role"] for message in chat] == ["user", "assistant", "user"]
    assert chat[1]["content"].endswith("\\boxed{4}.") and "2 + 2?" in chat[0]["content"]
    text, = prompts.PROMPTS["question_answer"].messages(SUM, [OTHER])
    assert text["content"] == (
        "Question: And 2 + 2?\nAnswer: 2 + 2 = 4.\n#### 4\n\nQuestion: What is {choices}?\nAnswer:")
    text, = prompts.PROMPTS["begin_done"].messages(MBPP, [MBPP])
    assert text["content"].count("[BEGIN]\n") == 2 and text["content"].count("def f(): {}\n[DONE]\n\n") == 1
    assert prompts.PROMPTS["flashdlm_hellaswag"].result(WHY) == "Ending2"
    assert prompts.PROMPTS["letter"].result(WHY) == "B"


def test_an_answer_ends_before_the_first_stop():
    cut = prompts.PROMPTS["continue"].cut
    assert cut("    return 1\n\nprint(f(1))\ndef g(): pass") == "    return 1\n"
    assert cut("    return 1") == "    return 1" and prompts.PROMPTS["boxed"].cut("a\ndef") == "a\ndef"


def test_unknown_prompts_are_refused():
    assert set(prompts.DEFAULT) == set(benchmarks.KINDS)
    for kind in benchmarks.KINDS:
        name, prompt = prompts.find(None, kind)
        assert name == f"{prompts.DEFAULT[kind]}@{prompt.version}" and kind in prompt.kinds
    with pytest.raises(ValueError, match="'haiku' is not known; accepted for mbpp: program_tests, begin_done"):
        prompts.find("haiku", "mbpp")
    with pytest.raises(ValueError, match="'letter' is for choice; accepted for gsm8k: "):
        prompts.find("letter", "gsm8k")


@pytest.mark.parametrize("name", protocols.PROTOCOLS)
def test_every_protocol_holds_together(name):
    found = protocols.find(name)
    prompts.find(found.prompt, found.kind)
    assert found.source and len(found.shot_names) in (0, found.shots)
    assert found.preset in decoders.presets()


def test_protocols_say_what_the_papers_say():
    find = protocols.find
    assert find("refusion-2025:gpqa").preset == "refusion:gpqa" and find("refusion-2025:gpqa").shots == 0
    assert decoders.presets()["refusion:gpqa"].max_new_tokens == 128
    assert find("flashdlm-2025:gsm8k").shots == 8 and find("flashdlm-2025:hellaswag").shots == 5
    assert decoders.presets()["flashdlm:guided"].max_new_tokens == 1024
    lane = {name: find(f"asynclane-2026-512:{name}") for name in ("gsm8k_cot", "gsm8k", "math", "mbpp", "humaneval")}
    assert {name: each.shots for name, each in lane.items()} == asynclane.SHOTS
    assert lane["mbpp"].shot_names == ("2", "3", "4")
    assert {each.max_new_tokens for each in lane.values()} == {512}


def test_unknown_protocols_are_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="accepted of refusion-2025: refusion-2025:mmlu_pro, .*refusion-2025:mbpp$"):
        protocols.find("refusion-2025:chess")
    with pytest.raises(ValueError, match="PAPER:BENCHMARK, of refusion-2025: .*; flare-2026-diffusion-trust: "):
        protocols.find("gsm8k")
