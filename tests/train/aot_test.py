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


NEEDS_COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install '.[aot]'")
MESHES = """
from launch.compile import environment
environment.prepare()
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from launch.compile import chips

def mesh(name, slices, **sizes):
    return sharding.make_mesh(MeshConfig(**sizes), chips.devices(name, slices)[1])

assert dict(mesh("v5p:4x4x4", 1, fsdp=16, tensor=4).shape) == dict(data=1, fsdp=16, tensor=4)
two = mesh("v6e:4x4", 2, data=4, fsdp=-1).devices
assert two.shape == (4, 8, 1)
assert all(len({device.slice_index for device in replica.ravel()}) == 1 for replica in two)
try:
    mesh("v6e:4x4", 2, data=1, fsdp=-1)
except ValueError as error:
    print(error)
"""


@NEEDS_COMPILER
def test_replicas_never_straddle_slices_of_a_pod():
    done = subprocess.run([sys.executable, "-c", MESHES], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "mesh.data = 1 cannot be split over 2 slices" in done.stdout


def _compiled(tmp_path, *arguments):
    # a process of its own: the TPU compiler is configured before jax is imported
    file = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-m", "launch.compile", *arguments, "--output", str(file)], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(file.read_text())
    return got | {name: size / 2**30 for name, size in got["memory"].items()}


@pytest.mark.slow
@NEEDS_COMPILER
def test_refusion_8b_compiles_for_64_chips_and_fits_their_memory(tmp_path):
    got = _compiled(tmp_path, "--config", "refusion:qwen3_8b", "--topology", "v5p:4x4x4", "--mesh", "fsdp=16,tensor=4",
                    "--set", "train.grad_accumulation=32")
    assert got["chips"] == 64 and 8.1e9 < got["parameters"] < 8.3e9
    # float32 parameters and two moments, split over all chips: nothing large is replicated
    assert got["arguments"] == pytest.approx(12 * got["parameters"] / 64 / 2**30, rel=0.01)
    assert got["aliased"] == pytest.approx(got["outputs"], rel=0.01)  # the state is updated in place
    assert got["needed"] < SMALLEST_CHIP_GIB


@pytest.mark.slow
@NEEDS_COMPILER
def test_orthrus_8b_compiles_for_64_chips_and_fits_their_memory(tmp_path):
    got = _compiled(tmp_path, "--config", "orthrus:qwen3_8b", "--topology", "v5p:4x4x4", "--mesh", "fsdp=16,tensor=4",
                    "--set", "train.grad_accumulation=4")
    assert got["chips"] == 64 and got["trained"] == pytest.approx(0.16 * got["parameters"], rel=0.05)
    # two bytes for what is frozen; float32 and two moments for the diffusion view alone
    held = 2 * (got["parameters"] - got["trained"]) + 12 * got["trained"]
    assert got["arguments"] == pytest.approx(held / 64 / 2**30, rel=0.01)
    assert got["aliased"] == pytest.approx(got["outputs"], rel=0.01)
    assert got["needed"] < SMALLEST_CHIP_GIB


@pytest.mark.slow
@NEEDS_COMPILER
def test_the_chunked_head_saves_most_of_orthrus_memory(tmp_path):
    # two layers of the real width and vocabulary, one row of 2,048 tokens and 256 blocks of 32 a chip
    chunked, whole = (_compiled(
        tmp_path, "--config", "orthrus:qwen3_1_7b", "--topology", "v5p:2x2x1", "--mesh", "fsdp=4", "--batch", "4",
        "--layers", "2", "--set", f"train.objective.head_chunk={size}") for size in (512, 8192))
    assert chunked["temporaries"] < 0.25 * whole["temporaries"]
