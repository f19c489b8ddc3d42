"""The benchmark runs end to end at a tiny shape and writes its table with versions and command."""
from pallas_kernels import benchmark


def test_writes_a_table(tmp_path, capsys):
    path = tmp_path / "table.md"
    rows = benchmark.main(["--shape", "tiny", "--blocks", "4", "--forms", "folded", "--attention", "--rounds", "1",
                           "--output", str(path)])
    assert [row["form"] for row in rows] == ["single-stream", "folded"] and all(row["best_ms"] > 0 for row in rows)
    text = path.read_text()
    assert "python -m pallas_kernels.benchmark" in text and '"jax":' in text and "| gated_delta | folded | 4 |" in text
