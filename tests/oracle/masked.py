"""Runs a folder of the masked-diffusion format: every case goes to the runner of its `kind`.

The format: `config.json`, `model.safetensors` (and perhaps `guider_config.json`, `guider.safetensors`), `cases.json`
with `meta` and a list `cases`, and `cases.npz` with keys `<case id>/<field>`. A runner is a function
(folder, case) -> `Outcome`; each of `MODULES` has a dictionary `RUNNERS` of them by kind.

Cases with `official_quirk` document slips of the released code: they are counted, not run. A runner may excuse part of
a comparison by another rule, which it names in `Outcome.excused`; those are counted too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax

MODULES = ("tests.oracle.masked_losses", "tests.oracle.masked_decode", "tests.oracle.guided")
QUIRK = "official_quirk, not run"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      problem: what disagrees, empty where nothing does.
      error: largest absolute error of compared numbers.
      excused: the rule by which part of the case was not compared, empty where all was.
    """

    problem: str = ""
    error: float = 0.0
    excused: str = ""


class Folder:
    """A folder's files, each read when first asked for."""

    def __init__(self, path: Path):
        self.path = Path(path)

    @functools.cached_property
    def _facts(self) -> dict:
        return json.loads((self.path / "cases.json").read_text())

    @property
    def cases(self) -> list[dict]:
        """Every case, as stored."""
        return self._facts["cases"]

    @property
    def meta(self) -> dict[str, Any]:
        """What is said of the cases."""
        return self._facts["meta"]

    @property
    def tokens(self) -> dict[str, Any]:
        """Special ids by name."""
        return self._facts["meta"]["tokens"]

    @functools.cached_property
    def arrays(self) -> Any:
        """The arrays of `cases.npz` by key."""
        return np.load(self.path / "cases.npz")

    def array(self, case: dict, field: str) -> np.ndarray | None:
        """Returns an array of a case, None where it has none of that name."""
        key = f"{case['id']}/{field}"
        return self.arrays[key] if key in self.arrays else None

    @functools.cached_property
    def model(self) -> tuple:
        """The module and its parameters."""
        return dlm_jax.load(self.path)

    @functools.cached_property
    def guider(self) -> tuple:
        """The guider's module and its parameters."""
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(self.path / "guider_config.json", Path(scratch) / "config.json")
            shutil.copy(self.path / "guider.safetensors", Path(scratch) / "model.safetensors")
            return dlm_jax.load(scratch)


def close(got: Any, want: Any, rtol: float, atol: float = 0.0) -> Outcome:
    """Compares numbers; a NaN or another shape is a problem."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return Outcome(f"shape {got.shape} is not {want.shape}", np.inf)
    error = np.abs(got - want)
    worst = float(np.max(error, initial=0.0))
    return Outcome("" if np.all(error <= atol + rtol * np.abs(want)) else f"off by {worst:.3g}", worst)


def is_masked(cases: Any) -> bool:
    """Tells from the content of cases.json whether a folder is one of these."""
    return isinstance(cases, list) and bool(cases) and all(
        isinstance(case, dict) and {"id", "kind"} <= case.keys() for case in cases)


def run(path: Path, modules: Sequence[str] = MODULES) -> tuple[bool, float, str]:
    """Runs every case of a folder.

    Args:
      path: as in the module's docstring.
      modules: whose runners are used.

    Returns:
      Whether all agree, the largest absolute error, and a sentence that counts cases by what came of them.
    """
    folder = Folder(path)
    found = [importlib.import_module(name) for name in modules if importlib.util.find_spec(name)]
    runners = {kind: runner for module in found for kind, runner in module.RUNNERS.items()}
    worst, problems = 0.0, []
    ran, excused, uncovered = (collections.Counter() for _ in range(3))
    for case in folder.cases:
        if case["kind"] not in runners:
            uncovered[case["kind"]] += 1
        elif case.get("official_quirk"):
            excused[QUIRK] += 1
        else:
            outcome = runners[case["kind"]](folder, case)
            ran[case["kind"]] += 1
            worst = max(worst, outcome.error)
            if outcome.excused:
                excused[outcome.excused] += 1
            if outcome.problem:
                problems.append(f"{case['id']}: {outcome.problem}"[:300])
    detail = f"{ran.total()} cases ({_counts(ran)})"
    detail += "".join(f"; {count} {rule}" for rule, count in sorted(excused.items()))
    if uncovered:
        detail += f"; {uncovered.total()} cases not covered ({_counts(uncovered)})"
    if problems:
        detail = f"{len(problems)} of {detail} failed: " + "; ".join(problems[:3])
    return not problems and ran.total() > 0, worst, detail


def _counts(kinds: collections.Counter) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
