"""Several processes train as one, and one takes over what they left."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlm_jax.train.config import MeshConfig
from tests.train import toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_processes_train_like_one_and_their_checkpoint_resumes_on_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "together"
    started = [
        subprocess.Popen([sys.executable, "-m", "tests.train.processes", str(rank), "2", str(port), str(folder)],
                         cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True) for rank in range(2)]
    said = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    one, other = (out.splitlines()[-1].split() for out, _ in said)
    assert one == other and one[:2] == ["6", "4"]

    alone = toy.run(tmp_path / "alone", objective=toy.REFUSION, mesh=MeshConfig())
    np.testing.assert_allclose(float(one[2]), alone.history[-1]["loss"], atol=1e-5)

    shutil.rmtree(folder / "checkpoints" / "6")  # go on from step 4, on one device
    resumed = toy.run(folder, resume=True, objective=toy.REFUSION, mesh=MeshConfig())
    assert [line["step"] for line in resumed.history] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(resumed.history, alone.history):
        np.testing.assert_allclose(one["loss"], other["loss"], atol=1e-5)
