"""The kernels of a program, compiled one by one for their schedules: a few files instead of one for every fusion."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from launch.compile import chips, schedules, walks
from launch.compile.hlo import KERNEL


def key(name: str, shapes: list[tuple[int, ...]]) -> str:
    """Returns what a kernel is known by: its name, and the shapes it returns."""
    return f"{name} {shapes}"


def of_text(text: str) -> dict[str, str]:
    """Returns the keys of the kernels' calls in compiled HLO, by the calls' names."""
    calls = re.findall(rf'%?([\w.\-]+) = ([^\n]*?) custom-call\([^\n]*custom_call_target="{KERNEL}"', text)
    dims = lambda shape: [tuple(map(int, d.split(","))) if d else () for d in re.findall(r"\b\w+\[([\d,]*)\]", shape)]
    return {call: key(re.sub(r"\.\d+$", "", call), dims(shape)) for call, shape in calls}


def of_jaxpr(jaxpr: Any) -> dict[str, Any]:
    """Returns the kernels' calls in a traced function, one for each key."""
    found = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "pallas_call":
            name = eqn.params["name"] if "name" in eqn.params else eqn.params["name_and_src_info"].name
            found[key(name, [x.aval.shape for x in eqn.outvars])] = eqn
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found |= of_jaxpr(inner)
    return found


def compile_each(jaxpr: Any, topology: str, folder: Path, rules: Sequence[Any] = ()) -> dict[str, dict[str, Any]]:
    """Compiles every kernel of a traced function for one chip; returns the fields of their schedules by key.

    Args:
      jaxpr: of the function.
      topology: whose kind of chip is meant.
      folder: that the compiler dumps to.
      rules: of visibility, by which the steps of attention kernels are counted; see `walks.cycles`.
    """
    kind = topology.partition(":")[0]
    limits, devices = chips.devices(f"{kind}:{chips.SLICES[kind][0]}")
    chip = SingleDeviceSharding(devices[0])
    found = {}
    for name, eqn in of_jaxpr(jaxpr).items():
        before = {*folder.glob("*-final_bundles.txt")}
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=chip) for x in eqn.invars]
        alone = functools.partial(eqn.primitive.bind, **eqn.params)
        text = jax.jit(alone).lower(*shapes).compile().as_text()
        fresh = {*folder.glob("*-final_bundles.txt")} - before
        files = [file for call in of_text(text) for file in fresh
                 if f"-{call}-" in file.name and "schedule-analysis" not in file.name]
        if files:
            found[name] = dataclasses.asdict(_walked(schedules.parse(files[0].read_text()), name, eqn, rules, limits))
    return found


def _walked(schedule: schedules.Schedule, name: str, eqn: Any, rules: Sequence[Any], chip: chips.Chip
            ) -> schedules.Schedule:
    called = name.partition(" ")[0]
    if not called.startswith(walks.NAME):
        return schedule
    return dataclasses.replace(schedule, cycles=walks.cycles(schedule, called, eqn, rules, chip), open_loops=0)


def ask(typed: list[str]) -> dict[str, schedules.Schedule]:
    """Returns the schedules of a program's kernels by key, from a process of its own.

    The compiler learns where to dump when it is loaded, and for all that this process compiles.

    Args:
      typed: the command line of the program.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        done = subprocess.run([sys.executable, "-m", "launch.compile", *typed, "--kernels", file.name],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"compiling the kernels alone failed: {done.stderr[-2000:]}")
        return {name: schedules.Schedule(**fields) for name, fields in json.load(file).items()}
