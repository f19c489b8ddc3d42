"""What README.md tells people to type exists, and what it quotes is dated."""

import importlib.util
import re

import pytest

import configs
import dlm_jax
from launch import convert_weights, decoders
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


@pytest.mark.parametrize("name", sorted(set(re.findall(r"--config (\w+:\w+)", TEXT))))
def test_configurations_exist(name):
    assert name in configs.names()


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"--(?:decoder|preset) [a-z_:]+\b", TEXT))))
def test_decoders_and_presets_exist(setting):
    kind, name = setting.removeprefix("--").split()
    decoders.make(**({"name": name} if kind == "decoder" else {"name": None, "preset": name}))


@pytest.mark.parametrize("command", sorted(set(re.findall(r"launch\.convert_weights ([a-z-]+)", TEXT))))
def test_conversions_exist(command):
    assert f"{command} " in convert_weights.parser().format_help()


def test_every_launcher_is_shown():
    files = (ROOT / "launch").glob("*.py")
    programs = {f"launch.{f.stem}" for f in files if '__name__ == "__main__"' in f.read_text()}
    programs |= {f"launch.{f.parent.name}" for f in (ROOT / "launch").glob("*/__main__.py")}
    assert programs <= set(re.findall(r"-m (launch\.\w+)", TEXT + (ROOT / "Makefile").read_text()))


DATE = r"20\d\d-\d\d-\d\d"
RESULTS = sorted(f for room in ("launch", "pallas_kernels") for f in (ROOT / room / "results").iterdir())
PARAGRAPHS = TEXT.split("\n\n")


@pytest.mark.parametrize("file", RESULTS, ids=[f.name for f in RESULTS])
def test_results_say_when_and_how_they_were_made(file):
    head = file.read_text()[:2000]
    assert re.search(DATE, head), "no date"
    assert re.search(r'jax"?:? "?\d+\.\d+\.\d+', head), "no version of jax"
    assert re.search(r'"command"|[Cc]ommand: `|`python |ptxas', head), "no command"


@pytest.mark.parametrize("file", RESULTS, ids=[f.name for f in RESULTS])
def test_quoted_results_name_their_date(file):
    made = re.search(DATE, file.read_text())[0]
    for paragraph in PARAGRAPHS:
        if str(file.relative_to(ROOT)) in paragraph:
            assert made in paragraph, f"{file.name} is of {made}; README quotes it as of another day, or of none"


def measured_tables(paragraphs):
    """Numbers of the paragraphs that are tables in which most rows have three numbers or more."""
    numbers = lambda row: sum(bool(re.fullmatch(r"[\d,.]+( %)?", cell.strip())) for cell in row.split("|"))
    for at, paragraph in enumerate(paragraphs):
        rows = paragraph.strip().splitlines()[2:]
        if paragraph.startswith("|") and sum(numbers(row) >= 3 for row in rows) * 2 > len(rows):
            yield at


def test_every_measured_table_is_dated():
    found = list(measured_tables(PARAGRAPHS))
    assert len(found) >= 3
    for at in found:
        before = PARAGRAPHS[at - 1]
        assert re.search(rf"{DATE},\s+jax \d", before), f"no date and version before {PARAGRAPHS[at][:60]!r}"
