"""The site's pages name what exists; `mkdocs build --strict` checks the rest, where it is installed."""

import ast
import importlib
import importlib.util
import re

import pytest
import yaml

from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@each_page
def test_sections_of_the_readme_are_there(page, hooks):
    text = page.read_text()
    made = hooks.on_page_markdown(text)
    assert "readme:" not in made and len(made) >= len(text) - 40 * text.count("<!-- readme")


def test_sections_end_with_their_level_and_move_up(hooks):
    text = "# a\n## b\nx\n```\n# no heading\n```\n### c\ny\n#### d\n## e\nz\n"
    assert hooks.sections(text)["c"] == "y\n#### d"
    assert hooks.section("b", text) == "x\n```\n# no heading\n```\n## c\ny\n### d"
    assert hooks.section("c", text) == "y\n## d"
    for name in ("no heading", "f"):
        with pytest.raises(ValueError, match="README.md has 0 headings"):
            hooks.section(name, text)


@each_page
def test_names_in_python_exist(page):
    for block in code(page):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("dlm_jax"):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{node.module} has no {missing}"
            if isinstance(node, ast.Import):
                assert all(importlib.import_module(alias.name) for alias in node.names)
        for name in re.findall(r"\bdlm\.([\w.]+)", block):
            value = importlib.import_module("dlm_jax")
            for part in name.split("."):
                value = getattr(value, part)


@each_page
def test_programs_exist(page):
    for module in re.findall(r"python -m (launch[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module) is not None, module


def test_every_page_has_a_place():
    text = re.sub(r"^hooks:.*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.M)

    def leaves(value):
        return [value] if isinstance(value, str) else [x for item in (
            value.values() if isinstance(value, dict) else value) for x in leaves(item)]

    assert sorted(leaves(yaml.safe_load(text)["nav"])) == NAMES


def test_every_public_module_is_in_the_reference(hooks):
    shown = {module for modules in hooks.rooms().values() for module in modules}
    assert {"dlm_jax.api", "dlm_jax.decode.masked.commit", "pallas_kernels.attention.api"} <= shown
    files = [f for package in ("dlm_jax", "pallas_kernels") for f in (ROOT / package).rglob("*.py")]
    missing = [f for f in files if f.name != "__init__.py" and hooks.documented(f)
               and ".".join(f.relative_to(ROOT).with_suffix("").parts) not in shown]
    assert not missing
    page = hooks.room_page("dlm_jax.decode.masked", hooks.rooms()["dlm_jax.decode.masked"])
    assert "\n::: dlm_jax.decode.masked.commit\n" in page and page.startswith("# dlm_jax.decode.masked\n\nMasked")


def test_notebooks_that_pages_name_exist():
    named = {name for page in PAGES for name in re.findall(r"colab/(\w+)\.ipynb", page.read_text())}
    table = re.findall(r"^\| (`\w+`.*?) \|", (ROOT / "docs" / "install.md").read_text(), re.M)
    named |= {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert named == {file.stem for file in (ROOT / "colab").glob("*.ipynb")}
