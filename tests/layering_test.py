"""The rooms of the house and which way imports may point, read from the syntax tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("dlm_jax", "pallas_kernels", "configs", "launch", "tests")

# room -> what it may import of ours, itself aside; the longest matching prefix of a module is its room
MAY_IMPORT = {
    "pallas_kernels": (),
    "dlm_jax.types": (),
    "dlm_jax.conventions": (),
    "dlm_jax.text": (),
    "dlm_jax.nn": ("dlm_jax.types", "pallas_kernels"),
    "dlm_jax.scoring": ("dlm_jax.types", "dlm_jax.nn"),
    "dlm_jax.models": ("dlm_jax.types", "dlm_jax.conventions", "dlm_jax.nn", "dlm_jax.scoring"),
    "dlm_jax.objectives": ("dlm_jax.types", "dlm_jax.nn", "dlm_jax.scoring"),
    "dlm_jax.decode": ("dlm_jax.types", "dlm_jax.conventions", "dlm_jax.text", "dlm_jax.nn", "dlm_jax.scoring"),
    "dlm_jax.data": ("dlm_jax.types",),
    "dlm_jax.io": ("dlm_jax.types", "dlm_jax.models.config", "dlm_jax.models.hf_config"),
    "dlm_jax.train": (
        "dlm_jax.types", "dlm_jax.nn", "dlm_jax.scoring", "dlm_jax.models", "dlm_jax.objectives", "dlm_jax.decode",
        "dlm_jax.data", "dlm_jax.io"),
    "dlm_jax.evals": (
        "dlm_jax.api", "dlm_jax.types", "dlm_jax.text", "dlm_jax.nn", "dlm_jax.scoring", "dlm_jax.models",
        "dlm_jax.objectives", "dlm_jax.decode", "dlm_jax.data", "dlm_jax.io", "dlm_jax.train"),
    "dlm_jax": ("dlm_jax",),  # the public surface, over everything
    "configs": ("dlm_jax",),
    "launch": ("dlm_jax", "pallas_kernels", "configs"),
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Every module the tree imports, at any depth, as absolute dotted names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*anchor, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if any(within(name, ours) for ours in OURS)}


def violations(module: str, found: set[str]) -> list[str]:
    room = max((r for r in MAY_IMPORT if within(module, r)), key=len)
    allowed = (room, *MAY_IMPORT[room])
    return sorted(name for name in found if not any(within(name, a) for a in allowed))


FILES = sorted(f for package in OURS if package != "tests" for f in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(ROOT)) for f in FILES])
def test_imports_point_one_way(file):
    module = module_name(file)
    found = imports(ast.parse(file.read_text()), module, file.name == "__init__.py")
    assert not violations(module, found), f"{module} may not import {violations(module, found)}"


def test_every_package_has_a_room():
    packages = {module_name(f) for f in FILES if f.name == "__init__.py"}
    rooms = {p for p in packages if p.count(".") < (2 if within(p, "dlm_jax") else 1)}
    assert rooms <= set(MAY_IMPORT)


@pytest.mark.parametrize("module, code, forbidden", [
    ("dlm_jax.decode.refusion", "from dlm_jax.models import build", "dlm_jax.models.build"),
    ("dlm_jax.objectives.refusion", "def f():\n  import dlm_jax.models.config", "dlm_jax.models.config"),
    ("dlm_jax.nn.rope", "from ..models.config import TransformerConfig", "dlm_jax.models.config.TransformerConfig"),
    ("dlm_jax.io.hf", "from dlm_jax.models import build", "dlm_jax.models.build"),
    ("pallas_kernels.api", "import dlm_jax.types", "dlm_jax.types"),
    ("dlm_jax.train.loop", "import launch.train", "launch.train"),
])
def test_the_check_sees_a_breach(module, code, forbidden):
    assert violations(module, imports(ast.parse(code), module, False)) == [forbidden]


def test_importing_the_package_alone_loads_nothing():
    code = "import sys, dlm_jax; print(sorted({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns one circle for every module that is found on one while walking a graph of imports."""
    found, finished = [], set()

    def walk(module, trail):
        if module in trail:
            found.append([*trail[trail.index(module):], module])
        elif module not in finished:
            for other in sorted(graph.get(module, ())):
                walk(other, [*trail, module])
            finished.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found


def test_no_files_import_each_other_in_a_circle():
    modules = {module_name(f): f for f in FILES}

    def imported(module, file):
        """Files that a file imports, at any depth; a name of a package counts as the module that it is."""
        names = imports(ast.parse(file.read_text()), module, file.name == "__init__.py")
        return {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys() - {module}

    graph = {module: imported(module, file) for module, file in modules.items()}
    assert not circles(graph)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]
