"""IFEval's instructions, each followed by some answers and broken by others, and rows that name none."""

import json

import pytest

from dlm_jax.evals import benchmarks, constraints, prompts, tasks

CASES = [
    ("keywords:existence", {"keywords": ["rain", "Sun"]}, ["Sun after RAIN"], ["only rain"]),
    ("keywords:frequency", {"keyword": "rain", "frequency": 2, "relation": "at least"}, ["Rain, rain"], ["rain"]),
    ("keywords:frequency", {"keyword": "rain", "frequency": 2, "relation": "less than"}, ["rain"], ["rain rain"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, ["it rained"], ["no Rain."]),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, ["A banana"],
     ["ab"]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"},
     ["One. Two!", "Dr. Who has 3.5 hats. Why?"], ["One. Two! Three?"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***\na\n***\nb"],
     ["a", "a\n***\n***\nb"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two, three"], ["one two"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
     ["First.\n\n\"Then, go.", "a\n\nThen"], ["a\n\nNow then", "then", "a\n\nthen\n\nb"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [place]"], ["[name]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP. S. more"], ["Bye."]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["p.p.s more"], ["P.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n- b"], ["* a", "**a**\n* b", "* a\n* b\n* c"]),
    ("detectable_format:constrained_response", {}, ["Well. My answer is no."], ["No."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and *b*"], ["*a*", "** and **"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb"], ["Section 1\na"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1]\n```'], ["{a: 1}", "So: {}"]),
    ("detectable_format:title", {}, ["<<Rain>>\ntext"], ["<< >>", "<Rain>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a ****** a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, ["say it. Done"], ["Done. Say it."]),
    ("startend:end_checker", {"end_phrase": "The end."}, ['He left. "the end."'], ["The end. Or not"]),
    ("startend:quotation", {}, ['"all of it"'], ['"some" of it', '"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["NO and YES"],
     ["No and YES"]),
    ("change_case:english_capital", {}, ["ALL, 1"], ["All"]), ("change_case:english_lowercase", {}, ["all"], ["All"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"])]


@pytest.mark.parametrize("name, given, followed, broken", CASES, ids=[case[0].split(":")[1] for case in CASES])
def test_each_instruction(name, given, followed, broken):
    constraints.check([(name, given)])
    assert [constraints.broken(text, [(name, given)]) for text in followed] == [None] * len(followed)
    assert [constraints.broken(text, [(name, given)]) for text in [*broken, " "]] == [name] * (len(broken) + 1)


def test_every_instruction_but_the_language_has_a_case():
    assert {case[0] for case in CASES} == set(constraints.CHECKERS) - {"language:response_language"}


def row(*rules):
    return {"key": 7, "prompt": "Write.", "instruction_id_list": [name for name, _ in rules],
            "kwargs": [{"relation": None, "keywords": None, **given} for _, given in rules]}


def test_a_row_is_right_when_all_is_followed_and_says_what_was_not():
    raw = row(("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["rain"]}))
    items = [benchmarks.ifeval(raw), benchmarks.ifeval(row(("punctuation:no_comma", {})))]
    task = tasks.benchmark("ifeval", items, prompts.find(None, "ifeval"))
    found = task.verdicts(["sun", "rain"])
    assert [verdict.right for verdict in found] == [False, True]
    assert [verdict.by for verdict in found] == ["keywords:existence", "all followed"]
    assert task.judge("rain", task.rows[0]).right and task.rows[0].prompt_messages[-1]["content"] == "Write."


@pytest.mark.parametrize("raw, message", [
    (row(("punctuation:no_colon", {})), ":2: instruction 'punctuation:no_colon' is not known; accepted: keywords"),
    (row(("keywords:existence", {})), ":2: instruction 'keywords:existence' lacks keywords"),
    (row(("punctuation:no_comma", {"words": 3})), "takes no words"),
    (row(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"})), "relation 'about'"),
    ({**row(), "kwargs": [{}]}, "expected two lists of one length"),
    ({**row(("punctuation:no_comma", {})), "prompt": ""}, '"prompt" is')])
def test_rows_that_cannot_be_judged_name_their_line(tmp_path, raw, message):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [row(("punctuation:no_comma", {})), raw])))
    with pytest.raises(ValueError, match=message):
        benchmarks.read(tmp_path / "rows.jsonl", "ifeval")


def test_languages_need_their_package(monkeypatch):
    rules = [("language:response_language", {"language": "de"})]
    monkeypatch.setattr(constraints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install langdetect"):
        constraints.check(rules)
    monkeypatch.undo()
    pytest.importorskip("langdetect")
    german, english = "Der Regen fällt auf die Stadt.", "The rain falls on the town."
    assert constraints.broken(german, rules) is None and constraints.broken(english, rules)
