"""The masked-diffusion configurations: sizes of the real models, the papers' numbers, and Table 11 of FlashDLM."""


import numpy as np
import pytest

import configs
from configs import block_diffusion, dream, fast_dllm, flashdlm, llada
from dlm_jax import decode
from dlm_jax.models import build

SIZES = {  # billions of parameters, as the models' cards give them
    "llada": (llada.LLADA_8B, 8.02), "dream": (dream.DREAM_7B, 7.62), **{
        name: (flashdlm.GUIDERS[name], billions) for name, billions in
        (("qwen2_5_0_5b", 0.494), ("qwen2_5_1_5b", 1.544), ("qwen2_5_3b", 3.086), ("qwen2_5_7b", 7.616))}}


@pytest.mark.parametrize("name", SIZES)
def test_real_sizes(name):
    config, billions = SIZES[name]
    assert build.parameter_shares(build.build(config))["total"] / 1e9 == pytest.approx(billions, rel=2e-3)


def test_llada_trains_as_its_paper_says():
    pretrain, sft = configs.load("llada:pretrain_8b"), configs.load("llada:sft_8b")
    objective = pretrain.train.objective
    assert (pretrain.train.batch_size, pretrain.length, pretrain.train.learning_rate) == (1280, 4096, 4e-4)
    assert pretrain.train.steps == pytest.approx(2.3e12 / (1280 * 4096), rel=1e-4)
    assert (objective.target, objective.random_length, objective.eps) == ("all", 0.01, 1e-3)
    assert sft.with_steps(4_500_000).train.steps == sft.train.steps == 52_735
    assert (sft.train.objective.target, sft.train.objective.padding, sft.train.objective.normalisation) == (
        "response", "eos", "sequence")


def test_dream_predicts_the_next_token_and_llada_its_own():
    names = ("llada:tiny", "dream:tiny", "dream:sft_7b", "block_diffusion:tiny")
    assert [configs.load(name).model.shift for name in names] == [0, 1, 1, 0]
    assert configs.load("dream:sft_7b").with_steps(1_800_000).train.steps == 9_375


@pytest.mark.parametrize("name", ["llada:tiny", "dream:tiny", "block_diffusion:tiny", "block_diffusion:sft_8b"])
def test_models_made_from_scratch_suit_their_objective(name):
    run = configs.load(name)
    assert run.model.bidirectional
    block_size = getattr(run.train.objective, "block_size", None)
    assert run.model.block_size == block_size


def test_table_11():
    dream_, llada_, exact, relaxed = (flashdlm.DECODING[name] for name in (
        "dream_freecache", "llada_freecache", "guided", "guided_relaxed"))
    for entry, decoded, frozen in ((dream_, 256, None), (llada_, 64, 256)):
        assert (entry.max_new_tokens, entry.decoder.schedule, entry.decoder.cache) == (
            256, decode.Blocks(decoded), decode.Free(block_length=frozen))
    for entry in (exact, relaxed):
        assert (entry.max_new_tokens, entry.decoder.verify_batch_size, entry.decoder.cache.block_length) == (
            1024, 32, 256)
    assert relaxed.decoder.accept.tau == 0.5


def test_what_is_called_released_is_the_released_sampler():
    same = lambda module, name, **fields: module.DECODING[name].decoder == decode.MaskedDiffusion(**fields)
    assert same(dream, "released", schedule=decode.Whole(), commit=decode.Timesteps(512, 1e-3), stop=decode.Never(),
                confidence=decode.Tempered(decode.Entropy()), sampler=decode.Sampler(temperature=0.2, top_p=0.95))
    assert same(llada, "released", schedule=decode.Blocks(32), commit=decode.Quota(128), stop=decode.Never())
    assert same(flashdlm, "dream_freecache", schedule=decode.Blocks(256), commit=decode.Timesteps(0, 1e-3),
                confidence=decode.Tempered(decode.Entropy()), cache=decode.Free(), stop=decode.Run(1))
    assert same(flashdlm, "llada_freecache", schedule=decode.Blocks(64), commit=decode.Quota(0),
                cache=decode.Free(block_length=256), stop=decode.Fill())
    assert same(block_diffusion, "released", schedule=decode.Blocks(32), commit=decode.Shares(256),
                cache=decode.BlockCausal(), stop=decode.AfterBlock())
    assert same(block_diffusion, "parallel", schedule=decode.Blocks(32), commit=decode.Threshold(0.9),
                cache=decode.BlockCausal(), stop=decode.AfterBlock())


def test_fast_dllm_commits_by_confidence_and_ends_at_the_first_eos():
    first, tempered = decode.FirstToken(decode.Threshold(0.9)), decode.Tempered(decode.Probability())
    want = {"llada_parallel": dict(), "llada_prefix": dict(cache=decode.Prefix()),
            "llada_dual": dict(cache=decode.Dual()),
            "llada_dual_factor": dict(cache=decode.Dual(), commit=decode.Factor(1.0)),
            "dream_prefix": dict(cache=decode.Prefix(), commit=first, confidence=tempered),
            "dream_dual": dict(cache=decode.Dual(), commit=first, confidence=tempered)}
    plain = dict(schedule=decode.Blocks(32), commit=decode.Threshold(0.9), stop=decode.Fill())
    assert {name: entry.decoder for name, entry in fast_dllm.DECODING.items()} == {
        name: decode.MaskedDiffusion(**{**plain, **fields}) for name, fields in want.items()}
    assert {entry.max_new_tokens for entry in fast_dllm.DECODING.values()} == {256}


@pytest.mark.parametrize("module", [llada, dream, fast_dllm, flashdlm, block_diffusion], ids=lambda m: m.__name__)
def test_decoding_settings_suit_a_decoder(module):
    for entry in module.DECODING.values():
        assert entry.source
        entry.decoder.check_request([[1]], np.asarray([entry.max_new_tokens]), None, 0)
