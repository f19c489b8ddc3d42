"""The notebook's cells run from top to bottom; cells that need a notebook or the network are left out."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "colab" / "quickstart.ipynb").read_text())["cells"]
    skipped = {"setup", "display", "network"}
    code = ["".join(c["source"]) for c in cells
            if c["cell_type"] == "code" and not skipped & set(c["metadata"].get("tags", ()))]
    assert len(code) == 3
    (tmp_path / "cells.py").write_text("\n".join(code))
    done = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "commit" in done.stdout and "tokens a forward" in done.stdout
