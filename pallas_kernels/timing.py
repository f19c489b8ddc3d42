"""The one clock and the one environment report of every benchmark: turns, warm-ups, synchronised, compile apart.

They live here because this package imports jax alone and everything that measures may import it.
"""
from __future__ import annotations

import functools
import importlib.metadata
import platform
import statistics
import time
from typing import Any, Callable, Mapping, NamedTuple

import jax

PACKAGES = ("dlm_jax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12",
            "nvidia-cudnn-cu13", "torch", "transformers", "triton", "flash-linear-attention", "fla-core")


class Entry(NamedTuple):
    """One thing to time: its row so far, a call that starts the work (None if it failed), how to wait for the last."""

    row: dict[str, Any]
    run: Callable[[], Any] | None
    wait: Callable[[Any], Any] = jax.block_until_ready


def reason(error: Exception) -> str:
    """An error in a table's cell."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160].replace("|", "/")


def compile_entry(row: dict, function, args) -> Entry:
    """Compiles one entry; whatever stops a compiler is this row's result, the other rows still count."""
    start = time.perf_counter()
    try:
        compiled = jax.jit(function).lower(*args).compile()
    except Exception as error:
        return Entry({**row, "failed": reason(error)}, None)
    memory = compiled.memory_analysis()
    row = {**row, "compile_s": time.perf_counter() - start,
           "temporary_mib": None if memory is None else memory.temp_size_in_bytes / 2 ** 20}
    return Entry(row, functools.partial(compiled, *args))


def sample(run: Callable[[], Any], calls: int = 1, wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Seconds of one call until its result is there, of `calls` started back to back."""
    start = time.perf_counter()
    for _ in range(calls):
        last = run()
    wait(last)
    return (time.perf_counter() - start) / calls


def seconds(functions: Mapping[str, Callable[[], Any]], repeats: int, warm_up: bool = True) -> dict[str, float]:
    """Times functions in turn; what one raises is passed on.

    Args:
      functions: by name.
      repeats: timed calls of each.
      warm_up: whether each is called once before.
    Returns:
      The median wall seconds of each.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + warm_up):
        for name, function in functions.items():
            took = sample(function)
            if turn >= warm_up:
                taken[name].append(took)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(entries: list[Entry], rounds: int, calls: int) -> list[dict]:
    """Times entries in turn, so that a busy spell falls on all of them; what fails becomes a row that says why.

    Args:
      entries: what to time.
      rounds: timed samples per entry, after one to warm up.
      calls: calls started back to back in a sample, which hides the cost of starting one.
    Returns:
      Their rows with best_ms and median_ms, or with failed.
    """
    rows, times = [dict(entry.row) for entry in entries], [[] for _ in entries]
    for turn in range(rounds + 1):
        for entry, row, record in zip(entries, rows, times):
            if "failed" in row:
                continue
            try:
                took = sample(entry.run, calls, entry.wait)
            except Exception as error:  # out of memory, or a kernel the device refuses
                row["failed"] = reason(error)
            else:
                record.extend([1e3 * took] if turn else [])
    for row, record in zip(rows, times):
        if "failed" not in row:
            row.update(best_ms=min(record), median_ms=statistics.median(record))
    return rows


def fastest(rows: list[dict]) -> float | None:
    """The least best_ms of the rows that have one."""
    return min((row["best_ms"] for row in rows if "best_ms" in row), default=None)


def environment() -> dict[str, Any]:
    """The date, the versions and the device that a result depends on."""
    device, versions = jax.devices()[0], {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"date": time.strftime("%Y-%m-%d"), **versions, "python": platform.python_version(),
            "platform": device.platform, "device": device.device_kind, "devices": jax.device_count(),
            "machine": platform.machine()}


def record(command: str) -> dict[str, Any]:
    """What every file of results begins with: the command that makes it again, and its environment."""
    return {"command": command, "environment": environment()}
