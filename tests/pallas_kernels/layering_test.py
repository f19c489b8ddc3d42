"""The kernels import jax, numpy and the standard library, nothing else, so that they are useful on their own."""
import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pallas_kernels"


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module.split(".")[0]


def test_imports():
    allowed = {"jax", "numpy", "pallas_kernels"} | set(sys.stdlib_module_names)
    for path in PACKAGE.rglob("*.py"):
        assert set(imported(path)) <= allowed, path
