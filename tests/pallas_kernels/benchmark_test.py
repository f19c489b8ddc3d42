"""The benchmark runs at tiny shapes, keeps what it measured, survives what fails, and refuses bad options early."""
import json

import jax
import numpy as np
import pytest

from pallas_kernels import benchmark
from pallas_kernels.attention import arg_specs

TINY = ["--shape", "tiny", "--blocks", "4", "--attention", "--rounds", "1", "--calls", "1"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Attention at shapes that compile in a second."""
    for name, shape in arg_specs.SHAPES.items():
        monkeypatch.setitem(arg_specs.SHAPES, name, shape._replace(
            batch=1, tokens=min(shape.tokens, 64), keys=64, query_heads=2, key_heads=1, width=16, dtype="float32"))


def test_writes_a_table(tmp_path, capsys):
    path = tmp_path / "table.md"
    rows = benchmark.main([*TINY, "--forms", "folded", "--output", str(path)])
    assert [row["form"] for row in rows] == ["single folded", "folded"] and all(row["best_ms"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1.0 and rows[1]["ratio"] > 0
    text = path.read_text()
    assert f"--output {path}" in text and '"jax":' in text and "| gated_delta | folded | 4 |" in text


def test_attention_rates_count_visible_pairs(monkeypatch):
    times = iter([2.0, 1.0])
    monkeypatch.setattr(benchmark, "measure",
                        lambda entries, *_: [dict(e.row, best_ms=next(times), median_ms=1.0) for e in entries])
    ours, native = benchmark.attention_rows(["causal_128"], 1, 1)
    assert ours["form"].startswith("block_mask") and native["form"].startswith("jax.nn:xla")
    assert ours["tflops"] == pytest.approx(14 * (64 * 65 // 2) * 2 * 16 / 2e-3 / 1e12)
    assert ours["share"] == pytest.approx(0.5) and native["share"] == 1.0


def test_visible_pairs():
    mask = arg_specs.layout_mask(arg_specs.SHAPES["reduced"]._replace(batch=2, tokens=48))
    assert benchmark.visible_pairs(mask) == int(np.asarray(mask.dense()).sum())


def test_one_failure_does_not_stop_the_others(tmp_path):
    """A form no compiler takes here, and a peer that is not installed, become rows that say why."""
    def missing(clean):
        raise ImportError("no module named fla")
    path = tmp_path / "rows.json"
    rows = benchmark.main([*TINY, "--forms", "folded:gpu", "folded:xla", "--output", str(path)], peers={"fla": missing})
    assert [(row["form"], "failed" in row) for row in rows] == [
        ("single folded:xla", False), ("single fla", True), ("folded:xla", False),
        # what may compile for long comes last
        ("single folded:xla", False), ("single folded:gpu (XLA backward)", True), ("single fla", True),
        ("folded:gpu (XLA backward)", True)]
    assert "no module named fla" in rows[1]["failed"] and "head widths" in rows[4]["failed"]
    assert rows[2]["ratio"] > 0 and json.loads(path.read_text())["rows"] == rows


def test_a_run_cut_short_keeps_its_groups(tmp_path, monkeypatch):
    path, calls = tmp_path / "rows.json", []

    def stop_later(entries, *rest):
        calls.append(entries)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [{**entry.row, "best_ms": 1.0, "median_ms": 1.0} for entry in entries]
    monkeypatch.setattr(benchmark, "measure", stop_later)
    monkeypatch.setattr(benchmark, "compile_entry", lambda row, *_: benchmark.Entry(row, None))
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["--shape", "tiny", "--blocks", "2", "4", "--attention", "--forms", "folded",
                        "--output", str(path)])
    assert [row["block_size"] for row in json.loads(path.read_text())["rows"]] == [None, 2]


def test_peers_are_timed_and_waited_for():
    log = []
    def peer(clean):
        return lambda: log.append("run"), lambda last: log.append("wait")
    rows = benchmark.main([*TINY[:2], "--blocks", "--attention", "--forms", "folded", "--rounds", "2", "--calls", "3"],
                          peers={"other": peer})
    assert rows[1]["form"] == "single other" and rows[1]["ratio"] == rows[1]["best_ms"] / rows[0]["best_ms"]
    assert log == ["run", "run", "run", "wait"] * 3


def test_a_gpu_measures_every_backend_at_the_papers_shape(monkeypatch):
    """The defaults there, seen from here: Triton and cuDNN beside XLA; what cannot run is reported, not raised."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = benchmark._parser("p").parse_args([])
    assert options.shape == "paper" and options.forms == ["folded:xla", "folded:gpu", "route_i", "route_ii"]
    assert options.blocks == [1, 2, 4, 8, 16, 32, 64] and {"causal_128", "two_stream_128"} <= set(options.attention)
    shape = benchmark.delta_specs.SHAPES[options.shape]
    assert (2 * shape.tokens, shape.value_heads, shape.key_width, shape.value_width) == (8192, 16, 128, 128)
    assert shape.dtype == "bfloat16"
    rows = {row["form"]: row for row in benchmark.attention_rows(["causal_128"], 1, 1)}
    assert list(rows) == ["block_mask:xla causal_128", "block_mask:gpu 64x64 causal_128",
                          "block_mask:gpu 128x64 causal_128", "block_mask:gpu 64x128 causal_128",
                          "jax.nn:xla causal_128", "jax.nn:cudnn causal_128"]
    ran = [form for form, row in rows.items() if "failed" not in row]
    assert ran == ["block_mask:xla causal_128", "jax.nn:xla causal_128"]
    assert rows["block_mask:xla causal_128"]["share"] > 0


@pytest.mark.parametrize("options, words", [
    (["--blocks", "3"], "block_size=3"), (["--blocks", "128"], "block_size=128"),
    (["--forms", "folded:cuda"], "--forms folded:cuda"), (["--forms", "route_i:gpu"], "--forms route_i:gpu"),
    (["--forms", "best"], "--forms best"), (["--rounds", "0"], "--rounds 0"), (["--calls", "-1"], "--calls -1"),
    (["--output", "/nowhere/table.md"], "/nowhere/table.md"), (["--attention", "wide"], "wide"),
])
def test_bad_options_exit_with_2_before_anything_runs(options, words, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "compile_entry", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as stop:
        benchmark.main(options)
    assert stop.value.code == 2 and words in capsys.readouterr().err
