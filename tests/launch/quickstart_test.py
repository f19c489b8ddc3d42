"""The main job: whole on a tiny budget, continued without repeating work, honest about bad input."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from dlm_jax.data import sources
from dlm_jax.evals import report
from launch import decode, quickstart
from launch.quickstart import job as jobs
from launch.quickstart import kept, plan, rows, stages
from launch.quickstart.systems import PLAN
from tests.conftest import ROOT

TINY = plan.Budget(rows=24, questions=3, layers=1, width=16, intermediate=16, heads=2, kv_heads=1, vocabulary=300,
                   batch_tokens=800, longest=96, steps={training.name: 2 for training in PLAN.trainings})
BUDGETS = {**PLAN.budgets, "smoke": TINY}
HEADLINES = dataclasses.replace(PLAN, systems=tuple(s for s in PLAN.systems if s.headline), budgets=BUDGETS)
FIRST = dataclasses.replace(PLAN, trainings=PLAN.trainings[:1], systems=PLAN.systems[:1], budgets=BUDGETS)


def row(i):
    return {"question": f"What is {i}+{i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(30)))
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One run of the generated task with a system of each kind; the others differ in settings alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(jobs.PLANS, "systems", HEADLINES)
        out = tmp_path_factory.mktemp("quickstart") / "run"
        arguments = ["--budget", "smoke", "--out", str(out), "--seed", "3"]
        assert quickstart.main(arguments) == 0
        yield out, arguments


def test_the_results_have_a_row_for_every_system(job):
    results = json.loads((job[0] / "results.json").read_text())
    assert [system["name"] for system in results["systems"]] == [s.name for s in HEADLINES.systems]
    for system in results["systems"]:
        assert system["questions"] == 3 and 0 <= system["accuracy"] <= 1
        counted = sum(n for kind, n in system["forwards"].items() if kind not in ("prefill", "guide"))
        yielding = system["decoder"]["kind"] in ("Autoregressive", "Orthrus", "ARTrust", "DiffusionTrust")
        counted += system["forwards"]["prefill"] if yielding else 0
        assert system["tokens_per_forward"] == pytest.approx(system["tokens"] / counted)
        assert system["tokens_per_second"] > 0 and system["wall_seconds"] > 0
    assert [(t["name"], t["steps"]) for t in results["trainings"]] == [(t.name, 2) for t in PLAN.trainings]
    assert [s["name"] for s in results["systems"] if s.get("lossless") is not None] == ["Orthrus", "FLARE, AR-Trust"]
    guided = {s.name for s in HEADLINES.systems if s.guide}
    assert guided and guided == {s["name"] for s in results["systems"] if "guide" in s["forwards"]}
    assert all(s["lossless"] == 1 and s["tokens_per_verification"] >= 1 for s in results["systems"] if "lossless" in s)
    assert set(results["curves"][1]["series"]) == {"whole", "autoregressive part", "denoising part"}


def test_the_report_shows_the_results(job):
    results = json.loads((job[0] / "results.json").read_text())
    assert (job[0] / "report.html").read_text(encoding="utf-8") == report.render(results)
    for replay in results["replays"]:
        for track in replay["tracks"]:
            assert any(frame["commits"] for frame in track["frames"])


def test_a_second_call_repeats_nothing(job, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("this work was done before")

    before = json.loads((job[0] / "results.json").read_text())
    for name in ("fit", "runner"):
        monkeypatch.setattr(stages, name, never)
    (job[0] / "results.json").unlink()
    assert quickstart.main(job[1]) == 0
    after = json.loads((job[0] / "results.json").read_text())
    assert {**after, "wall_seconds": 0} == {**before, "wall_seconds": 0}


@pytest.mark.parametrize("change", [["--seed", "4"], ["--budget", "standard"]])
def test_another_run_in_the_directory_is_refused(job, capsys, change):
    assert quickstart.main([*job[1], *change]) == 2
    error = capsys.readouterr().err
    assert change[0][2:] in error and "choose another --out" in error


def test_other_rows_in_the_directory_are_refused(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(rows, "make_tokenizer", lambda *_: (_ for _ in ()).throw(stages.Stopped("enough")))
    arguments = ["--data", str(data), "--out", str(tmp_path / "out")]
    assert quickstart.main(arguments) == 130
    assert "enough" in capsys.readouterr().err
    assert quickstart.main(arguments) == 130
    with data.open("a") as file:
        file.write(json.dumps(row(99)) + "\n")
    assert quickstart.main(arguments) == 2
    assert "rows" in capsys.readouterr().err


def test_a_stopped_training_says_how_to_continue(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setitem(jobs.PLANS, "systems", FIRST)
    fit = stages.fit
    stop = lambda *args, **kwargs: dataclasses.replace(fit(*args, progress=False, **kwargs), finished=False, step=1)
    monkeypatch.setattr(stages, "fit", stop)
    assert quickstart.main(["--data", str(data), "--out", str(tmp_path / "out"), "--budget", "smoke"]) == 130
    assert "step 1; the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "out" / "models").exists()


def test_bad_input_ends_with_2_and_the_reason(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(row(1)) + "\n{\n")
    one = tmp_path / "one.jsonl"
    one.write_text((json.dumps(row(1)) + "\n") * 5)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    for arguments, reason in (
            (["--data", str(bad)], "bad.jsonl:2: not JSON"), (["--data", str(tmp_path / "none")], "no such file"),
            (["--data", str(one)], "2 different questions"), (["--out", str(taken)], "no quickstart run"),
            (["--out", str(bad)], "is a file"), (["--seed", "-1"], "--seed -1")):
        defaults = ["--out", str(tmp_path / "out"), "--budget", "smoke"]
        assert quickstart.main([*defaults, *arguments]) == 2, arguments
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit) as done:
        quickstart.main(["--help"])
    assert done.value.code == 0 and "python -m launch.quickstart --data" in capsys.readouterr().out


def test_held_out_questions_never_occur_in_training(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(i % 40)) + "\n" for i in range(100)))
    train, test = rows.make(path, 0, 0, 3)
    asked = lambda found: {r.prompt_messages[0]["content"] for r in found}
    assert len(test) == len(asked(test)) == 3 and not asked(train) & asked(test)
    assert asked(train) | asked(test) == {row(i)["question"] for i in range(40)}
    assert rows.make(path, 0, 0, 3) == (train, test) != rows.make(path, 1, 0, 3)
    (tmp_path / "again.jsonl").write_text(rows.as_jsonl(train))
    assert sources.read_rows(tmp_path / "again.jsonl") == train


def test_a_kept_value_is_made_once_a_key(tmp_path):
    made = []
    make = lambda: made.append(1) or {"made": len(made)}
    path = tmp_path / "deep" / "value.json"
    assert [kept.result(path, key, make)["made"] for key in ("a", "a", "b", "b", "a")] == [1, 1, 2, 2, 3]
    assert [p.name for p in path.parent.iterdir()] == ["value.json"]


def test_the_documented_paths_are_ones_a_run_writes(job):
    texts = [(ROOT / "README.md").read_text(), decode.parser().format_help()]
    named = {Path(path) for text in texts for path in re.findall(r"runs/quickstart[\w/.-]*\w", text)}
    out = jobs.default_out(None)
    models = {stages.weights_of(out, training.name) for training in PLAN.trainings}
    studies = {stages.weights_of(jobs.default_out(None, study), training.name)
               for study, other in jobs.PLANS.items() for training in other.trainings}
    written = {out, out / "results.json", out / "report.html", out / "data/test.jsonl"}
    assert models & named and named <= studies | written
    assert all((job[0] / path.relative_to(out)).exists() for path in named & (models | written))


def test_rows_of_ones_own_are_a_run_of_their_own(data, monkeypatch):
    places = []
    monkeypatch.setattr(jobs, "run", lambda data, out, *_: places.append(out) or {"systems": []})
    for arguments in ([], ["--data", str(data)], ["--data", str(data), "--out", "here"]):
        assert quickstart.main(arguments) == 0
    assert places == [Path("runs/quickstart"), Path("runs/rows"), Path("here")]


def test_held_out_questions_too_long_for_the_model_are_dropped_before_training(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setitem(jobs.PLANS, "systems", FIRST)
    long = {"question": "Why? " * 5000, "answer": "#### 1"}
    make_rows = rows.make

    def with_long(count):
        def made(*args):
            train, test = make_rows(*args)
            return train, [sources.parse_row(long)] + (test if count else [])
        return made

    arguments = ["--data", str(data), "--budget", "smoke", "--out"]
    monkeypatch.setattr(rows, "make", with_long(0))
    assert quickstart.main([*arguments, str(tmp_path / "none")]) == 2
    assert "every held-out question is too long" in capsys.readouterr().err
    assert not (tmp_path / "none" / "training").exists()
    monkeypatch.setattr(rows, "make", with_long(1))
    assert quickstart.main([*arguments, str(tmp_path / "some")]) == 0
    results = json.loads((tmp_path / "some" / "results.json").read_text())
    assert results["task"]["questions"] == 3 and results["task"]["dropped"] == 1
    assert any(label == "Held-out questions" and "1 dropped" in text for label, text in results["facts"])
