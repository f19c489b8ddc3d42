"""The masked-diffusion configurations: sizes of the real models, the papers' numbers, and Table 11 of FlashDLM."""

import re

import numpy as np
import pytest

import configs
from configs import block_diffusion, dream, fast_dllm, flashdlm, llada
from dlm_jax.decode.masked import MaskedDiffusion
from dlm_jax.models import build
from tests.conftest import ROOT

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
    for entry, block in ((dream_, 256), (llada_, 64)):
        assert (entry.max_new_tokens, entry.decoder.block_length, entry.decoder.cache) == (256, block, "free")
    for entry in (exact, relaxed):
        assert (entry.max_new_tokens, entry.decoder.verify_batch_size, entry.decoder.cache) == (1024, 32, "free")
    assert (relaxed.decoder.top_k, relaxed.decoder.logit_threshold) == (2, 0.5)


def test_what_is_called_released_is_the_released_sampler():
    assert dream.DECODING["released"].decoder == MaskedDiffusion(
        steps=512, block_length=0, rule="timesteps", confidence="entropy", temperature=0.2, top_p=0.95, tempered=True,
        early_stop="none")
    assert llada.DECODING["released"].decoder == MaskedDiffusion(
        steps=128, block_length=32, rule="quota", early_stop="none")
    assert flashdlm.DECODING["dream_freecache"].decoder == MaskedDiffusion(
        block_length=256, rule="timesteps", confidence="entropy", cache="free", early_stop="run", tempered=True)
    assert fast_dllm.DECODING["dream_dual"].decoder == MaskedDiffusion(
        block_length=32, first_token=True, tempered=True, rule="threshold", threshold=0.9, cache="dual")
    assert fast_dllm.DECODING["llada_dual_factor"].decoder == MaskedDiffusion(
        block_length=32, rule="factor", factor=1.0, cache="dual")


def test_the_prompts_are_the_papers():
    paper = ROOT.parent / "shared" / "papers" / "flashdlm.txt"
    if not paper.is_file():
        pytest.skip("no papers: ../shared/papers/flashdlm.txt does not exist beside the checkout")
    plain = lambda text: " ".join(text.split())
    text = plain(re.sub(r": <\w+>", ": {question}", paper.read_text()))
    for name, prompt in flashdlm.PROMPTS.items():
        assert prompt.count("{question}") == 1, name
        assert plain(prompt.removesuffix("\n\n{question}")) in text, name


@pytest.mark.parametrize("module", [llada, dream, fast_dllm, flashdlm, block_diffusion], ids=lambda m: m.__name__)
def test_decoding_settings_suit_a_decoder(module):
    for entry in module.DECODING.values():
        assert entry.source
        entry.decoder.check()
        if type(entry.decoder) is MaskedDiffusion:
            entry.decoder.check_request([[1]], np.asarray([entry.max_new_tokens]), None, 0)
