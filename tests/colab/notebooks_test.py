"""The notebooks of systems run from top to bottom, with a few steps of training; and all notebooks are kept alike."""

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FILES = sorted(file for file in (ROOT / "colab").glob("*.ipynb") if file.stem != "quickstart")  # has a test of its own
each_file = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
FEW = {"STEPS": 3, "ROOM": 16, "QUESTIONS": 3}
DRAFT = "\x1b[90m"  # the grey of a draft


def cells(file):
    """(tags, code) of every code cell."""
    for cell in json.loads(file.read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield set(cell["metadata"].get("tags", ())), "".join(cell["source"])


def run(file, changes):
    """Runs the cells in one namespace, its parameters changed; returns it."""
    space = {"__name__": "__main__"}
    for tags, code in cells(file):
        if not tags & {"display", "network"}:
            exec(compile(code, file.name, "exec", dont_inherit=True), space)
        if "parameters" in tags:
            space |= {name: value for name, value in changes.items() if name in space}
    return space


@pytest.fixture
def installed(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "dlm_jax" else version(name))


@each_file
def test_an_answer_streams_and_decoders_are_compared(file, installed, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    space = run(file, FEW)
    said = capsys.readouterr().out
    streamed = [line for line in said.splitlines() if re.match(r" *\d+ (decode|denoise|draft|verify|prefill)", line)]
    assert any(DRAFT in line for line in streamed) and not all(DRAFT in line for line in streamed)
    assert len(re.findall(r"of 3 right, +[\d.]+ tokens a forward$", said, re.M)) >= 2
    assert space["prompts"]


@each_file
def test_all_begin_alike_and_hold_no_outputs(file):
    book = json.loads(file.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert f"/blob/main/colab/{file.name})" in "".join(book["cells"][0]["source"])
    assert list(cells(file))[0] == list(cells(FILES[0]))[0] and list(cells(file))[0][0] == {"setup"}
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book["cells"])
    assert sum("parameters" in tags for tags, _ in cells(file)) == 1


@each_file
def test_cells_are_code_of_this_library(file):
    for tags, code in cells(file):
        compile(code, file.name, "exec", dont_inherit=True)
        assert all(len(line) <= 130 for line in code.splitlines())


@pytest.mark.parametrize("inside", [True, False])
def test_the_first_cell_installs_what_is_missing(inside, monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    asked = []
    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    here = tmp_path / "checkout" / "colab" if inside else tmp_path
    here.mkdir(parents=True, exist_ok=True)
    if inside:
        (here.parent / "pyproject.toml").touch()
        (here.parent / "dlm_jax").mkdir()
    monkeypatch.chdir(here)
    space = {}
    exec(next(cells(FILES[0]))[1], space)
    what = str(here.parent) if inside else f"git+{space['REPOSITORY']}"
    assert asked == [[sys.executable, "-m", "pip", "install", "-q", what]]
