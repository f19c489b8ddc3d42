"""Runs an `orthrus_*`-format folder: both views, the dual-pass training layouts, and every decode."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import numpy as np

import dlm_jax
from tests.oracle import orthrus_decode, orthrus_train

LOGIT_ATOL = 2e-4


def is_orthrus(facts: dict) -> bool:
    """Tells whether a folder's `cases.json` is of this format."""
    return {"dualA", "dualB", "generate", "block_size"} <= facts.keys()


def run(folder: Path) -> tuple[bool, float, str]:
    """Checks every case of a folder.

    Args:
      folder: holds `config.json`, `model.safetensors`, `cases.json` and `cases.npz`.

    Returns:
      Whether all agree, the largest absolute error, and a line naming the counts or the first failures.
    """
    folder = Path(folder)
    model, params = dlm_jax.load(folder)
    facts = json.loads((folder / "cases.json").read_text())
    cases: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    with np.load(folder / "cases.npz") as arrays:
        for key in arrays:
            case, field = key.split("__")
            cases[case][field] = arrays[key]
    failed, worst, details = [], 0.0, []
    for part in (orthrus_decode, orthrus_train):
        problems, error, detail = part.run(model, params, facts, cases, LOGIT_ATOL)
        failed, worst, details = failed + problems, max(worst, error), [*details, detail]
    if failed:
        details.append(f"{len(failed)} failed: " + "; ".join(failed[:5]))
    return not failed, worst, ", ".join(details)
