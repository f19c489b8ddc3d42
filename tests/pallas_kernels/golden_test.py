"""The golden two-stream cases and unit cases, when the oracle folder is there."""
import os
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import kernels as oracle_kernels

ORACLE = Path(os.environ.get("DLM_ORACLE", Path(__file__).resolve().parents[2] / "../shared/oracle"))


def folders(recognise):
    if not ORACLE.is_dir():
        pytest.skip(f"no golden folder at {ORACLE}; set DLM_ORACLE")
    return [p for p in sorted(ORACLE.iterdir()) if p.is_dir() and recognise(p)]


def copy_some(folder, into, stems):
    for stem in stems:
        for path in folder.glob(f"{stem}*"):
            (into / path.name).symlink_to(path.resolve())
    return into


def test_packed_two_stream_case(tmp_path):
    """One packed case with the default form; `python -m tests.oracle` runs them all in every form."""
    for folder in folders(oracle_kernels.is_flare):
        passed, error, detail = oracle_kernels.run_flare(copy_some(folder, tmp_path, ["case2"]), forms=("folded",))
        assert passed, detail


def test_a_wrong_golden_is_caught(tmp_path):
    """The runner can fail: a flipped visibility bit and a shifted output are both reported."""
    for folder in folders(oracle_kernels.is_flare):
        with np.load(sorted(folder.glob("*.npz"))[0]) as stored:
            case = dict(stored)
        case["visibility"][0] ^= 1
        case["o_noisy"] = case["o_noisy"] + 0.1
        np.savez(tmp_path / "case.npz", **case)
        passed, _, detail = oracle_kernels.run_flare(tmp_path, forms=())
        assert not passed and "visibility" in detail and "o_noisy" in detail
