"""What `mkdocs` builds besides the pages here: sections of README.md where pages ask for them, and the API reference.

A page says `<!-- readme: Orthrus -->` for the section of README.md whose heading begins so; its own heading is left out
and those inside it move up to the second level. The reference has a page for every room, of the docstrings of its
modules: `dlm_jax.decode.masked` and what is directly in it, say.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"<!-- readme: (.+?) -->")
PACKAGES = ("dlm_jax", "pallas_kernels")


def sections(text: str) -> dict[str, str]:
    """Returns the sections of a Markdown text by their headings, each down to the next of its level or above."""
    fenced = [m.span() for m in re.finditer(r"^```.*?^```", text, re.M | re.S)]
    inside = lambda at: any(begin < at < end for begin, end in fenced)
    heads = [m for m in re.finditer(r"^(#+) (.+)$", text, re.M) if not inside(m.start())]
    found = {}
    for i, head in enumerate(heads):
        ends = [other.start() for other in heads[i + 1:] if len(other[1]) <= len(head[1])]
        found[head[2]] = text[head.end(): ends[0] if ends else len(text)].strip()
    return found


def section(name: str, text: str) -> str:
    """Returns the section whose heading begins so, with the headings inside it at the second level and below.

    Raises:
      ValueError: no heading begins so, or several do.
    """
    found = [head for head in sections(text) if head.startswith(name)]
    if len(found) != 1:
        raise ValueError(f"README.md has {len(found)} headings that begin with {name!r}: expected one of "
                         f"{sorted(sections(text))}")
    body = sections(text)[found[0]]
    levels = [len(marks) for marks in re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", body, flags=re.M | re.S), re.M)]
    up = min(levels, default=2) - 2
    parts = re.split(r"(^```.*?^```)", body, flags=re.M | re.S)
    return "".join(p if p.startswith("```") else re.sub(r"^#{%d}(#+ )" % up, r"\1", p, flags=re.M) for p in parts)


def documented(file: Path) -> bool:
    """Returns whether a module has anything public to show."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") for node in tree.body)


def rooms() -> dict[str, list[str]]:
    """Returns the modules to show by room, a package: those directly in it."""
    found = {}
    for file in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        *package, name = file.relative_to(ROOT).with_suffix("").parts
        shown = found.setdefault(".".join(package), [])
        if name != "__init__" and documented(file):
            shown.append(".".join([*package, name]))
    return {room: modules for room, modules in found.items() if modules}


def room_page(room: str, modules: list[str]) -> str:
    """Returns the page of a room: what its package says of itself, and its modules."""
    init = ROOT.joinpath(*room.split("."), "__init__.py").read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(init)) or ""
    return "\n\n".join([f"# {room}", said, *(f"::: {module}" for module in modules)]) + "\n"


def on_page_markdown(markdown: str, **_) -> str:
    """Puts sections of README.md where a page asks for them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return INCLUDE.sub(lambda asked: section(asked[1], text), markdown)


def on_config(config):
    """Appends the rooms to the navigation."""
    config.nav.append({"API reference": [{room: f"api/{room}.md"} for room in rooms()]})
    return config


def on_files(files, config):
    """Makes the pages of the rooms."""
    from mkdocs.structure.files import File

    for room, modules in rooms().items():
        files.append(File.generated(config, f"api/{room}.md", content=room_page(room, modules)))
    return files
