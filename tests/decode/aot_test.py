"""The decoding loops at 8B, compiled by the real TPU compiler for a slice that is not here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")
@pytest.mark.parametrize("decoder", ["autoregressive", "refusion", "orthrus"])
def test_8b_decoding_compiles_for_8_chips_in_place(decoder):
    done = subprocess.run([sys.executable, "-m", "tests.decode.aot_compile", "v6e:2x4", decoder], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert "tensor" in got["cache_spec"]  # the compiler spreads the cache as it spreads the heads
    assert got["loop"]["aliased_gib"] >= got["cache_gib"] / got["chips"]  # and the loop updates it in place
    assert got["loop"]["temporaries_gib"] < 0.6
