"""The table of released checkpoints: sizes as published, networks that load by table, and what the program prints."""

import jax
import pytest

from configs import blocks
from configs.checkpoints import CHECKPOINTS
from dlm_jax.io import names
from dlm_jax.models import build
from dlm_jax.models import hf_config as configs
from launch import models

# bytes of the weights on the hub, in bf16, to the digits that are known: of an index, of the index of the model that
# it continues, or twice a paper's parameters; those of three mixtures are in tests/io/mixtures_test.py
PUBLISHED = {
    "JetLM/SDAR-1.7B-Chat": 4.06e9, "JetLM/SDAR-4B-Chat": 8.83e9, "JetLM/SDAR-8B-Chat": 16_381_470_720,
    "tencent/WeDLM-8B-Base": 16_381_470_720, "Zigeng/dParallel-LLaDA-8B-instruct": 16.0e9,
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": 3_087_428_608, "Dream-org/Dream-v0-Base-7B": 15_231_233_024,
    "GSAI-ML/iLLaDA-8B-Base": 2 * 7.62e9}
TENSORS = {  # of their indices
    "JetLM/SDAR-8B-Chat": 399, "tencent/WeDLM-8B-Base": 399, "GSAI-ML/LLaDA-8B-Base": 291,
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": 338, "Dream-org/Dream-v0-Base-7B": 339, "GSAI-ML/iLLaDA-8B-Base": 290}
DISTINCT = {c.model: c for c in CHECKPOINTS}.values()


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_were_published(name):
    model = next(c.model for c in CHECKPOINTS if name in c.ids)
    size = 2 * build.parameter_shares(build.build(model))["total"]
    assert size == pytest.approx(PUBLISHED[name], rel=1e-9 if isinstance(PUBLISHED[name], int) else 5e-3)


@pytest.mark.parametrize("name", TENSORS)
def test_as_many_tensors_as_were_published(name):
    model = next(c.model for c in CHECKPOINTS if name in c.ids)
    assert len({tensor for p in names.parameters(model) for tensor in p.names}) == TENSORS[name]


@pytest.mark.parametrize("checkpoint", DISTINCT, ids=[c.ids[0] for c in DISTINCT])
def test_every_parameter_has_its_tensors(checkpoint):
    config = checkpoint.model
    made = {tuple(entry.key for entry in path): x.shape
            for path, x in jax.tree_util.tree_flatten_with_path(build.abstract_params(build.build(config)))[0]}
    assert {p.path: p.shape for p in names.parameters(config)} == made
    assert configs.from_hf(configs.to_hf(config)) == config


def test_ids_are_told_once():
    ids = [name for c in CHECKPOINTS for name in c.ids]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", blocks.DECODING)
def test_every_setting_fits_its_model(name):
    found = [c.model for c in CHECKPOINTS if c.decoding is blocks.DECODING[name]]
    for model in found:
        blocks.DECODING[name].decoder.check_model(model)
    assert found or name in ("sdar_entropy", "fast_dllm_v2_inner", "nemotron_speculative")


def test_every_decoding_is_said_by_someone():
    assert {c.decoding.said_by for c in CHECKPOINTS} == {"paper", "card", "code"}


def test_the_program_prints_the_table(capsys, monkeypatch):
    assert models.main(["wedlm", "--sources"]) == 0
    out = capsys.readouterr().out
    for said in ("tencent/WeDLM-8B-Instruct", "generate_wedlm", "15.3", "grid anchored", "blocks:wedlm", "code"):
        assert said in out
    monkeypatch.setenv("COLUMNS", "80")
    assert models.main(["c"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert models.main(["nothing like it"]) == 2
    assert "no checkpoint has 'nothing like it'" in capsys.readouterr().err
