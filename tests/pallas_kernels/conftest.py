"""Shared fixtures: 64-bit mode for one test, and the environment of ahead-of-time TPU compilation."""
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
AOT_ENVIRONMENT = dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4",
                       TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_LOG_DIR="disabled",
                       JAX_ENABLE_COMPILATION_CACHE="false", XLA_FLAGS="")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds; deselect with -m 'not slow'")


@pytest.fixture
def x64():
    """Turns 64-bit types on for one test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def lower_for_gpu():
    """Lowers a function for an H200 that is not here, and returns the program's text."""
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")

    def lower(function, *args) -> str:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h200)):
            return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return lower


@pytest.fixture
def compile_for_tpu():
    """Runs tests/pallas_kernels/aot.py in a process of its own (libtpu wants its environment before jax loads)."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU compiler on this machine")

    def run(*arguments: str) -> list[dict]:
        done = subprocess.run([sys.executable, str(Path(__file__).with_name("aot.py")), *arguments], cwd=ROOT,
                              text=True, capture_output=True,
                              env={**os.environ, **AOT_ENVIRONMENT, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return run
