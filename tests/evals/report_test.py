"""The page: whole, self-contained, and safe against what rows may contain."""

import json
import re

import pytest

from dlm_jax.evals import report


def results(text="plain"):
    system = {
        "name": "AR", "family": "AR", "headline": True, "decoder": {"kind": "Autoregressive"}, "accuracy": 0.5,
        "correct": 1,
        "questions": 2, "unfinished": 0, "tokens": 9, "tokens_per_forward": 1.1, "forwards": {"decode": 8},
        "positions": {"decode": 8}, "tokens_per_second": 10.0, "tokens_per_second_batched": 20.0,
        "batch_size": 2}
    commits = [[0, text, "autoregressive"], [1, "", "autoregressive"]]
    frames = [{"forward": 0, "kind": "prefill", "drafts": [], "commits": commits}]
    return {
        "title": text, "task": {"name": text, "metric": "exact match", "questions": 2}, "systems": [system],
        "curves": [{"name": "AR", "family": "AR", "series": {"loss": [[1, 2.0], [2, 1.0]]}}],
        "replays": [{"question": text, "expected": text,
                     "tracks": [{"name": "AR", "family": "AR", "slot_size": None, "frames": frames}]}],
        "examples": [{"question": text, "expected": text, "answers": [{"system": "AR", "text": text, "right": False}]}],
        "facts": [["text", text]]}


def embedded(page):
    return json.loads(re.search(r"const results = (.*);\n", page).group(1))


@pytest.mark.parametrize("text", [
    "plain", "</script><script>alert(1)</script>", "<!-- \\u003c \u2028 ☃ \" ' $& {}", "/*RESULTS*/null"])
def test_the_data_comes_through_whatever_the_rows_say(text):
    page = report.render(results(text))
    assert embedded(page) == results(text)
    assert page.lower().count("<script") == page.lower().count("</script") == 1


def test_the_page_fetches_nothing():
    page = report.render(results())
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<link|@import|url\(|fetch\(|XMLHttpRequest|\ssrc=|innerHTML", page)


def test_the_table_shows_shares_in_percent_and_only_columns_that_someone_fills():
    made = report.table([{"name": "a", "accuracy": 0.5, "seconds_per_answer": 0.0123, "tokens_per_second": 1234.5},
                         {"name": "b", "accuracy": 0.934, "tokens_per_forward": 2.345}])
    assert [column.header for column in made.columns] == [
        "system", "accuracy", "tokens / forward", "ms / answer", "tokens / s"]
    assert [list(column.cells) for column in made.columns] == [
        ["a", "b"], ["50.0 %", "93.4 %"], ["-", "2.35"], ["12.3", "-"], ["1,234", "-"]]


def test_missing_parts_and_numbers_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="systems"):
        report.render({k: v for k, v in results().items() if k != "systems"})
    with pytest.raises(ValueError):
        report.render({**results(), "facts": [["loss", float("nan")]]})


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    report.write(path, results("first"))
    with pytest.raises(ValueError):
        report.write(path, {})
    assert embedded(path.read_text(encoding="utf-8"))["title"] == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
