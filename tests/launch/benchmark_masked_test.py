"""The masked-diffusion benchmark: counts as promised, eager PyTorch decodes the same, bad input exits with 2."""

import json

import jax
import pytest

import dlm_jax
from dlm_jax.decode import MaskedDiffusion
from dlm_jax.models import build
from launch import benchmark
from launch.benchmark import masked
from tests.conftest import random_params, tiny_config

PROMPT, NEW, BLOCK, STEPS = 8, 32, 16, 8


@pytest.mark.slow
def test_a_tiny_run_counts_and_times_every_system(tmp_path, capsys):
    file = tmp_path / "masked.json"
    assert benchmark.main([
        "masked", "--size", "tiny", "--prompt", str(PROMPT), "--new-tokens", str(NEW), "--block", str(BLOCK), "--steps",
        str(STEPS), "--repeats", "1", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m launch.benchmark masked --size tiny")
    assert result["environment"]["jax"] == jax.__version__
    rows = {row["system"]: row for row in result["models"][0]["rows"]}
    whole, each = PROMPT + NEW, STEPS // 2 - 1  # forwards of a block that are no full pass
    positions = {
        "vanilla": STEPS * whole, "prefix cache": 2 * whole + each * (NEW + BLOCK),
        "dual cache": 2 * whole + 2 * each * BLOCK,
        "FreeCache": whole + each * NEW + (each + 1) * BLOCK,
        "block diffusion": PROMPT + (STEPS + 1) * BLOCK}  # the first block is run once more, clean
    assert {name: rows[name]["positions"] for name in positions} == positions
    assert all(rows[name]["forwards"] == STEPS for name in ("vanilla", "prefix cache", "dual cache", "FreeCache"))
    assert 2 <= rows["threshold"]["forwards"] < NEW
    assert rows["guided, all agreed"]["forwards"] == 1 < rows["guided, none agreed"]["forwards"]
    assert rows["guided, all agreed"]["guide_positions"] == whole
    for row in rows.values():
        assert row["tokens_per_second"] > 0 and row["ms_per_forward"] > 0
        if "eager_forwards" in row:
            assert row["eager_forwards"] == row["forwards"] and row["times_eager"] > 0
            assert row["same_ids"] == f"{NEW}/{NEW}"
    assert "FreeCache" in capsys.readouterr().out


CASES = [("a2d-qwen3", "none", 0), ("a2d-qwen3", "prefix", 0), ("Dream", "dual", 1), ("Dream", "free", 1),
         ("a2d-qwen3", "block", 0), ("Dream", "block", 1), ("a2d-qwen3", "delayed", 0), ("Dream", "delayed", 1)]


QUICK = (("free", 1), ("block", 0), ("delayed", 1))


@pytest.mark.parametrize(("family", "cache", "shift"), [
    case if case[1:] in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES])
def test_eager_pytorch_decodes_the_same(family, cache, shift):
    """An implementation that shares no line with ours, with outputs shifted or not, by steps and by threshold."""
    pytest.importorskip("transformers", reason="transformers is not installed: no peer to compare with")
    pytest.importorskip("torch", reason="PyTorch is not installed: no peer to compare with")
    from launch.benchmark import eager

    model = build.build(tiny_config(family, mask_token_id=96))
    params = random_params(model)
    network = masked.eager_network(model, params)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 30, 40, 50, 60, 70, 80]]
    assert model.config.shift == shift
    for rule in ({"steps": 8}, {"threshold": 0.6}):
        planned = "shares" if cache == "block" else "quota"
        named = {"rule": planned if "steps" in rule else "threshold", **rule}
        decoder = MaskedDiffusion(block_length=8, cache=cache, early_stop="none", **named)
        out = dlm_jax.generate(model, params, prompts[:1], decoder, max_new_tokens=16, eos_id=-1)
        tokens, forwards = eager.decode(
            network, prompts[:1], new_tokens=16, block_length=8, mask_id=96, shift=shift, cache=cache, **rule)
        assert tokens == [out.tokens[0].tolist()] and forwards == out.ledger.after_prefill()[0]
    batch, _ = eager.decode(
        network, prompts, new_tokens=16, block_length=8, mask_id=96, shift=shift, cache=cache, steps=8)
    alone, _ = eager.decode(
        network, prompts[1:], new_tokens=16, block_length=8, mask_id=96, shift=shift, cache=cache, steps=8)
    assert batch[1:] == alone


@pytest.mark.parametrize(("options", "message"), [
    (["--new-tokens", "40", "--size", "50m"], "--new-tokens 40: a multiple of --block 32"),
    (["--steps", "6"], "--steps 6: a multiple of the 8 blocks, at most 64"),
    (["--repeats", "0"], "--repeats 0: at least 1"),
    (["--block-share", "1"], "--block-share 1.0: between 0 and 1"),
])
def test_bad_input_exits_with_2(options, message, capsys):
    assert benchmark.main(["masked", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_causal_model_is_refused(tmp_path, capsys, tiny):
    dlm_jax.save(tmp_path / "model", *tiny)
    assert benchmark.main(["masked", "--model", str(tmp_path / "model")]) == 2
    assert "is causal" in capsys.readouterr().err
