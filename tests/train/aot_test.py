"""The paper's training step, compiled by the real TPU compiler for a slice that is not here."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALLEST_CHIP_GIB = 15.75  # usable memory of a v5e, the least of the chips in use


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")
def test_refusion_8b_compiles_for_64_chips_and_fits_their_memory():
    # a process of its own: the TPU compiler is configured before jax is imported
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.aot_compile", "v5p:4x4x4", "fsdp=16", "tensor=4", "accumulation=32"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["chips"] == 64 and 8.1e9 < got["parameters"] < 8.3e9
    # float32 parameters and two moments, split over all chips: nothing large is replicated
    assert got["arguments_gib"] == pytest.approx(12 * got["parameters"] / 64 / 2**30, rel=0.01)
    assert got["aliased_gib"] == pytest.approx(got["outputs_gib"], rel=0.01)  # the state is updated in place
    assert max(got["peak_gib"], got["arguments_gib"] + got["temporaries_gib"]) < SMALLEST_CHIP_GIB
