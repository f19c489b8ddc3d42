"""The lanes benchmark: rows as promised, sweeps, and bad input that exits with 2."""

import json

import jax
import pytest

import dlm_jax
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.data import word_problems
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
    assert list(rows) == [f"rho_min={a} cache.refresh_interval={b}" for a in ("0.25", "0.5") for b in ("2", "0")]


def test_ablations_name_what_they_lack():
    found = lanes.systems(lanes.parser().parse_args(["--model", "x", "--ablations", "--block", "8"]))
    assert list(found) == ["AsyncLane", "without lookahead", "without reuse", "without both", "punctuation",
                           "interval 4"]
    assert found["without both"].lookahead == 0 and not found["without both"].cache.reuse_refresh_logits


@pytest.mark.parametrize("arguments, message", [
    (["--questions", "0"], "--questions 0"), (["--lengths", "0"], "--lengths 0"),
    (["--sweep", "rho=0.5"], "no such field"), (["--sweep", "rho_min=high"], "expected"),
])
def test_bad_input_exits_with_2(arguments, message, folder, capsys):
    assert benchmark.main(["lanes", "--model", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
