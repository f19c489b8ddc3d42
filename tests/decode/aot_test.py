"""The decoding loops of real models, compiled by the real TPU compiler for chips that are not here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


ABSENT = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")


def compiled(topology, decoder):
    done = subprocess.run([sys.executable, "-m", "tests.decode.aot_compile", topology, decoder], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@ABSENT
@pytest.mark.parametrize("decoder", ["autoregressive", "refusion", "orthrus"])
def test_8b_decoding_compiles_for_8_chips_in_place(decoder):
    got = compiled("v6e:2x4", decoder)
    assert "tensor" in got["cache_spec"]  # the compiler spreads the cache as it spreads the heads
    assert got["loop"]["aliased_gib"] >= got["cache_gib"] / got["chips"]  # and the loop updates it in place
    assert got["loop"]["temporaries_gib"] < 0.6


@pytest.mark.slow
@ABSENT
@pytest.mark.parametrize("decoder", ["ar_trust", "diffusion_trust"])
def test_flare_2b_decodes_on_one_chip_in_place(decoder):
    got = compiled("v5e:1x1", decoder)
    assert got["loop"]["aliased_gib"] >= got["cache_gib"] and got["loop"]["arguments_gib"] < 4
    assert got["loop"]["temporaries_gib"] < 0.6
    assert got["row_mib"]["32768"] < 0.3 * 1536  # keys and values in each of its 24 layers would take 1,536 MiB
