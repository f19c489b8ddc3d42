"""Checkpoints of mixtures of experts: every layout, and the tensors of the published ones."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

import dlm_jax
from configs.experts import MODELS
from dlm_jax.io import names, tensor_files
from dlm_jax.models import build
from dlm_jax.models.shapes import LAYOUTS
from tests.io.hf_test import assert_identical, rewrite
from tests.models.mixtures import KINDS, mixture


def stored(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def laid_out(family, layout):
    """Returns (model, params) whose experts are stored in a layout."""
    model, params = mixture(family)
    moe = dataclasses.replace(model.config.moe, layout=layout)
    return dataclasses.replace(model, config=model.config.replace(moe=moe)), params


@pytest.mark.parametrize("family", sorted(KINDS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trips_are_bit_identical_in_every_layout(family, layout, tmp_path):
    model, params = laid_out(family, layout)
    dlm_jax.save(tmp_path / "a", model, params)
    again, loaded = dlm_jax.load(tmp_path / "a")
    assert again == model, "the layout too, so that it is written again"
    assert_identical(loaded, params)
    dlm_jax.save(tmp_path / "b", again, loaded, config_from=tmp_path / "a")
    assert stored(tmp_path / "a") == stored(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


@pytest.mark.parametrize("family", sorted(KINDS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_cover_exactly_the_parameter_tree(family, layout):
    model, _ = laid_out(family, layout)
    flat = jax.tree_util.tree_flatten_with_path(build.abstract_params(model))[0]
    assert {p.path: p.shape for p in names.parameters(model.config)} == {
        tuple(entry.key for entry in path): x.shape for path, x in flat}


def test_layouts_hold_the_same_numbers(tmp_path):
    for layout in LAYOUTS:
        dlm_jax.save(tmp_path / layout, *laid_out("llada_moe", layout))
    each, stacked, paired = (tensor_files.read_folder(tmp_path / layout) for layout in LAYOUTS)
    mlp, width = "model.layers.1.mlp.", 10
    of = lambda part: np.stack([each[f"{mlp}experts.{x}.{part}_proj.weight"] for x in range(6)])
    np.testing.assert_array_equal(stacked[mlp + "experts.gate_proj"], of("gate"))
    np.testing.assert_array_equal(stacked[mlp + "experts.down_proj"], of("down"))
    assert paired[mlp + "w1"].shape == (6, 2 * width, 32)
    np.testing.assert_array_equal(paired[mlp + "w1"], np.concatenate([of("gate"), of("up")], axis=1))
    np.testing.assert_array_equal(paired[mlp + "w2"], of("down"))


def test_fused_attention_is_all_queries_then_keys_then_values(tmp_path):
    model, params = mixture("llada2_moe")
    dlm_jax.save(tmp_path / "model", model, params)
    tensors = tensor_files.read_folder(tmp_path / "model")
    own = jax.tree.map(lambda a: np.asarray(a[0]), params["layers"]["layer_1"]["attention"])
    want = np.concatenate([own[name].reshape(32, -1).T for name in ("q_proj", "k_proj", "v_proj")])
    np.testing.assert_array_equal(tensors["model.layers.1.attention.query_key_value.weight"], want)
    want = np.concatenate([own[name].reshape(-1) for name in ("q_bias", "k_bias", "v_bias")])
    np.testing.assert_array_equal(tensors["model.layers.1.attention.query_key_value.bias"], want)


def test_a_checkpoint_half_fused_is_refused(tmp_path):
    model, params = mixture("llada2_moe")
    dlm_jax.save(tmp_path / "half", model, params)

    def fuse(tensors):
        for part in ("gate", "up", "down"):
            like = re.compile(rf"model\.layers\.1\.mlp\.experts\.\d+\.{part}_proj\.weight")
            whole = [tensors.pop(name) for name in sorted(filter(like.fullmatch, tensors))]
            tensors[f"model.layers.1.mlp.experts.{part}_proj"] = np.stack(whole)

    rewrite(tmp_path / "half", fuse)
    with pytest.raises(ValueError, match="half: experts are stored in several layouts.*half converted"):
        dlm_jax.load(tmp_path / "half")


def test_a_missing_expert_is_named(tmp_path):
    dlm_jax.save(tmp_path / "model", *mixture("sdar_moe"))
    rewrite(tmp_path / "model", lambda tensors: tensors.pop("model.layers.2.mlp.experts.4.up_proj.weight"))
    with pytest.raises(ValueError, match=r"missing model.layers.2.mlp.experts.4.up_proj.weight of shape \(10, 32\)"):
        dlm_jax.load(tmp_path / "model")


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
              "self_attn.k_norm", "input_layernorm", "post_attention_layernorm", "mlp.gate")
_EXPERTS = tuple(f"mlp.experts.N.{part}_proj" for part in ("gate", "up", "down"))
_QWEN = {"lm_head.weight": 1, "model.embed_tokens.weight": 1, "model.norm.weight": 1}
_SDAR = _QWEN | {f"model.layers.N.{name}.weight": 48 for name in _ATTENTION} | {
    f"model.layers.N.{name}.weight": 48 * 128 for name in _EXPERTS}
_MINI = {"lm_head.weight": 1, "model.word_embeddings.weight": 1, "model.norm.weight": 1,
         "model.layers.N.mlp.gate.expert_bias": 19, "model.layers.N.mlp.gate.weight": 19,
         **{f"model.layers.N.{name}.weight": 20 for name in (
             "attention.dense", "attention.key_layernorm", "attention.query_key_value", "attention.query_layernorm",
             "input_layernorm", "post_attention_layernorm")},
         **{f"model.layers.N.mlp.{part}_proj.weight": 1 for part in ("gate", "up", "down")},
         **{f"model.layers.N.mlp.shared_experts.{part}_proj.weight": 19 for part in ("gate", "up", "down")},
         **{f"model.layers.N.{name}.weight": 19 * 256 for name in _EXPERTS}}


@pytest.mark.parametrize("model, tensors, size", [
    ("llada2_mini", _MINI, 32_511_286_784),  # LLaDA2.1-mini stores its 19 x 256 biases in float32: 9,728 bytes more
    ("sdar_30b_a3b", _SDAR, 61_064_245_248), ("rnd1_30b_a3b", _SDAR, 61_064_245_248)])
def test_published_checkpoints_have_these_tensors_and_bytes(model, tensors, size):
    """As their model.safetensors.index.json says."""
    found = names.parameters(MODELS[model])
    shapes = {name: p.stored_shape for p in found for name in p.names}
    assert collections.Counter(re.sub(r"\.\d+(?=\.)", ".N", name) for name in shapes) == tensors
    assert sum(2 * int(np.prod(shape)) for shape in shapes.values()) == size
    shared = sum(p.piece is not None for p in found for _ in p.names)
    assert len(shapes) == sum(len(p.names) for p in found) - shared * 2 // 3


@pytest.mark.parametrize("model, billions", [
    ("llada2_mini", 16.3), ("llada2_flash", 102.9), ("sdar_30b_a3b", 30.5), ("rnd1_30b_a3b", 30.5),
    ("llada_moe_7b_a1b", 7.4)])
def test_published_sizes_are_built_without_their_memory(model, billions):
    config = MODELS[model]
    flat = jax.tree_util.tree_flatten_with_path(build.abstract_params(build.build(config)))[0]
    assert {p.path: p.shape for p in names.parameters(config)} == {
        tuple(entry.key for entry in path): x.shape for path, x in flat}
    assert round(sum(x.size for _, x in flat) / 1e9, 1) == billions


@pytest.mark.parametrize("family", sorted(KINDS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_tell_the_families_they_may_be_of(family, layout):
    model, _ = laid_out(family, layout)
    found = names.fitting(name for p in names.parameters(model.config) for name in p.names)
    assert family in found and not {"llada", "qwen3", "nemotron_labs_diffusion"} & {*found}


def test_another_models_tensors_are_named(tmp_path):
    dlm_jax.save(tmp_path / "model", *mixture("llada2_moe"))
    dlm_jax.save(tmp_path / "other", *mixture("rnd1"))
    (tmp_path / "model" / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    with pytest.raises(ValueError, match="These are the tensors of llada2_moe: its config.json is another model's"):
        dlm_jax.load(tmp_path / "model")
