"""Runs reference numbers made by other software through this library's public functions.

    python -m tests.oracle ../shared/oracle ../shared/oracle_zoo
    python -m tests.oracle --jobs 1 some/other/folder

Walks the folders, recognises every case folder by what its files hold (never by its name), prints a line for each
and `N passed, N failed`; exits 1 if any failed and 2 if there was nothing to run. A kind of folder that no runner
knows is named as `not covered`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.oracle import recognise  # noqa: E402


def run_folder(folder: Path) -> tuple[bool, float, str, float]:
    """Returns (passed, largest error, detail, seconds) of one case folder; any exception is a failure."""
    import jax

    from dlm_jax.decode.executables import EXECUTABLES

    cache = Path(__file__).resolve().parents[2] / ".cache" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    start = time.perf_counter()
    try:
        with jax.default_matmul_precision("highest"):
            passed, error, detail = recognise.runner(folder)(folder)
    except Exception as problem:  # a case that breaks the runner has failed; the others still run
        traceback.print_exc()
        passed, error, detail = False, float("nan"), f"{type(problem).__name__}: {problem}"
    finally:  # compiled code takes hundreds of memory maps a program, and a process may hold only so many
        EXECUTABLES.clear()
        jax.clear_caches()
    return passed, error, detail, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Runs everything below a folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder", help="holds case folders, at any depth")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4),
                        help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not folder.is_dir():
            print(f"{folder} is not a folder", file=sys.stderr)
            return 2
    names = {found: str(found.relative_to(folder)) if found != folder else folder.name
             for folder in options.folders for found in recognise.case_folders(folder)}
    # many cases first: what takes longest should not run alone at the end
    size = lambda folder: -sum(file.stat().st_size for file in folder.glob("*.json"))
    known = sorted((f for f in names if recognise.runner(f)), key=size)
    if not names:
        print(f"no case folders (cases.json or *.npz) below {', '.join(map(str, options.folders))}", file=sys.stderr)
        return 2
    passed = failed = 0
    width = max(map(len, names.values()))
    for folder, name in names.items():
        if folder not in known:
            print(f"not covered  {name:<{width}}", flush=True)
    from tests.oracle.__main__ import run_folder as run  # child processes find it by this name, not by "__main__"

    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, options.jobs), mp_context=spawn) as pool:
        jobs = {pool.submit(run, folder): folder for folder in known}
        for job in concurrent.futures.as_completed(jobs):
            try:
                ok, error, detail, seconds = job.result()
            except concurrent.futures.process.BrokenProcessPool as problem:  # its other folders are lost with it
                ok, error, detail, seconds = False, float("nan"), f"not finished: {problem}", 0.0
            passed, failed = passed + ok, failed + (not ok)
            print(f"{'passed' if ok else 'FAILED':<11}  {names[jobs[job]]:<{width}}  largest error {error:.1e}  "
                  f"{seconds:5.1f} s  {detail}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
