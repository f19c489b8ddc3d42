"""Which runner a case folder belongs to, told from the content of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

Runner = Callable[[Path], tuple[bool, float, str]]


def case_folders(root: Path) -> Iterator[Path]:
    """Yields every folder at or below `root` that holds cases.json, an .npz file or lane cases, in order of path."""
    from tests.oracle import asynclane

    for here, below, files in os.walk(root):
        below.sort()
        if "cases.json" in files or any(f.endswith(".npz") for f in files) or asynclane.files(Path(here)):
            yield Path(here)


def _json(path: Path) -> dict:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    return content if isinstance(content, dict) else {}


def runner(folder: Path) -> Runner | None:
    """Returns the function that runs a folder's cases, None for a kind that is not covered."""
    facts, config = _json(folder / "cases.json"), _json(folder / "config.json")
    cases = facts.get("cases")
    first = cases[0] if isinstance(cases, list) and cases and isinstance(cases[0], dict) else {}
    if config.get("model_type") in ("qwen3", "qwen2") and "cache_chunk_sizes" in facts and "greedy" in facts:
        from tests.oracle import qwen3

        return qwen3.run
    from tests.oracle import hybrid

    if hybrid.is_hybrid(config, facts):
        return hybrid.run
    if {"serial_num_blocks", "slot_threshold", "expected_positions"} <= first.keys():
        from tests.oracle import refusion_decode

        return refusion_decode.run
    if {"noisy_views", "response_tokens", "losses"} <= first.keys():
        from tests.oracle import flare_train

        return flare_train.run
    if {"official_ar_loss", "official_mdm_loss", "samples"} <= first.keys():
        from tests.oracle import refusion_train

        return refusion_train.run
    from tests.oracle import asynclane, flare_model, kernels, masked, orthrus, zoo

    if asynclane.files(folder):
        return asynclane.run

    flare = flare_model.runner(facts)
    if flare is not None:
        return flare
    if orthrus.is_orthrus(facts):
        return orthrus.run
    if zoo.is_zoo(config, cases):
        return zoo.run
    if masked.is_masked(cases):
        return masked.run
    if kernels.is_flare(folder):
        return kernels.run_flare
    if kernels.is_gdn_units(folder):
        return kernels.run_gdn_units
    return None
