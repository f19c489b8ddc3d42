"""The decoding loops of real models, compiled by the real TPU compiler for chips that are not here."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from dlm_jax.models import build
from launch.compile import programs
from tests.conftest import ROOT


ABSENT = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")


def compiled(tmp_path, topology, decoder, model):
    file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "launch.compile", "--decode", decoder, "--model", model, "--topology", topology,
         "--cache", "1536", "--output", str(file)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())


@pytest.mark.slow
@ABSENT
@pytest.mark.parametrize("decoder", ["autoregressive", "refusion", "orthrus"])
def test_8b_decoding_compiles_for_8_chips_in_place(tmp_path, decoder):
    got = compiled(tmp_path, "v6e:2x4", decoder, "qwen3_8b")
    assert "tensor" in got["cache_spec"]  # the compiler spreads the cache as it spreads the heads
    assert got["memory"]["aliased"] >= got["cache_bytes"]  # and the loop updates it in place
    assert got["memory"]["temporaries"] < 0.6 * 2**30


@pytest.mark.slow
@ABSENT
@pytest.mark.parametrize("decoder", ["ar_trust", "diffusion_trust"])
def test_flare_2b_decodes_on_one_chip_in_place(tmp_path, decoder):
    got = compiled(tmp_path, "v5e:1x1", decoder, "flare:qwen3_5_2b")
    assert got["memory"]["aliased"] >= got["cache_bytes"] and got["memory"]["arguments"] < 4 * 2**30
    assert got["memory"]["temporaries"] < 0.6 * 2**30


def test_a_row_of_a_hybrid_takes_a_quarter_of_what_attention_alone_takes():
    model = build.build(programs.shape_of("flare:qwen3_5_2b"))
    cache = jax.eval_shape(lambda: model.scorer(jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.bfloat16), build.abstract_params(model))).init_cache(1, 32768))
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) / 2**20
    assert kept < 0.3 * 1536  # MiB; keys and values in each of its 24 layers would take 1,536
