"""Runs a folder of a public checkpoint family: logits, caches fed in pieces, training views and the authors' decoding.

The format is that of `masked`, with a config.json that names the authors' classes (`auto_map`). Views are compared the
same way for every family; `zoo_decode` has a table of (family, kind) for decoding. Cases of kind `official_error`
document what the authors' code raises: they are no cases of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.oracle import masked

MODULES = ("tests.oracle.zoo_views", "tests.oracle.zoo_decode", "tests.oracle.zoo_sampled",
           "tests.oracle.zoo_experts")


def is_zoo(config: dict, cases: Any) -> bool:
    """Tells from the contents of config.json and cases.json whether a folder is one of these."""
    return "auto_map" in config and masked.is_masked(cases)


def run(path: Path) -> tuple[bool, float, str]:
    """Runs every case of a folder; returns as `masked.run`."""
    return masked.run(path, MODULES)
