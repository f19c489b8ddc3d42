"""Hugging Face directories: bit-identical round trips, sharded loading, and errors that name the tensor."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import dlm_jax
from dlm_jax.io import hf, tensor_files
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config

FAMILIES = [("qwen3", False), ("qwen3", True), ("qwen2", False), ("qwen2", True), ("orthrus", True),
            ("orthrus-qwen2", False), ("llada", False), ("Dream", False), ("llama", True),
            ("sdar", False), ("Fast_dLLM_Qwen", True), ("nemotron_labs_diffusion", False), ("stable-diffcoder", False),
            ("wedlm-qwen3", False), ("wedlm-qwen2", False), ("illada", True), ("edlm", False), ("a2d-qwen3", True),
            ("a2d-qwen2", False), ("a2d-llama", True)]


def make(family="qwen3", tied=False, dtype=jnp.float32):
    model = build.build(tiny_config(family, tie_word_embeddings=tied))
    return model, jax.tree.map(lambda x: x.astype(dtype), random_params(model))


def assert_identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A saved tiny model's directory, free to be damaged."""
    model, params = make()
    dlm_jax.save(tmp_path / "model", model, params)
    return tmp_path / "model"


def rewrite(folder, change):
    """Applies `change` to the dict of stored tensors."""
    tensors = {name: np.array(x) for name, x in tensor_files.read_folder(folder).items()}
    change(tensors)
    pending = [tensor_files.Pending(n, x.shape, x.dtype, lambda x=x: x) for n, x in tensors.items()]
    tensor_files.write_folder(folder, pending, 10**9)


@pytest.mark.parametrize("family, tied", FAMILIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_round_trip_is_bit_identical(family, tied, dtype, tmp_path):
    model, params = make(family, tied, dtype)
    params["embed"] = params["embed"].at[0, :3].set(jnp.array([jnp.nan, -0.0, jnp.inf], dtype))
    dlm_jax.save(tmp_path / "a", model, params)
    again, loaded = dlm_jax.load(tmp_path / "a")
    assert again == model
    assert_identical(loaded, params)
    dlm_jax.save(tmp_path / "b", again, loaded, tokenizer_from=tmp_path / "a")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == jnp.dtype(dtype).name


def test_sharded_files_hold_the_same_model(tmp_path):
    model, params = make(dtype=jnp.bfloat16)
    dlm_jax.save(tmp_path / "m", model, params, max_shard_bytes=10_000)
    assert (tmp_path / "m" / tensor_files.INDEX).is_file()
    assert len(list((tmp_path / "m").glob("model-*-of-*.safetensors"))) > 2
    assert_identical(dlm_jax.load(tmp_path / "m")[1], params)


def test_dtype_is_converted_on_the_way(tmp_path):
    model, params = make()
    dlm_jax.save(tmp_path / "m", model, params)
    assert_identical(dlm_jax.load(tmp_path / "m", dtype=jnp.bfloat16)[1],
                     jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


@pytest.mark.parametrize("dtype", [jnp.int8, bool, "bf16", "int4", 3])
def test_parameters_are_floats(saved, dtype):
    with pytest.raises(ValueError, match="parameters are floats"):
        dlm_jax.load(saved, dtype=dtype)


def test_mixed_stored_dtypes_are_kept(tmp_path):
    model, params = make(dtype=jnp.bfloat16)
    params["final_norm"] = params["final_norm"].astype(jnp.float32)
    dlm_jax.save(tmp_path / "m", model, params)
    assert_identical(dlm_jax.load(tmp_path / "m")[1], params)


def test_loading_into_shardings(saved):
    model, plain = dlm_jax.load(saved)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = {"embed": "x", "mlp": "y", "kv_heads": "y", "heads": "y"}
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in spec))),
        build.logical_axes(model), is_leaf=lambda x: isinstance(x, PartitionSpec))
    spread = hf.load_params(saved, model.config, shardings)
    assert_identical(spread, plain)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding}"), spread, shardings)
    piece = spread["layers"]["mlp"]["up_proj"].addressable_shards[0].data
    assert piece.shape == (3, 16, 28)
    dlm_jax.save(saved.parent / "again", model, spread)
    assert (saved / "model.safetensors").read_bytes() == (saved.parent / "again" / "model.safetensors").read_bytes()
    one = SingleDeviceSharding(jax.devices()[3])
    placed = hf.load_params(saved, model.config, one, jnp.float32)
    assert_identical(placed, plain)
    assert placed["layers"]["attention"]["q_norm"].sharding == one


def test_loaded_parameters_do_not_depend_on_the_file(saved):
    _, params = dlm_jax.load(saved)
    before = jax.tree.map(np.array, params)
    for file in saved.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    assert_identical(params, before)


def test_stacked_parameters_are_filled_in_place():
    whole, part = jnp.zeros((4, 64, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    lowered = hf._setter(None).lower(whole, part, (np.int64(1),)).compile()
    assert lowered.memory_analysis().temp_size_in_bytes < part.nbytes
    address = whole.unsafe_buffer_pointer()
    filled = hf._setter(None)(whole, part, (np.int64(1),))
    assert filled.unsafe_buffer_pointer() == address and whole.is_deleted()
    np.testing.assert_array_equal(filled[:, 0, 0].astype(jnp.float32), [0, 1, 0, 0])


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.norm.weight"), r"missing model.norm.weight of shape \(32,\)"),
    (lambda t: t.pop("lm_head.weight"), r"missing lm_head.weight of shape \(97, 32\)"),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.ones((56, 32), np.float32)}),
     r"unknown model.layers.3.mlp.up_proj.weight of shape \(56, 32\)"),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)}), "unknown .*q_proj.bias"),
    (lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": np.ones((12, 32), np.float32)}),
     r"model.layers.1.self_attn.k_proj.weight has shape \(12, 32\), expected \(24, 32\)"),
    (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), "model.norm.weight is int8, expected floats"),
    (dict.clear, "missing model.embed_tokens.weight.* and 28 more"),
])
def test_tensors_that_do_not_fit_are_named(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=message):
        dlm_jax.load(saved)


def test_old_buffers_are_ignored(saved):
    expected = dlm_jax.load(saved)[1]
    rewrite(saved, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}))
    assert_identical(dlm_jax.load(saved)[1], expected)


def test_a_stored_copy_of_a_tied_head_must_be_the_embedding(tmp_path):
    model, params = make(tied=True)
    dlm_jax.save(tmp_path / "m", model, params)
    rewrite(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_identical(dlm_jax.load(tmp_path / "m")[1], params)
    rewrite(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding; set tie_word_embeddings"):
        dlm_jax.load(tmp_path / "m")


def test_parameters_that_do_not_fit_are_not_saved(tmp_path):
    model, params = make()
    for broken, message in [
        (params | {"extra": params["embed"]}, "unknown extra"),
        ({k: v for k, v in params.items() if k != "lm_head"}, r"lm_head is missing, expected \(97, 32\)"),
        (params | {"embed": params["embed"][:5]}, r"embed is of shape \(5, 32\), expected \(97, 32\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            dlm_jax.save(tmp_path / "m", model, broken)
    assert not list(tmp_path.iterdir())


def test_saving_never_destroys(saved, tmp_path, monkeypatch):
    model, params = dlm_jax.load(saved)
    with pytest.raises(ValueError, match="is not empty; give a fresh directory, or overwrite=True"):
        dlm_jax.save(saved, model, params)
    before = {f.name: f.read_bytes() for f in saved.iterdir()}

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "write_folder", full)
        with pytest.raises(OSError, match="No space"):
            dlm_jax.save(saved, model, params, overwrite=True)
        with pytest.raises(OSError, match="No space"):
            dlm_jax.save(tmp_path / "fresh", model, params)
    assert {f.name: f.read_bytes() for f in saved.iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
    changed = params | {"embed": params["embed"] + 1}
    dlm_jax.save(saved, model, changed, overwrite=True)
    assert_identical(dlm_jax.load(saved)[1], changed)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def test_carried_files_and_options(saved, tmp_path):
    (saved / "tokenizer.json").write_text("{}")
    (saved / "chat_template.jinja").write_text("hello")
    (saved / "modeling_custom.py").write_text("raise SystemExit")
    model, params = dlm_jax.load(saved)
    dlm_jax.save(tmp_path / "out", model, params, tokenizer_from=saved)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(ValueError, match="tokenizer_from = 'nowhere' is not a directory"):
        dlm_jax.save(tmp_path / "new", model, params, tokenizer_from="nowhere")
    with pytest.raises(ValueError, match="max_shard_bytes = 0"):
        dlm_jax.save(tmp_path / "new", model, params, max_shard_bytes=0)


def test_transformers_reads_config_and_tokenizer(tmp_path):
    import tokenizers
    import transformers

    words = {"<|pad|>": 0, "<|im_end|>": 1, "hello": 2, "world": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|pad|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>",
                                                     pad_token="<|pad|>")
    model, params = make()
    dlm_jax.save(tmp_path / "m", model, params, tokenizer_from=tokenizer)
    dlm_jax.save(tmp_path / "copy", model, params, tokenizer_from=tmp_path / "m")
    for folder in (tmp_path / "m", tmp_path / "copy"):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs("world hello")["input_ids"] == [3, 2]
        assert theirs.eos_token_id == 1
        config = transformers.AutoConfig.from_pretrained(folder)
        assert isinstance(config, transformers.Qwen3Config)
        assert (config.vocab_size, config.head_dim, config.rope_parameters["rope_theta"]) == (97, 12, 1e4)


@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen2", False)])
def test_checkpoints_written_by_transformers(family, tied, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import transformers

    kind = {"qwen3": transformers.Qwen3Config, "qwen2": transformers.Qwen2Config}[family]
    config = kind(vocab_size=97, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64, eos_token_id=1,
                  bos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert (tmp_path / "theirs" / tensor_files.INDEX).is_file()
    model, params = dlm_jax.load(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 97, (2, 9))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(dlm_jax.forward(model, params, tokens), expected, atol=2e-4)
    dlm_jax.save(tmp_path / "ours", model, params, tokenizer_from=tmp_path / "theirs")
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == json.loads(
        (tmp_path / "theirs" / "config.json").read_text())
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(back(torch.tensor(tokens)).logits.numpy(), expected)


def test_reference_checkpoints_survive_a_round_trip(shared, tmp_path):
    checkpoints = [f for f in sorted(shared.iterdir()) if f.name.startswith(("qwen3_", "refusion_"))]
    assert checkpoints
    for folder in checkpoints:
        model, params = dlm_jax.load(folder)
        dlm_jax.save(tmp_path / folder.name, model, params, tokenizer_from=folder)
        ours, theirs = (tensor_files.read_folder(f) for f in (tmp_path / folder.name, folder))
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
        same = [json.loads((f / "config.json").read_text()) for f in (tmp_path / folder.name, folder)]
        assert same[0] == same[1] and list(same[0]) == list(same[1])
        shutil.rmtree(tmp_path / folder.name)
