"""The notebook's cells run from top to bottom; what needs a notebook or the network is left out."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def cells():
    """(tags, code) of every code cell, without lines that only a notebook understands."""
    for cell in json.loads((ROOT / "colab" / "quickstart.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield set(cell["metadata"].get("tags", ())), "\n".join(x for x in lines if not x.startswith("%"))


def execute(code, folder, home):
    """Runs code as a fresh process that starts in a folder and knows no other way to the repository."""
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True,
                          env={"PATH": "", "HOME": str(home), "JAX_PLATFORMS": "cpu"})


@pytest.fixture
def checkout(tmp_path):
    """A repository that runs may write into."""
    folder = tmp_path / "checkout"
    (folder / "colab").mkdir(parents=True)
    for name in ("pyproject.toml", "dlm_jax", "launch", "configs", "pallas_kernels"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_setup_cell_finds_the_repository_or_says_what_to_do(checkout, tmp_path):
    setup, = [code for tags, code in cells() if "setup" in tags]
    look = setup + "\nimport dlm_jax.types\nprint(os.getcwd(), sys.path[0])"
    for folder in (checkout / "colab", checkout):
        assert execute(look, folder, tmp_path).stdout.split() == [str(checkout)] * 2
    lost = execute(setup, tmp_path, tmp_path)
    assert lost.returncode and "clone it" in lost.stderr and str(tmp_path) in lost.stderr


@pytest.mark.slow
def test_the_notebook_runs(checkout, tmp_path):
    code = [code for tags, code in cells() if not tags & {"display", "network"}]
    assert len(code) == 5
    done = execute("\n".join(code), checkout / "colab", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "commit" in done.stdout and "tokens a forward" in done.stdout and "Diagnostics(" in done.stdout
    assert (checkout / "runs" / "colab_smoke" / "report.html").exists()
