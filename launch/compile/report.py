"""What the compiler makes of a program, beside what it needs: as a dictionary, and as a page of text."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import jax

from launch.compile import kernels
from launch.compile.chips import Chip
from launch.compile.hlo import Program
from launch.compile.programs import Job, held
from launch.compile.schedules import Schedule

BLIND = ("Blind spots: stalls, waiting for memory beyond what the compiler models, collectives (a floor alone, not in "
         "the estimate) and how far they overlap; of decoding, tiles that a "
         "kernel skips.")
_SHOWN = 16  # operations
GIB = 2**30


def check_arguments(job: Job, chip: Chip, chips: int) -> None:
    """Raises ValueError where what a program is given alone exceeds a chip's memory."""
    given = sum(held(argument) for argument in job.arguments)
    if given > chip.memory:
        raise ValueError(
            f"{job.title} does not fit: its arguments take {given / GIB:.2f} GiB of a chip's {chip.memory / GIB:.2f} "
            f"usable ones, {(given - chip.memory) / GIB:.2f} too many; spread over all chips they need a slice of at "
            f"least {-(-given * chips // int(chip.memory))} chips, or pick a smaller --layers, --batch or --cache")


def compile_it(job: Job, chip: Chip) -> tuple[Any, float]:
    """Compiles a job; returns the executable and the seconds that took.

    Raises:
      ValueError: a program that does not fit, by how much and what would.
    """
    begun = time.time()
    try:
        return job.trace().lower().compile(), time.time() - begun
    except jax.errors.JaxRuntimeError as refusal:
        if "RESOURCE_EXHAUSTED" not in str(refusal):
            raise
        first = " ".join(str(refusal).split())[:400]
        given = sum(held(argument) for argument in job.arguments)
        fewer = "--batch or --cache, or more chips" if job.looped else (
            "--batch, a larger --set train.grad_accumulation, train.remat=true, a smaller train.objective.head_chunk, "
            "or a mesh with more fsdp or tensor")
        raise ValueError(f"{job.title} does not fit ({given / GIB:.2f} GiB of arguments a chip, "
                         f"{chip.memory / GIB:.2f} usable): {first}. Try a smaller {fewer}") from None


def make(job: Job, chip: Chip, chips: int, compiled: Any, seconds: float, found: dict[str, Schedule]) -> dict[str, Any]:
    """Returns what is reported of a compiled program.

    Args:
      job: that was compiled. chip, chips: it was compiled for.
      compiled: the executable. seconds: that compiling took.
      found: schedules of its kernels, by `kernels.key`.
    """
    text, memory = compiled.as_text(), compiled.memory_analysis()
    calls = {call: found.get(key) for call, key in kernels.of_text(text).items()}
    of_kernels = {call: schedule.cycles for call, schedule in calls.items() if schedule}
    program, shortest = (Program(text, chips, of_kernels, taken) for taken in (max, min))
    body = program.body_of_unknown_length() if job.looped else None
    cost = program.cost(body)
    floors = {"memory": (job.moved, chip.bandwidth), "compute": (job.flops, chip.flops),
              "links": (sum(traffic.bytes for traffic in cost.collectives.values()), chip.links)}
    estimate = cost.cycles / chip.clock
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + fresh
    return {
        "program": job.title, "chips": chips, **job.facts, "fits": needed <= chip.memory,
        "memory": {"usable": int(chip.memory), "needed": needed, "arguments": memory.argument_size_in_bytes,
                   "temporaries": memory.temp_size_in_bytes, "outputs": memory.output_size_in_bytes,
                   "aliased": memory.alias_size_in_bytes},
        "step_seconds": estimate, "step_cycles": cost.cycles, "least_cycles": shortest.cost(body).cycles,
        "once_cycles": program.cost().cycles - cost.cycles if body else 0.0,
        "floors": {name: {"amount": amount, "seconds": amount / speed,
                          "ratio": estimate * speed / amount if amount and name != "links" else None}
                   for name, (amount, speed) in floors.items()},
        "dearest": [{"where": where, "cycles": cycles} for where, cycles in cost.lines.most_common(_SHOWN)],
        "kernels": {call: {"runs": runs, **({} if calls[call] is None else vars(calls[call]))}
                    for call, runs in cost.kernels.items()},
        "collectives": {kind: vars(traffic) for kind, traffic in sorted(cost.collectives.items())},
        "without_estimate": dict(cost.silent.most_common(6)), "loops_counted_once": cost.loops,
        "compile_seconds": seconds, "blind": BLIND, "date": time.strftime("%Y-%m-%d"),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}}


def page(found: dict[str, Any], topology: str) -> str:
    """Returns a report as text."""
    gib = {name: value / GIB for name, value in found["memory"].items()}
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if size > 1) or "one chip"
    over = "" if found["fits"] else f", {gib['needed'] - gib['usable']:.2f} too many"
    cycles = found["step_cycles"]
    once = f"; once a call {found['once_cycles'] / 1e6:.2f} M more" if found["once_cycles"] else ""
    once = f"; {found['least_cycles'] / 1e6:.2f} M by the cheapest branches{once}" if (
        found["least_cycles"] < 0.99 * cycles) else once
    memory = f"{gib['arguments']:.2f} GiB of arguments + {gib['temporaries']:.2f} of temporaries a chip"
    lines = [f"{found['program']}, on {topology} ({mesh})", "",
             f"fits        {'yes' if found['fits'] else 'NO'}: {memory}, {gib['usable']:.2f} usable{over}",
             f"step        {_time(found['step_seconds'])} estimated, {cycles / 1e6:.2f} M cycles{once}"]
    units = {"memory": "GB moved", "compute": "Tflop", "links": "GB sent"}
    for name, floor in found["floors"].items():
        amount = floor["amount"] / (1e12 if name == "compute" else 1e9)
        ratio = "" if floor["ratio"] is None else f"; the estimate is {floor['ratio']:.2f} times that"
        if amount:
            lines.append(f"  {name:<10}{_time(floor['seconds'])} at least, {amount:.3g} {units[name]}{ratio}")
    lines += ["", "dearest     M cycles"]
    lines += [f"  {entry['cycles'] / cycles:>6.1%}  {entry['cycles'] / 1e6:>9.3f}  {entry['where']}"
              for entry in found["dearest"]]
    for name, kernel in found["kernels"].items():
        known = "not estimated: no schedule was found" if "cycles" not in kernel else (
            f"{kernel['bundles']} bundles, {kernel['cycles'] / 1e6:.3f} M cycles a run"
            + (f", {kernel['open_loops']} loops of unknown length counted once" if kernel["open_loops"] else ""))
        lines.append(f"kernel      {name}: {kernel['runs']} runs, {known}")
    lines += [f"collective  {kind}: {t['sites']} sites, {t['runs']} runs, {t['bytes'] / 1e9:.3g} GB"
              for kind, t in found["collectives"].items()]
    large = {name: size for name, size in found["without_estimate"].items() if size >= 1e6}
    if large:
        lines.append("no estimate " + ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in large.items()))
    if found["loops_counted_once"]:
        lines.append(f"counted once {', '.join(found['loops_counted_once'])}: loops whose length is data")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join([*lines, f"compiled in {found['compile_seconds']:.0f} s, {versions}, {found['date']}", BLIND])


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 10 else f"{seconds:,.1f} s"
