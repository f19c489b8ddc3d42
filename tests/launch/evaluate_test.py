"""The evaluate launcher: scores what the library scores, and refuses bad input with exit status 2."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import dlm_jax
from dlm_jax.data import sources, word_problems
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.decode import lossless
from dlm_jax.decode import runner as doubts
from dlm_jax.evals import report, runner
from dlm_jax.evals.sandbox import host
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from launch import evaluate

RAW = list(word_problems.generate(3, seed=0, split="test"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = tokenizers.train(tokenizers.texts_of([sources.parse_row(row) for row in RAW]), 300)
    config = TransformerConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, initializer_range=0.3, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=tokenizer.mask_token_id)
    model = build.build(config)
    path = tmp_path_factory.mktemp("model") / "tiny"
    dlm_jax.save(path, model, build.init_params(model, jax.random.key(0)), tokenizer_from=tokenizer)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in RAW))
    return path


def test_what_is_written_is_what_the_library_answers(folder, data, tmp_path, capsys):
    out = tmp_path / "found"
    arguments = ["--model", str(folder), "--data", str(data), "--out", str(out), "--max-new-tokens", "8",
                 "--batch-size", "2", "--timed", "1", "--limit", "2"]
    assert evaluate.main(arguments) == 0
    assert "accuracy" in capsys.readouterr().out and {path.name for path in out.iterdir()} == set(evaluate.FILES)
    results = json.loads((out / "results.json").read_text())
    assert (out / "report.html").read_text(encoding="utf-8") == report.render(results)
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    row, = results["systems"]
    assert row["questions"] == len(answers) == 2 and row["correct"] == sum(a["right"] for a in answers)
    model, params = dlm_jax.load(folder)
    tokenizer = tokenizers.load(folder)
    prompts = [tokenizers.encode_prompt(tokenizer, [{"role": "user", "content": raw["question"]}]) for raw in RAW[:2]]
    made = dlm_jax.generate(model, params, prompts, dlm_jax.decode.Autoregressive(), max_new_tokens=8)
    assert [a["text"] for a in answers] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in made.tokens]
    assert evaluate.main(arguments) == 2  # nothing found before is overwritten
    assert "new directory" in capsys.readouterr().err
    assert evaluate.main([*arguments, "--resume"]) == 2 and "that run has ended" in capsys.readouterr().err
    killed = tmp_path / "killed"
    (killed / evaluate.BATCHES).mkdir(parents=True)
    arguments[arguments.index(str(out))] = str(killed)
    assert evaluate.main(arguments) == 2 and "--resume to go on" in capsys.readouterr().err
    assert evaluate.main([*arguments, "--resume"]) == 0
    assert (killed / "answers.jsonl").read_text() == (out / "answers.jsonl").read_text()


@pytest.fixture(scope="module")
def dual(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "dual"
    dlm_jax.save(path, *dlm_jax.init_from_ar(*dlm_jax.load(folder)), tokenizer_from=folder)
    return path


@pytest.mark.parametrize("name, setting, fault", [
    ("orthrus", "block_size=4", False), ("orthrus", "block_size=4", True), ("ar_trust", "horizon=3", False)])
def test_the_lossless_claim_is_checked_and_kept(dual, data, tmp_path, caplog, monkeypatch, name, setting, fault):
    if fault:  # the decoder says something else than plain decoding does
        honest = lossless.check_lossless

        def check(model, params, prompts, decoder, **options):
            found = honest(model, params, prompts, decoder, **options)
            wrong = lossless.Difference(0, 0, 5, 6, np.zeros(9), np.zeros(9), gap=1.0, error=0.0, block_error=0.0)
            return dataclasses.replace(found, differences=(wrong,))

        monkeypatch.setattr(runner, "check_lossless", check)
    doubts._warn.cache_clear()  # said once a process, and other tests are of this one
    out = tmp_path / "found"
    assert evaluate.main(["--model", str(dual), "--data", str(data), "--out", str(out), "--decoder", name,
                          "--set", setting, "--max-new-tokens", "8", "--timed", "1", "--check-lossless"]) == int(fault)
    row, = json.loads((out / "results.json").read_text())["systems"]
    assert (row["lossless"], row["divergences"]) == ((1 - 1 / 3, 1) if fault else (1.0, 0))
    assert row["lossless_report"].startswith("NOT lossless: 3 prompts" if fault else "lossless: 3 prompts")
    assert row["lossless_report"] in caplog.text
    assert ("nothing says that it was trained to denoise" in caplog.text) == (name == "ar_trust")


def test_a_sampled_answer_has_nothing_to_be_compared_with(dual, data, tmp_path, capsys):
    assert evaluate.main(["--model", str(dual), "--data", str(data), "--out", str(tmp_path / "out"),
                          "--decoder", "orthrus", "--set", "temperature=0.5", "--check-lossless"]) == 2
    assert "greedy" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_chat_arguments_reach_every_question(folder, data, tmp_path, monkeypatch):
    tokenizer = tokenizers.load(folder)
    tokenizer.chat_template += "{{ opening | default('') }}"
    dlm_jax.save(tmp_path / "model", *dlm_jax.load(folder), tokenizer_from=tokenizer)
    seen, plain = [], runner.api.generate
    monkeypatch.setattr(runner.api, "generate", lambda model, params, prompts, **options: seen.extend(
        tokenizer.decode(ids) for ids in prompts) or plain(model, params, prompts, **options))
    assert evaluate.main(["--model", str(tmp_path / "model"), "--data", str(data), "--out", str(tmp_path / "out"),
                          "--chat", "opening=Well,", "--max-new-tokens", "2", "--timed", "1"]) == 0
    assert seen and all(text.endswith("Well,") for text in seen)


@pytest.mark.parametrize("change, reason", [
    (["--check-lossless"], "--check-lossless: --decoder autoregressive makes no such claim"),
    (["--data", "none.jsonl"], "no such file"), (["--decoder", "telepathy"], "telepathy"),
    (["--set", "temperature=-1"], "temperature"), (["--limit", "0"], "--limit 0"),
    (["--extract", "oracle"], "extractors ['oracle']: expected some of ['hash', 'boxed'"),
    (["--model", "nowhere/at/all"], "nowhere"), (["--max-new-tokens", "4096"], "max_position_embeddings")])
def test_bad_input_ends_with_2_and_the_reason(folder, data, tmp_path, capsys, change, reason):
    defaults = ["--model", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]
    assert evaluate.main([*defaults, *change]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_protocol_asks_a_benchmarks_file(folder, tmp_path, monkeypatch):
    rows = [{"task_id": n, "text": f"Add {n}.", "code": f"def f(x):\n    return x + {n}",
             "test_list": [f"assert f(0) == {n}"]} for n in (2, 3, 4, 11, 12, 600)]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, seen, plain = tokenizers.load(folder), [], runner.api.generate
    monkeypatch.setattr(runner.api, "generate", lambda model, params, prompts, **options: seen.extend(
        tokenizer.decode(ids) for ids in prompts) or plain(model, params, prompts, **options))
    monkeypatch.setattr(host, "check", lambda confined: None)
    monkeypatch.setattr(host, "examine", lambda exams, *rest, **options: [
        host.Outcome(number == 0, "" if number == 0 else "NameError: f") for number, _ in enumerate(exams)])
    data, out = str(tmp_path / "mbpp.jsonl"), str(tmp_path / "out")
    assert evaluate.main(["--model", str(folder), "--data", data, "--shots-data", data, "--out", out, "--protocol",
                          "asynclane-2026-256:mbpp", "--decoder", "autoregressive", "--max-new-tokens", "8",
                          "--timed", "1"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    row, = results["systems"]
    assert row["questions"] == 2 and row["correct"] in (0, 1) and row["accuracy_interval"] is not None
    assert row["asked"]["prompt"] == "begin_done@1" and row["asked"]["protocol"] == "asynclane-2026-256:mbpp"
    assert set(row["extracted"]) <= {"passed", "NameError", "nothing"} and row["metric"].startswith("pass@1")
    assert seen[0].count("You are an expert") == 4 and seen[0].endswith("[BEGIN]\n") and "Add 600" not in str(seen)


@pytest.mark.parametrize("change, reason", [
    (["--protocol", "refusion-2025:chess"], "accepted of refusion-2025: refusion-2025:mmlu_pro"),
    (["--protocol", "oracle"], "accepted: PAPER:BENCHMARK, of refusion-2025: mmlu_pro"),
    (["--protocol", "refusion-2025:gsm8k", "--task", "math"], "--task beside --protocol refusion-2025:gsm8k"),
    (["--protocol", "asynclane-2026-256:gsm8k"], "5 examples go before every question"),
    (["--task", "chess"], "accepted: gsm8k, math, choice, humaneval, mbpp"), (["--task", "mbpp"], 'rows.jsonl:1: "'),
    (["--task", "gsm8k", "--prompt", "letter"], "accepted for gsm8k: question, boxed"),
    (["--task", "gsm8k", "--shots", "0"], "--shots 0: at least 1"),
    (["--prompt", "letter"], "--prompt goes with --task"), (["--unconfined"], "--unconfined goes with --task"),
    (["--task", "gsm8k", "--shots", "9", "--shots-data", "ROWS"], "has 3 of the 9 examples")])
def test_bad_tasks_end_with_2_and_the_reason(data, tmp_path, capsys, change, reason):
    change = [str(data) if word == "ROWS" else word for word in change]
    defaults = ["--model", "nowhere/at/all", "--data", str(data), "--out", str(tmp_path / "out")]
    assert evaluate.main([*defaults, *change]) == 2
    assert reason in capsys.readouterr().err


def test_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit) as done:
        evaluate.main(["--help"])
    assert done.value.code == 0 and "python -m launch.evaluate --model" in capsys.readouterr().out
