"""The training launcher: from rows to a model directory, on, again, and refused."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.data.packing import Packer
from dlm_jax.decode import ReFusion
from launch import convert_weights, train

SMALL = ["model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=48", "model.num_heads=2",
         "model.num_kv_heads=1", "model.head_dim=16", "vocab_size=300", "length=32", "train.batch_size=8",
         "train.steps=4", "train.warmup_steps=1", "train.checkpoint_every=2"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(
        json.dumps({"question": f"What is {n} plus {n + 1}?", "answer": f"It is {2 * n + 1}."}) + "\n"
        for n in range(40)))
    return path


def launch(config, rows, run_dir, *more, settings=SMALL):
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return train.main(["--config", config, "--data", str(rows), "--run-dir", str(run_dir), *flags, *map(str, more)])


@pytest.fixture(scope="module")
def seed(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed") / "run"
    assert launch("tiny:autoregressive", rows, folder) == 0
    return folder


def test_a_seed_is_trained_and_turned_into_refusion(rows, seed, tmp_path, caplog):
    assert launch("tiny:refusion", rows, tmp_path / "run", "--init", seed / "model") == 0
    assert "40 rows: 0 cut" in caplog.text
    model, params = dlm_jax.load(tmp_path / "run" / "model")
    tokenizer = tokenizers.load(tmp_path / "run" / "model")
    assert model.config.mask_token_id == tokenizer.mask_token_id
    raw = json.loads((tmp_path / "run" / "config.json").read_text())
    assert raw["train"]["objective"]["mask_id"] == tokenizer.mask_token_id
    before = dlm_jax.load(seed / "model")[1]
    assert (np.asarray(params["embed"]) != np.asarray(before["embed"])).any()
    prompt = tokenizers.encode_prompt(tokenizer, [{"role": "user", "content": "What is 1 plus 2?"}])
    out = dlm_jax.generate(model, params, [prompt], ReFusion(slot_size=4, block_length=8), max_new_tokens=8,
                           eos_id=tokenizer.eos_token_id, mask_id=tokenizer.mask_token_id)
    assert len(out.tokens[0]) >= 1


def test_a_seed_is_given_a_second_view_and_only_that_is_trained(rows, seed, tmp_path, capsys):
    assert convert_weights.main(["to-orthrus", str(seed / "model"), str(tmp_path / "dual"), "--dtype", "bfloat16"]) == 0
    settings = [s for s in SMALL if not s.startswith(("model.", "vocab_size"))]
    small = ["train.objective.block_size=4", "train.objective.blocks=3"]
    assert launch("orthrus:tiny", rows, tmp_path / "run", "--init", tmp_path / "dual", settings=settings + small) == 0
    (old, before), (model, after) = dlm_jax.load(tmp_path / "dual"), dlm_jax.load(tmp_path / "run" / "model")
    assert (old.config.block_size, model.config.block_size) == (32, 4)
    changed = {"/".join(key.key for key in path): bool((x != y).any()) for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)}
    assert all(moved == ("attention_diffusion" in name) for name, moved in changed.items())
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"kl", "agreement", "agreement_1", "agreement_2", "overlap", "accepted", "skipped_rows"} <= set(line)


@pytest.mark.parametrize("config, shift", [("llada:tiny", 0), ("dream:tiny", 1), ("block_diffusion:tiny", 0)])
def test_a_seed_is_turned_into_a_masked_diffusion_model(rows, seed, tmp_path, config, shift):
    made = convert_weights.main(["to-diffusion", str(seed / "model"), str(tmp_path / "seed"), "--shift", str(shift)])
    assert made == 0
    settings = [s for s in SMALL if not s.startswith(("model.", "vocab_size"))]
    assert launch(config, rows, tmp_path / "run", "--init", tmp_path / "seed", settings=settings) == 0
    model, params = dlm_jax.load(tmp_path / "run" / "model")
    assert (model.config.family, model.config.shift) == ("a2d-qwen3", shift)
    assert model.config.block_size == (8 if config.startswith("block") else None)
    raw = json.loads((tmp_path / "run" / "config.json").read_text())["train"]["objective"]
    assert (raw["mask_id"], raw["eos_id"]) == (model.config.mask_token_id, model.config.eos_token_id)
    before = dlm_jax.load(seed / "model")[1]
    assert (np.asarray(params["embed"]) != np.asarray(before["embed"])).any()


def test_llada_is_trained_from_scratch_and_a_causal_model_is_refused(rows, seed, tmp_path, capsys):
    assert launch("llada:tiny", rows, tmp_path / "run") == 0
    raw = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (raw["model_type"], raw["n_layers"], raw["weight_tying"]) == ("llada", 1, False)
    settings = [s for s in SMALL if not s.startswith(("model.", "vocab_size"))]
    assert launch("llada:tiny", rows, tmp_path / "other", "--init", seed / "model", settings=settings) == 2
    assert "needs a bidirectional model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_flare_on_packed_rows_of_two_files_goes_on_where_it_was(rows, seed, tmp_path, caplog, monkeypatch):
    settings = [s for s in SMALL if not s.startswith(("model.", "vocab_size", "length"))]
    settings += ["length=64", "train.keep=4", "weights=3,1"]
    more = ["--init", seed / "model", "--data", rows]
    assert launch("flare:tiny_flare", rows, tmp_path / "whole", *more, settings=settings) == 0
    assert "80 rows packed into" in caplog.text
    line = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"loss_ar", "loss_diff1", "loss_diff2", "masked_share"} <= set(line) and 0 < line["masked_share"] < 1
    model, params = dlm_jax.load(tmp_path / "whole" / "model")
    assert (model.config.family, model.config.block_size, model.config.mask_token_id) == ("qwen3", 4, 3)

    taken, original = [], Packer.__next__

    def stops(packer):
        if len(taken) == 3:
            raise FloatingPointError("killed")
        taken.append(1)
        return original(packer)

    monkeypatch.setattr(Packer, "__next__", stops)
    assert launch("flare:tiny_flare", rows, tmp_path / "parts", *more, settings=settings) == 1
    monkeypatch.setattr(Packer, "__next__", original)
    assert launch("flare:tiny_flare", rows, tmp_path / "parts", *more, "--resume", settings=settings) == 0
    jax.tree.map(np.testing.assert_array_equal, params, dlm_jax.load(tmp_path / "parts" / "model")[1])


def test_any_objective_is_packed_by_a_flag_and_epochs_count_packed_rows(rows, tmp_path, caplog):
    settings = [s for s in SMALL if not s.startswith(("train.steps", "length"))] + ["length=128", "epochs=4"]
    assert launch("tiny:refusion", rows, tmp_path / "run", "--pack", settings=settings) == 0
    found = re.search(r"40 rows packed into (\d+):.* (\d+) steps of 8 rows", caplog.text)
    assert 8 <= int(found[1]) < 40 and int(found[2]) == -(-4 * int(found[1]) // 8)


@pytest.mark.parametrize("more, message", [
    ([], "has no model to make from scratch: give --init PATH"),
    (["--init", "SEED"], "has no diffusion view: make a dual model of it first"),
    (["--init", "DUAL", "--set", "train.objective.block_size=33"], "length = 32: rows have no room for blocks of 33"),
    (["--init", "DUAL", "--set", "train.objective.block_size=1"], "block_size = 1: expected at least 2"),
    (["--init", "DUAL", "--set", "train.trainable=q_proj"],
     "layers/attention/q_proj, but the objective 'orthrus' trains"),
    (["--init", "DUAL", "--set", "train.objective.mask_id=4096"], "mask_id = 4096 lies outside the vocabulary"),
])
def test_what_cannot_train_a_second_view_is_refused(rows, seed, tmp_path, capsys, more, message):
    convert_weights.main(["to-orthrus", str(seed / "model"), str(tmp_path / "dual")])
    places = {"SEED": seed / "model", "DUAL": tmp_path / "dual"}
    settings = [s for s in SMALL if not s.startswith(("model.", "vocab_size"))]
    more = [places.get(flag, flag) for flag in more]
    assert launch("orthrus:tiny", rows, tmp_path / "run", *more, settings=settings) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dual_model_is_not_trained_as_an_autoregressive_one(rows, seed, tmp_path, capsys):
    convert_weights.main(["to-orthrus", str(seed / "model"), str(tmp_path / "dual")])
    assert launch("tiny:autoregressive", rows, tmp_path / "run", "--init", tmp_path / "dual") == 2
    assert "would train both views of a dual model" in capsys.readouterr().err


def test_the_same_command_is_refused_without_resume_and_returns_the_run_with_it(rows, seed, capsys):
    assert launch("tiny:autoregressive", rows, seed) == 2
    assert "already holds a run; resume it (--resume)" in capsys.readouterr().err
    assert launch("tiny:autoregressive", rows, seed, "--resume") == 0
    assert launch("tiny:autoregressive", rows, seed, "--resume", "--set", "train.beta2=0.5") == 2
    assert "train.beta2: 0.98 -> 0.5" in capsys.readouterr().err


def test_a_run_has_its_tokenizer_from_the_start(rows, tmp_path, monkeypatch):
    def killed(*_):
        raise FloatingPointError("the first step never came")

    monkeypatch.setattr("dlm_jax.train.loop.init_state", killed)
    assert launch("tiny:autoregressive", rows, tmp_path / "run") == 1
    assert tokenizers.load(tmp_path / "run" / "tokenizer").mask_token == "<|mask|>"


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_model_directory_is_no_run(rows, seed, capsys, more):
    before = sorted((f, f.stat().st_mtime_ns) for f in (seed / "model").rglob("*"))
    assert launch("tiny:autoregressive", rows, seed / "model", *more) == 2
    assert "holds something that is no training run" in capsys.readouterr().err
    assert sorted((f, f.stat().st_mtime_ns) for f in (seed / "model").rglob("*")) == before


def test_epochs_decide_the_steps(rows, tmp_path, caplog):
    settings = [s for s in SMALL if "steps=4" not in s] + ["epochs=0.5"]
    assert launch("tiny:autoregressive", rows, tmp_path / "run", settings=settings) == 0
    assert "3 steps of 8 rows" in caplog.text


@pytest.mark.parametrize("change, message", [
    (["--config", "tiny:flair"], "config 'tiny:flair' is not known"),
    (["--set", "train.lr=1"], "train.lr: no such field"),
    (["--data", "/nonexistent/rows.jsonl", "--pack"], "/nonexistent/rows.jsonl"),
    (["--init", "/nonexistent/model"], "/nonexistent/model"),
    (["--set", "train.batch_size=6"], "6 rows cannot be split over data x fsdp = 8 devices"),
    (["--set", "train.mesh.fsdp=3"], "multiple of 3 devices but there are 8"),
    (["--set", "train.mesh.tensor=2"], "kv_heads = 1 cannot be split over mesh.tensor = 2"),
    (["--set", "length=3"], "length = 3"),
    (["--data", "ROWS"], "2 files of --data are mixed by packed rows: give --pack too"),
    (["--data", "ROWS", "--pack", "--set", "weights=1"], "weights = (1.0,): expected a positive number for each of"),
    (["--set", "weights=1"], "mix packed rows: give pack=true"),
    (["--set", "epochs=2"], "epochs = 2 decides the steps"),
])
def test_bad_input_ends_with_a_message_and_code_2(rows, tmp_path, capsys, change, message):
    change = [rows if flag == "ROWS" else flag for flag in change]
    assert launch("tiny:refusion", rows, tmp_path / "run", *change) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_malformed_row_is_named_by_file_and_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a", "response": "b"}\n{"query": "a"}\n')
    assert launch("tiny:refusion", path, tmp_path / "run") == 2
    assert f"{path}:2" in capsys.readouterr().err


def test_show_prints_the_configuration_and_needs_no_data(capsys):
    assert train.main(["--config", "refusion:qwen3_8b", "--set", "train.seed=7", "--show"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train"]["seed"] == 7 and shown["train"]["batch_size"] == 512
