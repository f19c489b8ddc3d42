"""What a compiled TPU program costs by the compiler's own model: a reader of its scheduled HLO.

Every fusion carries the cycles that the compiler expects of it. They are added over loops, times their trips, and over
the dearest branch of each conditional, or the cheapest; a loop whose length is data is counted once and named. Loops
that run once or not at all and stand side by side are branches, too: `decode.queries.ask` writes its widths so.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s8": 1, "u8": 1, "pred": 1, "s64": 8,
          "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 0.5, "u4": 0.5}
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
         "iota", "opt-barrier", "while", "conditional", "call"}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ORIGINS = re.compile(r"(?:^|/)((?:dlm_jax|pallas_kernels|launch)/.*)")  # of a path of this library
KERNEL = "tpu_custom_call"


def size(shape: str) -> float:
    """Returns the bytes of an HLO shape, summed over a tuple's."""
    return sum(math.prod(int(d) for d in dims.split(",") if d) * _BYTES[kind]
               for kind, dims in re.findall(r"\b(\w+)\[([\d,]*)\]", shape) if kind in _BYTES)


@dataclasses.dataclass
class Traffic:
    """A kind of collective: places in the program, runs, and bytes that leave a chip at least."""

    sites: int = 0
    runs: int = 0
    bytes: float = 0.0


@dataclasses.dataclass
class Cost:
    """What a computation costs.

    Attributes:
      cycles: estimated, kernels included.
      lines: cycles by line of source and operation.
      kernels: runs by the name of a kernel's call.
      collectives: by kind.
      silent: bytes of the results of operations without an estimate, by operation.
      loops: names of the loops of unknown length, which are counted once.
    """

    cycles: float = 0.0
    lines: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    collectives: dict[str, Traffic] = dataclasses.field(default_factory=lambda: collections.defaultdict(Traffic))
    silent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    loops: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Cost, times: int = 1) -> None:
        """Adds another computation that runs so many times."""
        self.cycles += times * other.cycles
        for mine, theirs in ((self.lines, other.lines), (self.kernels, other.kernels), (self.silent, other.silent)):
            for name, value in theirs.items():
                mine[name] += times * value
        for kind, theirs in other.collectives.items():
            mine = self.collectives[kind]
            mine.sites, mine.runs, mine.bytes = (
                mine.sites + theirs.sites, mine.runs + times * theirs.runs, mine.bytes + times * theirs.bytes)
        self.loops += other.loops


class Program:
    """A compiled program's text."""

    def __init__(self, text: str, chips: int = 1, kernels: Mapping[str, float] | None = None, taken: Callable = max):
        """Reads a program.

        Args:
          text: scheduled HLO, `compiled.as_text()`.
          chips: that a collective without groups joins.
          kernels: cycles by the name of a kernel's call, see `kernels.of_text`.
          taken: which of several branches runs, `max` for the dearest or `min`.

        Raises:
          ValueError: text of another form.
        """
        self.chips, self.kernels, self.taken, self.computations, self.entry = chips, kernels or {}, taken, {}, None
        current = None
        for line in text.splitlines():
            head = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
            if head:
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif current is not None and line.strip() != "}":
                current.append(line)
        if self.entry is None or "is_scheduled=true" not in text[:200]:
            raise ValueError("this is no scheduled HLO as libtpu 0.0.42 prints it: no ENTRY, or is_scheduled is absent")
        self._origins = _origins(text)
        self.cost = functools.cache(self._cost)

    def _cost(self, name: str | None = None) -> Cost:
        """Returns what one run of a computation costs; by default of the program."""
        total, branches = Cost(), []
        for line in self.computations[name or self.entry]:
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            label, shape, operation = found.groups()
            if operation == "while":
                body, trips = self.cost(_named(line, "body")), self.trips(line)
                if trips is None and self._at_most_once(line):
                    branches.append(body)
                    continue
                total.add(body, 1 if trips is None else trips)
                total.loops += [label] * (trips is None)
            elif operation == "conditional":
                total.add(self.taken(map(self.cost, _branches(line)), key=lambda cost: cost.cycles))
            elif operation == "call":
                total.add(self.cost(_named(line, "to_apply")))
            else:
                self._operation(total, line, label, shape, operation)
        if branches:
            total.add(self.taken(branches, key=lambda cost: cost.cycles))
        return total

    def _operation(self, total: Cost, line: str, label: str, shape: str, operation: str) -> None:
        for traffic in self._collectives(line, shape, operation):
            total.add(Cost(collectives=traffic))
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        cycles = float(estimate[1]) if estimate else 0.0
        if operation == "custom-call" and f'"{KERNEL}"' in line:
            total.kernels[label] += 1
            cycles, estimate = self.kernels.get(label, 0.0), label in self.kernels
        if estimate:
            total.cycles += cycles
            total.lines[self.origin(line) or label] += cycles
        elif operation not in _FREE and not operation.endswith("-done"):
            total.silent[operation] += size(shape)

    def trips(self, line: str) -> int | None:
        """Returns the trips of a `while`, None where they are data.

        The text names none: it is the one integer that the condition compares with.
        """
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if known:
            return int(known[1])
        condition = list(self.computations[_named(line, "condition")])
        for inner in re.findall(r"calls=%?([\w.\-]+)", "\n".join(condition)):
            condition += self.computations.get(inner, [])
        bounds = set(re.findall(r"s32\[\](?:\{[^}]*\})? constant\((\d+)\)", "\n".join(condition)))
        return int(bounds.pop()) if len(bounds) == 1 else None

    def _at_most_once(self, line: str) -> bool:
        """Whether a loop goes on while a carried truth says so, and its body sets that to false."""
        root = next(line for line in self.computations[_named(line, "condition")] if "ROOT" in line)
        return re.search(r"pred\[\]\S* get-tuple-element\(", root) is not None

    def body_of_unknown_length(self) -> str | None:
        """Returns the dearest loop body that the program itself runs an unknown number of times, None without one."""
        bodies = [_named(line, "body") for line in self.computations[self.entry]
                  if " while(" in line and self.trips(line) is None]
        return max(bodies, key=lambda body: self.cost(body).cycles, default=None)

    def origin(self, line: str) -> str | None:
        """Returns the line of this library that an operation comes from, and the operation; None where unsaid."""
        name, frame = re.search(r'op_name="([^"]*)"', line), re.search(r"stack_frame_id=(\d+)", line)
        inner = re.search(r"calls=%?([\w.\-]+)", line)
        if name is None and frame is None and inner is not None:
            roots = [line for line in self.computations.get(inner[1], ()) if "metadata" in line]
            return self.origin(roots[-1]) if roots else None
        where = self._origins.get(int(frame[1])) if frame else None
        way = "" if name is None else " (backward)" if "transpose(" in name[1] else " (again)" if (
            "remat" in name[1]) else ""
        what = name[1].rpartition("/")[2] if name else ""
        return f"{where or ''} {what}{way}".strip() or None

    def _collectives(self, line: str, shape: str, operation: str) -> list[dict[str, Traffic]]:
        kind = operation.removesuffix("-start")
        if kind not in _COLLECTIVES:
            inner = re.search(r"calls=%?([\w.\-]+)", line)
            found = [(line, _INSTRUCTION.match(line)) for line in self.computations.get(inner[1], ())] if inner else []
            return [traffic for line, m in found if m for traffic in self._collectives(line, m[2], m[3])]
        groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", line)
        ways = self.chips if groups is None else int(groups[2]) if groups[2] else len(groups[1].split(","))
        out = size(shape)
        if operation == "all-gather-start":
            out *= ways / (ways + 1)  # the operand stands beside the result
        elif operation == "collective-permute-start":
            out /= 2
        share = (ways - 1) / ways
        wire = {"all-gather": share, "all-reduce": 2 * share, "reduce-scatter": ways - 1.0,
                "collective-permute": 1.0}.get(kind, share)
        return [{kind: Traffic(1, 1, wire * out)}]


def _named(line: str, role: str) -> str:
    return re.search(rf"{role}=%?([\w.\-]+)", line)[1]


def _branches(line: str) -> list[str]:
    two = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", line)
    return two or re.findall(r"%?([\w.\-]+)", re.search(r"branch_computations=\{([^}]*)\}", line)[1])


def _origins(text: str) -> dict[int, str]:
    """Returns, for every stack frame of the text's tables, its innermost line of this library."""
    table = lambda name, row: dict(re.findall(row, "\n".join(
        re.findall(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)), re.MULTILINE))
    files = table("FileNames", r'^(\d+) "(.*)"$')
    places = {number: (files.get(file, ""), line) for number, file, line in re.findall(
        r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", text, re.MULTILINE)}
    frames = {int(number): (place, int(parent) - 1) for number, place, parent in re.findall(
        r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", text, re.MULTILINE)}
    found = {}
    for frame in frames:
        at = frame
        while at in frames and frame not in found:
            file, line = places.get(frames[at][0], ("", ""))
            ours = None if "site-packages" in file else _ORIGINS.search(file)
            if ours:
                found[frame] = f"{ours[1]}:{line}"
            at = frames[at][1]
    return found
