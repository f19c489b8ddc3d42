"""Converting checkpoints from the command line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import dlm_jax
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.io import checkpoints, orbax_params, tensor_files
from dlm_jax.io.checkpoints import Checkpoints
from dlm_jax.models import build
from dlm_jax.train.state import TrainState, partition
from launch import convert_weights
from tests.conftest import random_params, tiny_config


def run(*args):
    return convert_weights.main([str(a) for a in args])


def assert_identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)


@pytest.fixture
def seed(tmp_path):
    """A model directory with a tokenizer that has no mask token, and spare vocabulary rows."""
    words = {word: i for i, word in enumerate(["<|pad|>", "<|im_end|>", "<|im_start|>", *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<|pad|>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=tokenizers.CHAT_TEMPLATE)
    model = build.build(tiny_config(vocab_size=len(tokenizer) + 40))
    dlm_jax.save(tmp_path / "seed", model, random_params(model), tokenizer_from=tokenizer)
    file = tmp_path / "seed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"made_by": "someone"}))
    return tmp_path / "seed"


def test_orbax_and_back_is_bit_identical(seed, tmp_path, capsys):
    assert run("to-orbax", seed, tmp_path / "orbax") == 0
    assert run("to-hf", tmp_path / "orbax", tmp_path / "back") == 0
    assert "M parameters, float32" in capsys.readouterr().out
    ours, theirs = (tensor_files.read_folder(f) for f in (tmp_path / "back", seed))
    assert ours.keys() == theirs.keys() and all(ours[k].tobytes() == theirs[k].tobytes() for k in ours)
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((seed / name).read_text())
    config, params = orbax_params.load(tmp_path / "orbax", dtype=jnp.bfloat16)
    assert_identical(params, dlm_jax.load(seed, dtype=jnp.bfloat16)[1])


@pytest.mark.parametrize("apart", [True, False])
def test_layers_are_read_one_by_one_where_they_are_stored_apart(seed, tmp_path, monkeypatch, apart):
    if not apart:
        monkeypatch.setattr(checkpoints, "layer_chunks", lambda tree: None)
    assert run("to-orbax", seed, tmp_path / "orbax") == 0
    _, params = orbax_params.stream(tmp_path / "orbax", dtype="bfloat16")
    up, want = params["layers"]["mlp"]["up_proj"], dlm_jax.load(seed, dtype=jnp.bfloat16)[1]["layers"]["mlp"]["up_proj"]
    assert (up.shape, up.dtype, up.size) == (want.shape, want.dtype, want.size)
    for layer in (2, 0, 1):
        np.testing.assert_array_equal(up[layer,], want[layer], strict=True)
        assert up.memory.data.shape == ((1 if apart else 3), *want.shape[1:])
    np.testing.assert_array_equal(np.asarray(up), want, strict=True)
    assert up.memory.data is None
    assert run("to-hf", tmp_path / "orbax", tmp_path / "back") == 0
    ours, theirs = (tensor_files.read_folder(f) for f in (tmp_path / "back", seed))
    assert ours.keys() == theirs.keys() and all(ours[k].tobytes() == theirs[k].tobytes() for k in ours)


def test_orbax_arrays_load_into_shardings(seed, tmp_path):
    assert run("to-orbax", seed, tmp_path / "orbax", "--dtype", "bfloat16") == 0
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = jax.tree.map(lambda x: jax.sharding.NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "x")),
                             dlm_jax.load(seed)[1])
    _, params = orbax_params.load(tmp_path / "orbax", shardings)
    assert params["embed"].sharding == shardings["embed"]
    assert_identical(params, dlm_jax.load(seed, dtype=jnp.bfloat16)[1])


def test_cast(seed, tmp_path):
    assert run("cast", seed, tmp_path / "half", "--dtype", "bfloat16") == 0
    assert_identical(dlm_jax.load(tmp_path / "half")[1], dlm_jax.load(seed, dtype=jnp.bfloat16)[1])
    assert json.loads((tmp_path / "half" / "config.json").read_text())["made_by"] == "someone"


def test_a_mask_token_goes_into_a_spare_row(seed, tmp_path):
    assert run("to-refusion", seed, tmp_path / "out") == 0
    (old, before), (model, after) = dlm_jax.load(seed), dlm_jax.load(tmp_path / "out")
    tokenizer = tokenizers.load(tmp_path / "out")
    mask = len(tokenizers.load(seed))
    assert tokenizer.mask_token == "<|mask|>" and tokenizer.mask_token_id == mask == model.config.mask_token_id
    assert tokenizer.chat_template == tokenizers.load(seed).chat_template
    assert model.config == old.config.replace(mask_token_id=mask)
    for name in ("embed", "lm_head"):
        np.testing.assert_allclose(after[name][mask], before[name][:mask].mean(0), atol=1e-6)
        others = np.arange(old.config.vocab_size) != mask
        np.testing.assert_array_equal(after[name][others], before[name][others])
    logits = dlm_jax.forward(model, after, [[5, 6, 7]])
    np.testing.assert_array_equal(np.delete(logits, mask, -1),
                                  np.delete(dlm_jax.forward(old, before, [[5, 6, 7]]), mask, -1))
    assert not np.any(np.argmax(logits, -1) == mask)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["made_by"] == "someone"


def test_a_mask_token_goes_where_it_is_asked_for(seed, tmp_path, capsys):
    assert run("to-refusion", seed, tmp_path / "out", "--mask-id", 13) == 0
    (old, before), (model, after) = dlm_jax.load(seed), dlm_jax.load(tmp_path / "out")
    was, tokenizer = tokenizers.load(seed), tokenizers.load(tmp_path / "out")
    assert tokenizer.mask_token_id == 13 and tokenizer.convert_ids_to_tokens(13) == "<|mask|>"
    assert tokenizer("a<|mask|>b", add_special_tokens=False)["input_ids"] == [3, 13, 4]
    assert was.convert_ids_to_tokens(range(11)) == tokenizer.convert_ids_to_tokens(range(11))
    assert model.config == old.config.replace(mask_token_id=13)
    np.testing.assert_allclose(after["embed"][13], before["embed"][:13].mean(0), atol=1e-6)
    np.testing.assert_array_equal(np.delete(after["embed"], 13, 0), np.delete(before["embed"], 13, 0))
    # and then it is the tokenizer's own
    assert run("to-refusion", tmp_path / "out", tmp_path / "again", "--mask-id", 13) == 0
    assert run("to-refusion", tmp_path / "out", tmp_path / "other", "--mask-id", 14) == 2
    assert "mask token '<|mask|>' has id 13" in capsys.readouterr().err


def test_a_full_vocabulary_grows(tmp_path):
    model = build.build(tiny_config(tie_word_embeddings=True))
    params = random_params(model)
    dlm_jax.save(tmp_path / "seed", model, params)
    assert run("to-refusion", tmp_path / "seed", tmp_path / "out", "--mask-id", 97) == 0
    grown, after = dlm_jax.load(tmp_path / "out")
    assert grown.config == model.config.replace(vocab_size=128, mask_token_id=97)
    np.testing.assert_array_equal(after["embed"][:97], params["embed"])
    np.testing.assert_allclose(after["embed"][97:], jnp.broadcast_to(params["embed"].mean(0), (31, 32)), atol=1e-6)


def test_a_mask_token_that_exists_is_kept(seed, tmp_path):
    assert run("to-refusion", seed, tmp_path / "one") == 0
    assert run("to-refusion", tmp_path / "one", tmp_path / "two") == 0
    assert_identical(dlm_jax.load(tmp_path / "two")[1], dlm_jax.load(tmp_path / "one")[1])
    assert (tmp_path / "two" / "config.json").read_text() == (tmp_path / "one" / "config.json").read_text()


def test_a_dual_model_holds_its_ar_model_twice_and_a_mask_token(seed, tmp_path, capsys):
    assert run("to-orthrus", seed, tmp_path / "out", "--block-size", 4) == 0
    said = capsys.readouterr().out
    (old, before), (model, after) = dlm_jax.load(seed), dlm_jax.load(tmp_path / "out")
    mask = tokenizers.load(tmp_path / "out").mask_token_id
    assert model.config == old.config.replace(family="orthrus", mask_token_id=mask, block_size=4)
    assert_identical(after["layers"].pop("attention_diffusion"), before["layers"]["attention"])
    assert_identical(after["layers"], before["layers"])
    for name in ("embed", "lm_head", "final_norm"):  # nothing that the AR view had has changed
        assert_identical(after[name][: len(before[name])], before[name])
    assert ("the vocabulary grew to" in said) == (model.config.vocab_size > old.config.vocab_size)
    share = build.parameter_shares(model)
    assert f"{share['diffusion'] / share['total']:.0%} of them in the diffusion view, mask token id {mask}" in said
    stored = tensor_files.read_folder(tmp_path / "out")  # the authors' names
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        one, other = (stored[f"model.layers.2.self_attn.{name}{suffix}.weight"] for suffix in ("", "_diff"))
        assert one.tobytes() == other.tobytes()
    assert run("to-orthrus", tmp_path / "out", tmp_path / "again") == 2
    assert "a orthrus model has two views already" in capsys.readouterr().err


def test_a_flare_seed_is_the_ar_model_with_a_mask_token(seed, tmp_path, capsys):
    assert run("to-flare", seed, tmp_path / "out") == 0
    (old, _), (model, after) = dlm_jax.load(seed), dlm_jax.load(tmp_path / "out")
    assert model.config.replace(mask_token_id=None) == old.config  # no block: nothing has taught it to denoise
    assert run("to-refusion", seed, tmp_path / "same") == 0
    assert_identical(after, dlm_jax.load(tmp_path / "same")[1])
    assert run("to-diffusion", seed, tmp_path / "denoiser", "--shift", "0") == 0
    assert run("to-flare", tmp_path / "denoiser", tmp_path / "no") == 2
    assert "a2d-qwen3 model is not autoregressive" in capsys.readouterr().err


@pytest.mark.parametrize("family, shift, made", [
    ("qwen3", 0, "a2d-qwen3"), ("qwen3", 1, "a2d-qwen3"), ("qwen2", 0, "a2d-qwen2"), ("qwen2", 1, "Dream")])
def test_a_diffusion_seed_has_the_weights_and_sees_everything(tmp_path, capsys, family, shift, made):
    old = build.build(tiny_config(family, mask_token_id=96))
    dlm_jax.save(tmp_path / "seed", old, random_params(old))
    assert run("to-diffusion", tmp_path / "seed", tmp_path / "out", "--shift", shift) == 0
    assert f"mask token id 96, family {made}, shift {shift}" in capsys.readouterr().out
    model, params = dlm_jax.load(tmp_path / "out")
    assert (model.config.family, model.config.shift, model.config.bidirectional) == (made, shift, True)
    assert_identical(params, dlm_jax.load(tmp_path / "seed")[1])
    tokens = np.arange(8)[None]
    everything = dlm_jax.forward(old, params, tokens, visibility=np.ones((1, 8, 8), bool))
    np.testing.assert_allclose(dlm_jax.forward(model, params, tokens), everything, atol=1e-5)
    assert run("to-diffusion", tmp_path / "out", tmp_path / "again") == 2
    assert f"a {made} model is not autoregressive; accepted: ['qwen2', 'qwen3']" in capsys.readouterr().err


def test_a_run_in_two_dtypes_is_exported_in_that_of_its_embedding(tmp_path):
    model = build.build(tiny_config("orthrus", mask_token_id=96))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(model))
    trainable, frozen = partition(params, "attention_diffusion")
    trainable = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(1, TrainState(jnp.int32(1), jnp.zeros(2, jnp.uint32), trainable, frozen,
                                   optax.adam(1e-3).init(trainable)), {})
    checkpoints.wait()
    checkpoints.close()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": dataclasses.asdict(model.config), "train": {}}))
    assert run("to-hf", tmp_path / "run", tmp_path / "out") == 0
    assert_identical(dlm_jax.load(tmp_path / "out")[1], params)


def test_exporting_a_training_run(tmp_path, capsys):
    model = build.build(tiny_config())
    params = random_params(model)
    run_dir = tmp_path / "run"
    checkpoints = Checkpoints(run_dir / "checkpoints")
    for step in (1, 2):
        moved = jax.tree.map(lambda x: x + step, params)
        trainable, frozen = partition(moved, "attention")
        checkpoints.save(step, TrainState(jnp.int32(step), jnp.zeros(2, jnp.uint32), trainable, frozen,
                                          optax.adam(1e-3).init(trainable)), {})
        checkpoints.wait()
    checkpoints.close()
    (run_dir / "config.json").write_text(json.dumps({"model": dataclasses.asdict(model.config), "train": {}}))
    assert run("to-hf", run_dir, tmp_path / "newest") == 0
    assert "run has no tokenizer, so" in capsys.readouterr().err
    tokenizers.save(tokenizers.train(["a b c"], 260), run_dir / "tokenizer")
    assert run("to-hf", run_dir, tmp_path / "first", "--step", 1) == 0
    assert capsys.readouterr().err == "" and len(tokenizers.load(tmp_path / "first")) == 260
    again, loaded = dlm_jax.load(tmp_path / "newest")
    assert again == model
    assert_identical(loaded, jax.tree.map(lambda x: x + 2, params))
    assert_identical(dlm_jax.load(tmp_path / "first")[1], jax.tree.map(lambda x: x + 1, params))


def test_help_teaches_with_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    assert capsys.readouterr().out.count("python -m launch.convert_weights") >= 4


@pytest.mark.parametrize("args, message", [
    (("cast", "SEED", "OUT"), "cast needs --dtype, one of float32, bfloat16, float16"),
    (("cast", "SEED", "OUT", "--dtype", "int8"), "invalid choice: 'int8'"),
    (("to-orbax", "nowhere at all", "OUT"), "neither a directory nor a hub id"),
    (("to-hf", "SEED", "OUT"), "holds neither params/ nor checkpoints/"),
    (("to-orbax", "SEED", "SEED"), "exists and is not empty"),
    (("to-refusion", "SEED", "OUT", "--mask-id", "5"), "--mask-id 5: that is the token 'c'; accepted: 11 to 50"),
    (("to-refusion", "SEED", "OUT", "--mask-id", "51"), "outside the model's vocabulary of 51 ids; accepted: 11 to 50"),
    (("to-refusion", "SEED", "OUT", "--mask-id", "-1"), "outside the model's vocabulary of 51 ids"),
    (("to-refusion", "BARE", "OUT"), "has no tokenizer: --mask-id None"),
    (("to-refusion", "BARE", "OUT", "--mask-id", "-3"), "--mask-id -3 must be"),
    (("to-refusion", "BARE", "OUT", "--mask-id", "1"), "cannot be the mask token too"),
    (("to-orthrus", "BARE", "OUT"), "has no tokenizer: --mask-id None"),
    (("to-orthrus", "SEED", "OUT", "--block-size", "1"), "--block-size 1: expected at least 2"),
    (("to-refusion", "SEED", "OUT", "--block-size", "4"), "unrecognized arguments: --block-size"),
])
def test_bad_input_exits_2_and_leaves_nothing(seed, tmp_path, capsys, args, message):
    model = build.build(tiny_config())
    dlm_jax.save(tmp_path / "bare", model, random_params(model))
    places = {"SEED": seed, "OUT": tmp_path / "out", "BARE": tmp_path / "bare"}
    try:
        code = run(*(places.get(a, a) for a in args))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bare", "seed"]
