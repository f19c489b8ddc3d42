"""Reading and writing Hugging Face configurations."""

import pytest

from dlm_jax.conventions import Conventions
from dlm_jax.models import hf_config as configs
from dlm_jax.models.config import FAMILIES
from tests.conftest import tiny_config

RAW = {
    "model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1e4, "tie_word_embeddings": True, "eos_token_id": 1, "sliding_window": 4096,
    "use_sliding_window": False,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied, rope_theta=12345.0, mask_token_id=7, rms_norm_eps=1e-5,
                         block_size=4, logit_shift=1 if tiny_config(family).bidirectional else None)
    assert configs.from_hf(configs.to_hf(config)) == config
    assert config.shift == (0 if config.convention == Conventions(prompt="causal") else 1)


def test_llada_speaks_olmo():
    raw = configs.to_hf(tiny_config("llada"))
    assert not {"hidden_size", "num_attention_heads"} & raw.keys()
    assert (raw["d_model"], raw["n_heads"], raw["n_kv_heads"], raw["embedding_size"]) == (32, 4, 2, 97)
    assert configs.from_hf(raw | {"n_kv_heads": None}).num_kv_heads == 4
    assert configs.from_hf(raw | {"vocab_size": 90}).vocab_size == 97, "the embedding has the rows it says"
    for change, message in [
            ({"alibi": True}, "alibi = True"), ({"layer_norm_type": "default"}, "layer_norm_type"),
            ({"include_qkv_bias": True}, "include_qkv_bias"), ({"n_heads": "4"}, "num_attention_heads")]:
        with pytest.raises(ValueError, match=message):
            configs.from_hf(raw | change)


@pytest.mark.parametrize("family, shift, bidirectional, dual", [
    ("qwen3", 1, False, False), ("qwen2", 1, False, False), ("orthrus", 1, False, True), ("llada", 0, True, False),
    ("Dream", 1, True, False), ("a2d-qwen3", 0, True, False)])
def test_what_families_are(family, shift, bidirectional, dual):
    config = tiny_config(family)
    assert (config.shift, config.bidirectional, config.dual) == (shift, bidirectional, dual)


@pytest.mark.parametrize("family, change, message", [
    ("qwen3", dict(logit_shift=0), "logit_shift = 0.*bidirectional"), ("llada", dict(logit_shift=2), "logit_shift = 2"),
    ("orthrus", dict(block_size=0), "block_size = 0")])
def test_what_families_are_not(family, change, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(family, **change)


def test_rotary_base_is_read_from_either_place():
    new = {k: v for k, v in RAW.items() if k != "rope_theta"} | {"rope_parameters": {"rope_theta": 5e5}}
    assert configs.from_hf(RAW).rope_theta == 1e4
    assert configs.from_hf(new).rope_theta == 5e5
    assert configs.from_hf(RAW | {"rope_scaling": None}) == configs.from_hf(RAW)


def test_defaults_of_old_files():
    raw = {k: v for k, v in RAW.items() if k not in ("head_dim", "num_key_value_heads")} | {"eos_token_id": [5, 6]}
    config = configs.from_hf(raw)
    assert (config.head_dim, config.num_kv_heads, config.eos_token_id) == (16, 4, 5)


@pytest.mark.parametrize("change, message", [
    (dict(model_type="gpt2"), "'gpt2'.*qwen2.*qwen3"),
    (dict(model_type=None), "None.*accepted"),
    (dict(num_key_value_heads=3), "4 is not a multiple of num_kv_heads = 3"),
    (dict(head_dim=15), "head_dim = 15.*even"),
    (dict(head_dim=None, num_attention_heads=5), "64 is not a multiple of num_attention_heads = 5"),
    (dict(use_sliding_window=True), "use_sliding_window"),
    (dict(rope_scaling={"type": "yarn", "factor": 4}), "'yarn'.*'default'"),
    (dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "'llama3'"),
    (dict(hidden_act="gelu"), "'gelu'.*'silu'"),
    (dict(attention_bias=True), "attention_bias"),
    (dict(vocab_size=0), "vocab_size = 0"),
    (dict(mask_token_id=128), "mask_token_id = 128.*128 ids"),
    (dict(eos_token_id=-1), "eos_token_id = -1"),
    (dict(eos_token_id=[]), r"eos_token_id = \[\].*expected an id"),
    (dict(eos_token_id="</s>"), "eos_token_id = '</s>'.*whole number"),
    (dict(vocab_size="abc"), "vocab_size = 'abc'.*whole number"),
    (dict(num_hidden_layers=1.9), "num_hidden_layers = 1.9.*whole number"),
    (dict(num_hidden_layers=float("inf")), "num_hidden_layers = inf.*whole number"),
    (dict(num_attention_heads=0), "num_heads = 0"),
    (dict(num_key_value_heads=0), "num_kv_heads = 0"),
    (dict(head_dim=True), "head_dim = True.*whole number"),
    (dict(rms_norm_eps=-1), "rms_norm_eps = -1.0: must be a positive number"),
    (dict(rms_norm_eps="1e-6"), "rms_norm_eps = '1e-6'.*a number"),
    (dict(rope_theta=-1), "rope_theta = -1.0: must be a positive number"),
    (dict(rope_theta=float("nan")), "rope_theta = nan"),
    (dict(rope_parameters={"rope_theta": 0}), "rope_theta = 0"),
    (dict(rope_parameters=[1]), r"rope_parameters = \[1\].*expected an object"),
    (dict(tie_word_embeddings="false"), "tie_word_embeddings = 'false'.*true or false"),
    (dict(max_position_embeddings=0), "max_position_embeddings = 0"),
    (dict(model_type=["qwen3"]), "model_type .'qwen3'. is not supported"),
])
def test_bad_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        configs.from_hf(RAW | change)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="lacks 'intermediate_size'"):
        configs.from_hf({k: v for k, v in RAW.items() if k != "intermediate_size"})


HYBRID = RAW | {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}


@pytest.mark.parametrize("change, pattern", [
    ({}, ("gated_delta+moe",) * 3 + ("attention+moe",)),
    (dict(full_attention_interval=2, num_experts=0), ("gated_delta", "attention")),
    (dict(layer_types=["full_attention"] * 8, decoder_sparse_step=2), ("attention", "attention+moe")),
    (dict(layer_types=["full_attention"] * 7 + ["linear_attention"], mlp_only_layers=[0], num_experts_per_tok=1),
     ("attention",) + ("attention+moe",) * 6 + ("gated_delta+moe",)),
    (dict(model_type="qwen3_5_text", num_experts=0, partial_rotary_factor=0.5), ("gated_delta",) * 3 + ("attention",))])
def test_layer_types_make_the_shortest_period(change, pattern):
    config = configs.from_hf(HYBRID | change)
    assert config.pattern == pattern
    assert config.rotary_dim == (8 if "partial_rotary_factor" in change else 4)
    assert configs.from_hf(configs.to_hf(config)) == config


def test_a_wrapped_text_model_is_read():
    text = HYBRID | {"model_type": "qwen3_5_text", "tie_word_embeddings": False, "num_experts": None}
    wrapped = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3}, "tie_word_embeddings": True}
    assert configs.from_hf(wrapped) == configs.from_hf(text).replace(tie_word_embeddings=True)
    assert configs.from_hf(wrapped | {"mask_token_id": 7}).mask_token_id == 7
    with pytest.raises(ValueError, match="text_config = None of a qwen3_5 model: expected an object"):
        configs.from_hf({"model_type": "qwen3_5"})


@pytest.mark.parametrize("change, message", [
    (dict(layer_types=["full_attention"] * 7 + ["mamba"]), "'mamba' in layer_types.*full_attention.*linear_attention"),
    (dict(layer_types=["full_attention"]), "lists 1 layers, num_hidden_layers is 8"),
    (dict(linear_num_value_heads=3), "value_heads = 3 is not a multiple of key_heads = 2"),
    (dict(linear_key_head_dim=0), "key_dim = 0: must be at least 1"),
    (dict(num_experts_per_tok=5), "active = 5.*all 4 experts"),
    (dict(partial_rotary_factor=0.2), "partial_rotary_factor = 0.2 of head_dim = 16"),
    (dict(attention_bias=True), "attention_bias"),
    (dict(full_attention_interval=0), "full_attention_interval = 0.*at least 1 layer"),
    (dict(decoder_sparse_step=0), "decoder_sparse_step = 0: expected at least 1 layer"),
    (dict(layer_types="full_attention"), "layer_types = 'full_attention': expected a list"),
    (dict(attn_output_gate=False), "attn_output_gate = false is not supported"),
    (dict(model_type="qwen3_5_text"), "num_experts = 4 of a qwen3_5_text model is not supported"),
    (dict(linear_conv_kernel_dim=None), "lacks 'linear_conv_kernel_dim'")])
def test_hybrids_that_cannot_be_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        configs.from_hf(HYBRID | change)


def test_kinds_of_layers_need_their_shapes():
    with pytest.raises(ValueError, match="has gated_delta layers and gated_delta = None"):
        tiny_config("qwen3_5_text", pattern=("gated_delta",))
    with pytest.raises(ValueError, match="has moe layers and moe = None"):
        tiny_config("qwen3_next", pattern=("attention+moe",))
