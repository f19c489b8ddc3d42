"""Runs a folder of a public checkpoint family: logits, caches fed in pieces, training views and the authors' decoding.

The format is that of `masked`, with a config.json that names the authors' classes (`auto_map`). Views are compared the
same way for every family; `zoo_decode` has a table of (family, kind) for decoding. Cases of kind `official_error`
document what the authors' code raises: they are no cases of ours.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import dlm_jax
from dlm_jax.io import tensor_files
from tests.oracle import masked

MODULES = ("tests.oracle.zoo_views", "tests.oracle.zoo_decode", "tests.oracle.zoo_sampled",
           "tests.oracle.zoo_experts")


def is_zoo(config: dict, cases: Any) -> bool:
    """Tells from the contents of config.json and cases.json whether a folder is one of these."""
    return "auto_map" in config and masked.is_masked(cases)


def run(path: Path) -> tuple[bool, float, str]:
    """Runs every case of a folder, and stores its model again; returns as `masked.run`."""
    passed, worst, detail = masked.run(path, MODULES)
    changed = round_trip(path)
    return passed and not changed, worst, detail + (f"; stored again, these differ: {changed}" if changed else "")


def round_trip(path: Path) -> list[str]:
    """Returns the tensors and the fields of config.json that a model does not keep when it is loaded and stored."""
    with tempfile.TemporaryDirectory() as scratch:
        model, params = dlm_jax.load(path)
        dlm_jax.save(Path(scratch) / "again", model, params, config_from=path)
        there, here = (tensor_files.read_folder(folder) for folder in (path, Path(scratch) / "again"))
        old, new = (json.loads((folder / "config.json").read_text()) for folder in (path, Path(scratch) / "again"))
        same = lambda a, b: a is not None and b is not None and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        return [name for name in {**there, **here} if not same(there.get(name), here.get(name))] + [
            name for name in {**old, **new} if old.get(name) != new.get(name)]
