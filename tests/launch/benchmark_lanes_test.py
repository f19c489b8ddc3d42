"""The lanes benchmark: rows as promised, sweeps, and bad input that exits with 2."""

import json
import types

import jax
import numpy as np
import pytest
from rich.console import Console

import dlm_jax
from dlm_jax import decode
from dlm_jax.data import sources, word_problems
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.decode.answers import Generation
from dlm_jax.decode.ledger import Ledger
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from launch import benchmark
from launch.benchmark import lanes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked-diffusion model that was never trained, with a tokenizer of word problems."""
    place = tmp_path_factory.mktemp("lanes") / "model"
    rows = word_problems.generate(200, seed=0, split="train")
    tokenizer = tokenizers.train((f"{row['question']}\n{row['answer']}" for row in rows), 400)
    model = build.build(TransformerConfig(
        family="a2d-qwen3", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, rope_theta=1e4, initializer_range=0.3, max_position_embeddings=512, logit_shift=1,
        eos_token_id=tokenizer.eos_token_id, mask_token_id=tokenizer.mask_token_id))
    dlm_jax.save(place, model, build.init_params(model, jax.random.key(0)), tokenizer_from=tokenizer)
    return place


def measured(folder, tmp_path, *arguments):
    file = tmp_path / "lanes.json"
    assert benchmark.main(["lanes", "--model", str(folder), "--questions", "3", "--batch", "3", "--lengths", "24",
                           "--block", "8", "--threshold", "0.2", "--output", str(file), *arguments]) == 0
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m launch.benchmark lanes --model")
    return {row["system"]: row for row in result["rows"]}


@pytest.mark.slow
def test_every_system_is_a_row(folder, tmp_path, capsys):
    rows = measured(folder, tmp_path)
    assert list(rows) == ["block-wise", "threshold, dual cache", "several blocks", "coupled", "commit and advance",
                          "AsyncLane"]
    for row in rows.values():
        assert row["tokens"] <= 72 and row["tokens_per_second"] > 0 and row["positions"] > 1
    assert rows["AsyncLane"]["calls"] >= rows["AsyncLane"]["forwards"]
    assert rows["coupled"].get("average_lead", -1) == -1 and "fork_pairs" not in rows["several blocks"]
    assert "AsyncLane" in capsys.readouterr().out


def test_a_sweep_is_every_combination(folder, tmp_path):
    rows = measured(folder, tmp_path, "--sweep", "rho_min=0.25,0.5", "--sweep", "cache.refresh_interval=2,0")
    assert all(row["refused"] >= 0 and row["range"].count("-") == 1 for row in rows.values())
    assert list(rows) == [f"rho_min={a} cache.refresh_interval={b}" for a in ("0.25", "0.5") for b in ("2", "0")]


def test_ablations_name_what_they_lack():
    found = lanes.systems(lanes.parser().parse_args(["--model", "x", "--ablations", "--block", "8"]))
    assert list(found) == ["AsyncLane", "without lookahead", "without reuse", "without both", "punctuation",
                           "interval 4"]
    assert found["without both"].lookahead == 0 and not found["without both"].cache.reuse_refresh_logits


def test_thresholds_reach_every_system():
    made = lambda *arguments: lanes.systems(lanes.parser().parse_args(["--model", "x", *arguments]))
    one, other = made("--threshold", "0.6", "--entropy", "0.7"), made("--threshold", "0.8", "--entropy", "0.9")
    assert [name for name in one if one[name] == other[name]] == ["block-wise"]  # a token a forward
    assert one["several blocks"].commit == decode.Threshold(0.7)
    assert one["threshold, dual cache"].commit == one["AsyncLane"].commit == decode.Threshold(0.6)
    assert "interval 1" in made("--ablations", "--block", "1")


@pytest.mark.parametrize("lanes_too", [False, True])
def test_empty_answers_have_no_cost_a_token(lanes_too):
    none, counted = np.zeros(1, int), np.array([5])
    ledger = Ledger({"prefill": counted, "refresh": none}, {"prefill": counted}, none, none,
                    {"groups": none, "reuse": none, "forks_refused": none})
    record = {"iterations": none, "state": np.zeros((1, 2), int)} | {
        name: np.zeros((1, 2), int) for name in ("role", "start", "length", "step", "parent", "group", "end", "valid",
                                                 "first", "last")}
    out = Generation([none[:0]], none[None], none[None], none[None], ledger, {"prefill": 0.1, "decode": 0.1},
                     record if lanes_too else {})
    task = types.SimpleNamespace(rows=[sources.parse_row(word_problems.generate(1, seed=0, split="test")[0])],
                                 judge=lambda text, row: (0.0, text))
    tokenizer = tokenizers.train(["a question and its answer"], 270)
    row = lanes.measure("empty", 8, [out, out], tokenizer, task)
    assert row["tokens"] == row["tokens_per_second"] == 0
    assert row["forwards"] is row["positions"] is row["calls"] is None
    lanes.show([row], Console(width=200))


@pytest.mark.parametrize("arguments, message", [
    (["--sweep", "rho_min=0.5", "--ablations"], "--sweep and --ablations"),
    (["--questions", "0"], "--questions 0"), (["--repeats", "0"], "--repeats 0"), (["--lengths", "0"], "--lengths 0"),
    (["--sweep", "rho=0.5"], "no such field"), (["--sweep", "rho_min=high"], "expected"),
])
def test_bad_input_exits_with_2(arguments, message, folder, capsys):
    assert benchmark.main(["lanes", "--model", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
