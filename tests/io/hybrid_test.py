"""Hugging Face directories of hybrid models: fused tensors, experts, and what is wrapped around a text model."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from tests.io.hf_test import assert_identical, rewrite
from tests.models.hybrids import hybrid


@pytest.mark.parametrize("family, dtype", [("qwen3_5_text", jnp.float32), ("qwen3_next", jnp.bfloat16)])
def test_round_trip_is_bit_identical_and_transformers_reads_the_config(family, dtype, tmp_path):
    import transformers

    model, params = hybrid(family)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    dlm_jax.save(tmp_path / "a", model, params)
    again, loaded = dlm_jax.load(tmp_path / "a")
    assert again == model
    assert_identical(loaded, params)
    theirs, c = transformers.AutoConfig.from_pretrained(tmp_path / "a"), model.config
    assert theirs.model_type == family and theirs.architectures == [type(theirs).__name__.replace(
        "TextConfig", "ForCausalLM").replace("Config", "ForCausalLM")]
    assert theirs.layer_types == [
        "full_attention" if "attention" in kind else "linear_attention" for kind in c.pattern * c.num_periods]
    assert theirs.rope_parameters["partial_rotary_factor"] == 0.5
    assert (theirs.linear_num_value_heads, theirs.linear_value_head_dim) == (4, 6)
    if c.moe is not None:
        assert (theirs.num_experts, theirs.mlp_only_layers, theirs.norm_topk_prob) == (5, [0, 2], True)


def test_a_wrapped_checkpoint_gives_its_text_model_and_names_the_rest(tmp_path, caplog):
    model, params = hybrid()
    folder = tmp_path / "model"
    dlm_jax.save(folder, model, params)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, "tie_word_embeddings": False}))

    def wrap(tensors):
        for name in [n for n in tensors if n.startswith("model.")]:
            tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors |= {f"model.visual.blocks.{i}.norm1.weight": np.ones(3, np.float32) for i in range(2)}
        tensors["mtp.fc.weight"] = np.ones((2, 2), np.float32)

    rewrite(folder, wrap)
    with caplog.at_level(logging.INFO, "dlm_jax"):
        again, loaded = dlm_jax.load(folder)
    assert again == model
    assert_identical(loaded, params)
    assert "tensors beside the text model are not loaded: 2 of model.visual, 1 of mtp" in caplog.text


def test_a_missing_piece_is_named(tmp_path):
    model, params = hybrid("qwen3_next")
    dlm_jax.save(tmp_path / "model", model, params)
    rewrite(tmp_path / "model", lambda tensors: tensors.pop("model.layers.2.linear_attn.in_proj_qkvz.weight"))
    with pytest.raises(ValueError, match=r"missing model.layers.2.linear_attn.in_proj_qkvz.weight of shape \(80, 32\)"):
        dlm_jax.load(tmp_path / "model")
