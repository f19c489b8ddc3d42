"""Reports: one table a task, versions told apart, nothing half understood."""

import json

import pytest

from launch import report


def results(name="ar", task="words", accuracy=0.5, **changes):
    row = {"name": name, "family": name, "accuracy": accuracy, "accuracy_interval": [0.4, 0.6], "knob": None,
           "tokens_per_forward": 1.5, "tokens_per_second": 20.0, "tokens_per_second_batched": 90.0}
    return {"task": {"name": task, "metric": "exact match", "questions": 8}, "systems": [row],
            "environment": {"dlm_jax": "0.1.0", "jax": "0.10.2", "device": "cpu", "devices": 1, "date": "2026-11-22"},
            "model": {"path": "models/<x>", "config": "0123"}, **changes}


@pytest.fixture
def write(tmp_path):
    def write(name, found):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(found if isinstance(found, str) else json.dumps(found))
        return str(tmp_path / name)

    return write


def test_rows_stand_together_by_task(write, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folders = [write("a", results()), write("b", results("re|fusion", accuracy=0.75)), write("c", results(task="sums"))]
    assert report.main([*folders, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "a ar" in shown and "b re|fusion" in shown and "sums: 8 questions, exact match" in shown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*report.FILES, "frontier_1.png", "frontier_2.png"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("## words") == text.count("## sums") == 1
    assert "| b re\\|fusion | 75.0 % | 1.50 | 20 | 90 |" in text and "1 × cpu" in text and "![" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "models/&lt;x&gt;" in page and "data:image/png;base64," in page and "<x>" not in page


def test_one_file_keeps_its_names(write, capsys):
    assert report.main([write("a", results()) + "/results.json"]) == 0
    assert "a ar" not in capsys.readouterr().out


def test_versions_are_mixed_when_asked_only(write, capsys):
    newer = results("other")
    newer["environment"] = {**newer["environment"], "jax": "0.11.0"}
    folders = [write("a", results()), write("b", newer)]
    assert report.main(folders) == 2
    said = capsys.readouterr().err
    assert f"{folders[0]} was made with dlm_jax 0.1.0, jax 0.10.2" in said
    assert "jax 0.11.0" in said and "--mixed" in said
    assert report.main([*folders, "--mixed"]) == 0
    older = results("old")
    del older["environment"]
    assert report.main([folders[0], write("c", older)]) == 2 and "none stated" in capsys.readouterr().err


@pytest.mark.parametrize("found, reason", [
    (results(systems=[]), "holds no rows"), ("{", "no JSON"), ("[]", "no file of results"),
    ("{}", "no file of results")])
def test_files_that_are_none_are_refused(write, capsys, found, reason):
    assert report.main([write("a", found)]) == 2
    assert reason in capsys.readouterr().err


def test_directories_are_named(tmp_path, write, capsys):
    assert report.main([str(tmp_path / "nowhere")]) == 2 and "nowhere: no results.json" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert report.main([write("a", results()), "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
