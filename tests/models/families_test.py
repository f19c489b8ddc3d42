"""Which family a config.json belongs to, from the fields that released checkpoints have."""

import pytest

from configs import llada
from dlm_jax.conventions import Conventions
from dlm_jax.models import families
from dlm_jax.models import hf_config as configs
from tests.conftest import tiny_config


def own(model_type, module, name, **more):
    """Fields of a checkpoint with code of its own."""
    return {"model_type": model_type, "architectures": [name], "auto_map": {
        "AutoConfig": f"configuration_{module}.Config", "AutoModel": f"modeling_{module}.{name}"}, **more}


RELEASED = {
    "sdar": own("sdar", "sdar", "SDARForCausalLM"),
    "sdar_moe": own("sdar_moe", "sdar_moe", "SDARMoeForCausalLM"),
    "Fast_dLLM_Qwen": own("Fast_dLLM_Qwen", "fast_dllm", "Fast_dLLM_QwenForCausalLM"),
    "nemotron_labs_diffusion": own("nemotron_labs_diffusion", "nemotron_labs_diffusion", "NemotronLabsDiffusionModel"),
    "llada2_moe": own("llada2_moe", "llada2_moe", "LLaDA2MoeModelLM"),
    "wedlm-qwen3": own("wedlm", "wedlm", "WeDLMForCausalLM", qk_norm=True, attention_bias=False),
    "wedlm-qwen2": own("wedlm", "wedlm", "WeDLMForCausalLM", qk_norm=False, attention_bias=True),
    "llada": own("llada", "llada", "LLaDAModelLM"),
    "llada_moe": own("llada", "lladamoe", "LLaDAMoEModelLM", num_experts=64),
    "Dream": own("Dream", "dream", "DreamModel"),
    "stable-diffcoder": own("llama", "stable_diffcoder", "StableDiffcoderForCausalLM"),
    "illada": {"model_type": "illada", "architectures": ["ILLaDAForCausalLM"], "auto_map": {
        "AutoConfig": "configuration_illada.ILLaDAConfig", "AutoModel": "modeling_illada.ILLaDAForCausalLM",
        "AutoModelForCausalLM": "modeling_illada.ILLaDAForCausalLM"}},
    "edlm": own("edlm", "edlm", "EfficientDLM"),
    "rnd1": own("rnd1", "rnd", "RND1LM"),
    "a2d-qwen3": own("a2d-qwen3", "qwen3", "A2DQwen3LMHeadModel"),
    "a2d-qwen2": own("a2d-qwen2", "qwen2", "A2DQwen2LMHeadModel"),
    "a2d-llama": own("a2d-llama", "llama", "A2DLlamaLMHeadModel"),
    "orthrus": {"model_type": "orthrus", "architectures": ["OrthrusLM"]},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


@pytest.mark.parametrize("family", RELEASED)
def test_released_fields_tell_the_family(family):
    assert families.recognise(RELEASED[family]) == family


@pytest.mark.parametrize("raw, family", [
    (own("llada", "llada", "LLaDAModelLM", d_model=4096, mask_token_id=126336), "llada"),  # LLaDA-1.5, dParallel, d3LLM
    (own("Dream", "dream", "DreamModel", mask_token_id=151666), "Dream"),  # DiffuCoder, Dream-Coder, dParallel, d3LLM
    (own("sdar", "sdar", "SDARForCausalLM", block_size=16), "sdar"),  # TraDo
    ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "diffusion_conventions": {"logits": "shifted"}},
     "qwen2"),  # Open-dCoder
    (own("llada2_moe_veomni", "llada2_moe", "LLaDA2MoeModelLM"), "llada2_moe"),  # fused by dFactory
    (own("llama", "stable_diffcoder", "SeedDiffcoderForCausalLM"), "stable-diffcoder")])
def test_relatives_of_a_family_are_of_it(raw, family):
    assert families.recognise(raw) == family


def test_code_of_its_own_says_more_than_an_architecture_that_was_kept():
    kept = {"model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.SeedDiffcoderForCausalLM"}}
    assert families.recognise(kept) == "stable-diffcoder"


def test_without_a_class_the_model_type_says_it():
    assert families.recognise({"model_type": "llada"}) == "llada"
    assert families.recognise({"model_type": "llada", "num_experts": 64}) == "llada_moe"
    assert families.recognise({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}) == "llama"


@pytest.mark.parametrize("raw, message", [
    (own("sdar2", "sdar2", "SDAR2ForCausalLM"),
     "'sdar2' is not supported.*nearest known family is 'sdar', which has model_type 'sdar', not 'sdar2'; class "
     "'SDARForCausalLM', not 'SDAR2ForCausalLM'"),
    (own("llama", "other", "OtherDiffusionLM"), "OtherDiffusionLM of model_type 'llama' is code of its own"),
    (own("sdar", "wedlm", "WeDLMForCausalLM"), "'sdar' is of family 'sdar' and WeDLMForCausalLM of 'wedlm-qwen"),
    (own("wedlm", "wedlm", "WeDLMForCausalLM"), "qk_norm = None, attention_bias = None may be any of"),
    ({"model_type": "xyzzy"}, "'xyzzy' is not supported; accepted: ")])
def test_what_is_unknown_is_answered_with_what_is_near(raw, message):
    with pytest.raises(ValueError, match=message):
        families.recognise(raw)


def test_masks_that_configs_leave_out():
    read = lambda vocabulary, **raw: configs.from_hf({
        name: value for name, value in configs.to_hf(tiny_config("sdar", vocab_size=vocabulary)).items()
        if name != "mask_token_id"} | raw).mask_token_id
    assert (read(151936), read(151936, mask_token_id=7)) == (151669, 7)
    assert read(1000) is None, "no such id in the vocabulary"
    assert read(151936, mask_token_id=None) is None, "a model of ours that has none says so"


def test_illada_is_read_from_the_fields_that_its_code_reads():
    raw = RELEASED["illada"] | {
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": None, "max_position_embeddings": 8192,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "use_cache": False, "vocab_size": 155136}
    assert configs.from_hf(raw) == llada.ILLADA_8B, "mask and end of sequence are the family's"


def test_conventions_may_be_a_model_s_own():
    told = Conventions(prompt="full", logits="shifted")
    config = tiny_config("qwen2", conventions=told, mask_token_id=7)
    raw = configs.to_hf(config)
    assert raw["diffusion_conventions"]["logits"] == "shifted"
    assert configs.from_hf(raw) == config
    assert (config.bidirectional, config.shift) == (True, 1)
    with pytest.raises(ValueError, match="diffusion_conventions = .*expected an object with some of"):
        configs.from_hf(raw | {"diffusion_conventions": {"blocks": 4}})


def test_a_stretched_rotary_embedding_goes_round():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    raw = configs.to_hf(tiny_config("nemotron_labs_diffusion")) | {"rope_parameters": rope}
    config = configs.from_hf(raw)
    assert (config.yarn.factor, config.yarn.original, config.yarn.magnitude, config.yarn.query_growth) == (
        16.0, 16384, 1.0, 0.1)
    assert configs.from_hf(configs.to_hf(config)) == config
    assert configs.from_hf(raw | {"rope_parameters": rope | {"mscale_all_dim": None}}).yarn.magnitude > 1.2
    with pytest.raises(ValueError, match="lacks 'factor'"):
        configs.from_hf(raw | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8}})
