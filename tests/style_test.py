"""How the source is laid out."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 120


def long_lines(text: str) -> list[int]:
    """Numbers of the lines of more than COLUMNS characters."""
    return [number for number, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]


def test_lines_fit():
    files = [file for room in ("colab", "configs", "dlm_jax", "launch", "pallas_kernels", "tests")
             for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    long = [f"{file.relative_to(ROOT)}:{number}" for file in files for number in long_lines(file.read_text())]
    assert not long, f"longer than {COLUMNS} columns: {', '.join(long)}"


def test_the_check_sees_a_long_line():
    assert long_lines("short\n" + "x" * (COLUMNS + 1) + "\n" + "é" * COLUMNS) == [2]
