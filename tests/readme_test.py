"""What README.md tells people to type exists."""

import importlib.util
import re

import pytest

import dlm_jax
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)", TEXT))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", TEXT))))
def test_programs_exist(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bdlm\.([\w.]+)", TEXT))))
def test_names_exist(name):
    value = dlm_jax
    for part in name.split("."):
        value = getattr(value, part)


def test_every_launcher_is_shown():
    files = (ROOT / "launch").glob("*.py")
    programs = {f"launch.{f.stem}" for f in files if '__name__ == "__main__"' in f.read_text()}
    programs |= {f"launch.{f.parent.name}" for f in (ROOT / "launch").glob("*/__main__.py")}
    assert programs <= set(re.findall(r"-m (launch\.\w+)", TEXT + (ROOT / "Makefile").read_text()))
