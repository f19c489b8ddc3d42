"""Which check a folder of the FLARE model set belongs to, and its run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.oracle import flare_decode, flare_passes

Check = Callable[[Path, list, dict], Iterator[tuple[str, float]]]
OF_CASE: tuple[tuple[set[str], Check], ...] = (
    ({"S_step", "gamma"}, flare_decode.diffusion_trust), ({"N", "readings"}, flare_decode.ar_trust),
    ({"rounds", "first_token"}, flare_decode.forced), ({"window", "kv_length_after"}, flare_passes.state_commit),
    ({"K", "V", "policies"}, flare_passes.verify_rules))


def runner(facts: dict) -> Callable[[Path], tuple[bool, float, str]] | None:
    """Returns the function that runs a folder with such a `cases.json`, None for another kind of folder."""
    if {"denoise", "window"} <= facts.keys():
        return functools.partial(run, flare_passes.probe)
    first = (facts.get("cases") or [{}])[0] if isinstance(facts.get("cases"), list) else {}
    return next((functools.partial(run, check) for keys, check in OF_CASE if keys <= first.keys()), None)


def run(check: Check, folder: Path) -> tuple[bool, float, str]:
    """Runs a folder's cases by a check; returns whether all agree, the largest error, and a line."""
    facts = json.loads((folder / "cases.json").read_text())
    arrays = dict(np.load(folder / "cases.npz")) if (folder / "cases.npz").is_file() else {}
    cases = facts.get("cases", facts)
    found = list(check(folder, cases, arrays))
    failed, worst = [text for text, _ in found if text], max(error for _, error in found)
    count = len(cases) if isinstance(cases, list) else sum(map(len, cases.values()))
    return not failed, worst, "; ".join([f"{count} cases, {len(found)} checks", *failed[:5]])
