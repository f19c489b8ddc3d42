"""The benchmark launcher: its default shape builds, a tiny run gives every column, bad input exits with 2."""

import json

import jax
import pytest

from dlm_jax.models import build
from launch import benchmark


@pytest.mark.parametrize("width", [64, 320, 512, 576])
def test_every_width_builds(width, monkeypatch):
    monkeypatch.setattr(build, "init_params", lambda model, key: build.abstract_params(model))
    monkeypatch.setattr(jax, "jit", lambda f, **_: f)
    model, params = benchmark.model_of(benchmark.parser().parse_args(["decode", "--width", str(width)]))
    size = sum(x.size for x in jax.tree.leaves(params))
    assert width != 512 or 55e6 < size < 65e6


def test_a_tiny_run_measures_every_system(tmp_path, capsys):
    file = tmp_path / "results.json"
    assert benchmark.main(["decode", "--width", "64", "--layers", "1", "--vocab", "64", "--batch", "2", "--prompt", "8",
                           "--new-tokens", "16", "--repeats", "1", "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == ["AR", "ReFusion all accepted", "ReFusion none accepted"]
    assert all(row["tokens_per_second"] > 0 and row["ms_per_forward"] > 0 for row in rows)
    assert all(row["bare_ms"] > 0 and row["floor_ms"] > 0 for row in rows[:2])
    assert "ReFusion all accepted" in capsys.readouterr().out


def test_bad_input_exits_with_2(capsys):
    assert benchmark.main(["decode", "--width", "100"]) == 2
    assert "--width 100: a positive multiple of 64" in capsys.readouterr().err
