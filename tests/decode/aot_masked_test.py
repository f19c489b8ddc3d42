"""Masked-diffusion decoding at LLaDA's width, compiled by the real TPU compiler for a slice that is not here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from configs.llada import LLADA_8B
from dlm_jax.models import build
from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")
def test_a_step_costs_its_window_and_the_loop_updates_its_cache_in_place(tmp_path):
    page = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, "-m", "tests.decode.aot_masked", "v6e:2x4", "--layers", "4", "--policies", "none", "dual",
         "--output", str(page)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    none, dual = got["policies"]["none"], got["policies"]["dual"]
    assert none["windows"] == {"1280": 256} and dual["windows"] == {"1280": 8, "32": 248}
    shape = build.abstract_params(build.build(LLADA_8B.replace(num_layers=4)))["layers"]
    weights = sum(x.size for name in ("attention", "mlp") for x in shape[name].values())
    keys = sum(shape["attention"][name].size for name in ("k_proj", "v_proj"))
    head = LLADA_8B.vocab_size * LLADA_8B.hidden_size
    for step in got["steps"]:  # a chip's share of the products with weights, and attention beside them
        # the last layer computes the block's outputs alone, of keys and values of the whole window
        last = keys * step["width"] + (weights - keys) * 32
        products = 2 * 8 * (0.75 * weights * step["width"] + 0.25 * last + head * 32) / got["chips"]
        assert 0.95 < step["flops"] / products < 1.3, step
    assert dual["step"]["flops"] < none["step"]["flops"] / 8
    # written in place, and no chip holds another's heads
    assert 1.2 * dual["cache_gib"] > dual["aliased_gib"] >= dual["cache_gib"] > 0 == none["cache_gib"]
    assert "| dual | 8 x 1280, 248 x 32 |" in page.read_text()
