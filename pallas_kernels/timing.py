"""Compiling and timing: entries take turns, and what fails becomes a row that says why."""
from __future__ import annotations

import functools
import statistics
import time
from typing import Any, Callable, NamedTuple

import jax


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


def measure(entries: list[Entry], rounds: int, calls: int) -> list[dict]:
    """Times entries in turn, so that a busy spell falls on all of them.

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
            start = time.perf_counter()
            try:
                for _ in range(calls):
                    last = entry.run()
                entry.wait(last)
            except Exception as error:  # out of memory, or a kernel the device refuses
                row["failed"] = reason(error)
            if turn:
                record.append(1e3 * (time.perf_counter() - start) / calls)
    for row, record in zip(rows, times):
        if "failed" not in row:
            row.update(best_ms=min(record), median_ms=statistics.median(record))
    return rows


def fastest(rows: list[dict]) -> float | None:
    """The least best_ms of the rows that have one."""
    return min((row["best_ms"] for row in rows if "best_ms" in row), default=None)
