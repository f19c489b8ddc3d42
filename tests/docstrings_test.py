"""What is public says what it is: docstrings, shapes of arrays, sources; read from the syntax tree."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARE = 0.95  # of docstrings, and of arrays with shapes; what an Args section leaves out is never allowed

SHAPE = re.compile(r"\((?:[\w*+/.^ -]+,[^()]*|\.\.\.)?\)|\bscalars?\b|shapes?\b")
ELSEWHERE = re.compile(r"(?:[Ss]ee|as of|as in|as for|[Ll]ike) `([\w.]+)`")
SOURCE = re.compile(r"Source:|arXiv|\bEqs?\b|Algorithm|\bSec\.|Table|Figure|et al\.|LLaDA|Dream|d3LLM|Fast-dLLM|"
                    r"ReFusion|Orthrus|FLARE|FlashDLM|AsyncLane|SDAR|BD3-LM|Nemotron|WeDLM|dKV-Cache")

# the protocols whose members a reader looks up in a paper, and the members that are no paper's
PARTS = {"Acceptance", "CachePolicy", "CommitRule", "Confidence", "Decoder", "DraftPolicy", "GuideRule", "Objective",
         "Schedule", "Stop"}
PLAIN = {"Around", "Autoregressive", "Denoising", "InOrder", "NoCache", "Settled", "TopN"}


class Definition(NamedTuple):
    """A function or a class: where it stands, its dotted name within the module, its tree and its docstring."""

    place: str
    name: str
    node: ast.AST
    doc: str


def definitions(tree: ast.AST, place: str, prefix: str = ""):
    """Yields the functions and classes of a module, and those of its classes."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Definition(f"{place}:{node.lineno}", prefix + node.name, node, ast.get_docstring(node) or "")
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, place, f"{prefix}{node.name}.")


def public(definition: Definition) -> bool:
    return not any(part.startswith("_") for part in definition.name.split("."))


def parameters(node: ast.AST) -> dict[str, str]:
    """Returns the names of a function's parameters and their annotations; of a class, none."""
    if isinstance(node, ast.ClassDef):
        return {}
    found = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    told = {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in found if a}
    return {name: kind for name, kind in told.items() if name not in ("self", "cls")}


def arrays(node: ast.AST) -> list[str]:
    """Returns a function's array parameters; of random keys and of what a mapping holds nobody asks for the shape."""
    plain = lambda kind: re.search(r"\b(Array|ndarray)\b", kind) and not re.search(r"\b(dict|Mapping|Callable)\b", kind)
    return [name for name, kind in parameters(node).items() if name != "key" and plain(kind)]


def entries(doc: str) -> dict[str, str]:
    """Returns what the Args section of a docstring says of each parameter; those told together share it."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n(?=[ \t]))*)", doc, re.M)
    found = re.findall(r"^  ([\w*, ]+): (.*(?:\n    .*)*)", section[1] if section else "", re.M)
    return {name.strip(" *"): text for names, text in found for name in names.split(",")}


def undescribed(definition: Definition) -> list[str]:
    """Returns the parameters that an Args section leaves out."""
    told = entries(definition.doc)
    return [name for name in parameters(definition.node) if told and name not in told]


def shapeless(definition: Definition, others: dict[str, list[str]]) -> list[str]:
    """Returns the array parameters whose shape is told neither by their entry, nor, without one, by the docstring.

    Args:
      definition: a function.
      others: docstrings by the last part of a dotted name, for those that send the reader there.
    """
    told = entries(definition.doc)

    def tells(text: str, name: str, depth: int = 2) -> bool:
        if SHAPE.search(text):
            return True
        there = [doc for other in ELSEWHERE.findall(text) for doc in others.get(other.split(".")[-1], ())]
        return depth > 0 and any(tells(entries(doc).get(name, doc), name, depth - 1) for doc in there)

    return [name for name in arrays(definition.node) if not tells(told.get(name, definition.doc), name)]


def unsourced(modules: dict[str, ast.Module]) -> list[str]:
    """Returns the public parts of decoders, and objectives, that neither say whose they are nor stand in PLAIN."""
    classes = {d.name: (d, tree) for place, tree in modules.items() for d in definitions(tree, place)
               if isinstance(d.node, ast.ClassDef)}

    def kinds(name):
        bases = [ast.unparse(base).split(".")[-1] for base in classes[name][0].node.bases] if name in classes else []
        return {name}.union(*map(kinds, bases))

    parts = [name for name, (d, _) in classes.items()
             if public(d) and (kinds(name) - {name}) & PARTS and name not in PLAIN]
    return [f"{classes[name][0].place} {name}" for name in parts
            if not SOURCE.search(classes[name][0].doc + (ast.get_docstring(classes[name][1]) or ""))]


@pytest.fixture(scope="module")
def modules():
    files = [file for room in ("dlm_jax", "pallas_kernels") for file in sorted((ROOT / room).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


@pytest.fixture(scope="module")
def everything(modules):
    return [d for place, tree in modules.items() for d in definitions(tree, place)]


def by_name(everything):
    others = {}
    for d in everything:
        others.setdefault(d.name.split(".")[-1], []).append(d.doc)
    return others


def check(kept: int, lacking: list[str], what: str):
    """Fails, with names, where too few of the definitions have something."""
    share = kept / (kept + len(lacking))
    assert share >= SHARE, f"{share:.1%} have {what}, not {SHARE:.0%}; these lack them:\n" + "\n".join(lacking)


def test_what_is_public_has_docstrings(everything):
    known = [d for d in everything if public(d)]
    assert len(known) > 1000
    lacking = [f"{d.place} {d.name}" for d in known if not d.doc]
    check(len(known) - len(lacking), lacking, "docstrings")


def test_args_sections_are_whole(everything):
    assert sum(bool(entries(d.doc)) for d in everything) > 300
    lacking = [f"{d.place} {d.name}: {missing}" for d in everything if (missing := undescribed(d))]
    assert not lacking, "parameters that an Args section leaves out:\n" + "\n".join(lacking)


def test_arrays_have_shapes(everything):
    known, others = list(filter(public, everything)), by_name(everything)
    count = sum(len(arrays(d.node)) for d in known)
    assert count > 300
    lacking = [f"{d.place} {d.name}({name})" for d in known for name in shapeless(d, others)]
    check(count - len(lacking), lacking, "shapes")


def test_parts_and_objectives_name_their_sources(modules):
    lacking = unsourced(modules)
    assert not lacking, "whose are they? (PLAIN lists those that are nobody's):\n" + "\n".join(lacking)
    names = {d.name for place, tree in modules.items() for d in definitions(tree, place)}
    assert PARTS | PLAIN <= names, f"no such classes: {(PARTS | PLAIN) - names}"


GOOD = '''
def scaled(x: Array, factor: float, limit: Array | None = None) -> Array:
    """Returns x, scaled.

    Args:
      x: (B, T) vectors,
        of any dtype.
      factor, limit: () numbers.

    Source: Cobbe et al.
    """

def other(x: Array):
    """See `scaled`."""
'''


@pytest.mark.parametrize("old, new, found", [
    ("factor, limit", "factor", "undescribed"),
    ("x: (B, T) vectors", "x: vectors", "shapeless"),
    ("factor, limit: () numbers", "factor, limit: numbers", "shapeless"),
    ("See `scaled`.", "See `nothing`.", "shapeless"),
    ("See `scaled`.", "Returns a part of it.", "shapeless"),
])
def test_the_checks_see_what_is_missing(old, new, found):
    def faults(text):
        defined = list(definitions(ast.parse(text), "planted.py"))
        assert len(defined) == 2
        lists = {"undescribed": [undescribed(d) for d in defined],
                 "shapeless": [shapeless(d, by_name(defined)) for d in defined]}
        return {kind for kind, lacking in lists.items() if any(lacking)}

    assert old in GOOD and not faults(GOOD)
    assert faults(GOOD.replace(old, new)) == {found}


def test_the_checks_see_missing_docstrings_and_sources():
    tree = ast.parse('class Mine(CommitRule):\n    """A rule."""\n    def choose(self, x): pass\n')
    assert [d.name for d in definitions(tree, "planted.py") if not d.doc] == ["Mine.choose"]
    assert unsourced({"planted.py": tree}) == ["planted.py:1 Mine"]
    with pytest.raises(AssertionError, match="94.0% have docstrings"):
        check(94, ["a.py:1 f"] * 6, "docstrings")
