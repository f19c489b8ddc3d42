"""Finding model directories, and writing a configuration over an original one."""

import json

import pytest

import dlm_jax
from dlm_jax.io import folders
from dlm_jax.models import build
from dlm_jax.models import hf_config as configs
from tests.conftest import random_params, tiny_config


def test_paths_that_hold_no_model(tmp_path):
    file = tmp_path / "weights.safetensors"
    file.touch()
    for path, message in [
        (tmp_path, "config.json does not exist"),
        (file, "is a file; expected the directory"),
        (tmp_path / "nowhere", "neither a directory nor a hub id"),
        ("", "config.json does not exist|neither a directory"),
    ]:
        with pytest.raises(ValueError, match=message):
            dlm_jax.load(path)


def test_a_hub_id_offline_is_a_clear_error(monkeypatch):
    import huggingface_hub

    asked = []

    def offline(repo, *, allow_patterns, **_):
        asked.append((repo, allow_patterns))
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="'owner/name' is not a directory here.*cannot reach the hub.*check the path"):
        dlm_jax.load("owner/name")
    assert asked == [("owner/name", ["config.json"])]


def test_the_real_hub_client_offline_is_a_clear_error():
    # tests/conftest.py sets HF_HUB_OFFLINE
    with pytest.raises(ValueError, match="not a directory here, and fetching it as a hub id failed"):
        dlm_jax.load("owner/a-model-that-does-not-exist")


def test_hub_downloads_check_the_config_before_the_weights(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def fetch(repo, *, allow_patterns, **_):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type 'gpt2' is not supported"):
        folders.resolve("owner/name")
    assert asked == [["config.json"]]
    (tmp_path / "config.json").write_text(json.dumps(configs.to_hf(tiny_config())))
    assert folders.resolve("owner/name") == tmp_path
    assert "*.safetensors" in asked[-1] and not any(p.endswith((".py", ".bin", "*")) for p in asked[-1])


@pytest.mark.parametrize("text, message", [
    ("{", "is not valid JSON"),
    ("[]", "holds a list; expected a JSON object"),
    ('{"model_type": "gpt2"}', "'gpt2' is not supported"),
    ('{"model_type": "qwen3"}', "lacks"),
    (json.dumps(configs.to_hf(tiny_config()) | {"hidden_size": "wide"}), "wide"),
    (json.dumps(configs.to_hf(tiny_config()) | {"hidden_size": None}), "config.json: .*lacks 'hidden_size'"),
    (json.dumps(configs.to_hf(tiny_config()) | {"rope_parameters": 3}),
     "config.json: rope_parameters = 3: expected an object"),
    (json.dumps(configs.to_hf(tiny_config()) | {"num_key_value_heads": 3}), "not a multiple of num_kv_heads = 3"),
    (json.dumps(configs.to_hf(tiny_config()) | {"quantization_config": {"bits": 4}}), "quantised"),
])
def test_malformed_configurations(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        dlm_jax.load(tmp_path)


def test_tensors_that_fit_several_families_need_a_model_type(tmp_path):
    model = build.build(tiny_config())
    dlm_jax.save(tmp_path / "m", model, random_params(model))
    file = tmp_path / "m" / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in raw.items() if name != "model_type"}))
    with pytest.raises(ValueError, match="model_type None is not supported.*Its tensors fit qwen3 and .*sdar and .*"
                                         "wedlm-qwen3.*write the model_type"):
        dlm_jax.load(tmp_path / "m")
    file.write_text(json.dumps(raw | {"model_type": "wedlm", "architectures": ["WeDLMForCausalLM"]}))
    with pytest.raises(ValueError, match="may be any of .'wedlm-qwen2', 'wedlm-qwen3'.: just one"):
        dlm_jax.load(tmp_path / "m")


def test_several_ends_are_told(tmp_path, caplog):
    model = build.build(tiny_config())
    dlm_jax.save(tmp_path / "m", model, random_params(model))
    dlm_jax.load(tmp_path / "m")
    assert not caplog.records
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    dlm_jax.load(tmp_path / "m")
    assert "several tokens end an answer, [1, 5]; decoding stops at one, 1 where" in caplog.text


ORIGINAL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "rope_theta": 10000, "torch_dtype": "bfloat16", "made_by": {"someone": [1, 2]},
    "max_window_layers": 28, "eos_token_id": [1, 5],
}


def test_an_unchanged_configuration_keeps_every_field():
    merged = folders.merge_config(ORIGINAL, configs.from_hf(ORIGINAL), "bfloat16")
    assert merged == ORIGINAL and list(merged) == list(ORIGINAL)
    assert type(merged["rope_theta"]) is int


def test_only_what_changed_is_written():
    config = configs.from_hf(ORIGINAL).replace(vocab_size=98, mask_token_id=97)
    merged = folders.merge_config(ORIGINAL, config, "float32")
    assert merged == ORIGINAL | {"vocab_size": 98, "mask_token_id": 97, "torch_dtype": "float32"}
    assert configs.from_hf(merged) == config


def test_every_changed_field_is_read_back():
    config = tiny_config()
    start = configs.to_hf(config)
    for change in (dict(rope_theta=7.0), dict(num_heads=2), dict(rms_norm_eps=1e-4), dict(tie_word_embeddings=True),
                   dict(eos_token_id=None), dict(max_position_embeddings=9)):
        new = config.replace(**change)
        assert configs.from_hf(folders.merge_config(start, new, "float32")) == new, change


def test_another_family_starts_afresh():
    config = tiny_config("qwen2")
    assert folders.merge_config(ORIGINAL, config, "float32") == configs.to_hf(config)
