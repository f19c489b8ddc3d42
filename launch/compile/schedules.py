"""What a Mosaic kernel costs: a reader of the finished schedules that the TPU compiler dumps.

A schedule lists bundles, one a cycle where nothing waits. Loops nest; a loop ends with a branch back to its first
region, whose test holds the number of trips where that is no data.
"""

from __future__ import annotations

import dataclasses
import math
import re

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(LB)?[A-Z]*\s*:[>\s]*\{")
_START = re.compile(r"(?:Start|Start/End empty) region (\d+)")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's code.

    Attributes:
      bundles: of the code. cycles: of a run, every bundle times the trips of the loops around it.
      open_loops: loops whose trips are data; they are counted once. What a kernel skips is counted, too.
      body: bundles of the last of them. branches: bundles of what may be skipped and holds no such part itself.
    """

    bundles: int
    cycles: int
    open_loops: int
    body: int = 0
    branches: tuple[int, ...] = ()


def parse(text: str) -> Schedule:
    """Reads a dumped schedule.

    Args:
      text: of a file `...-final_bundles.txt`.

    Raises:
      ValueError: text without bundles.
    """
    tests = dict(re.findall(r"%(p\w+) = scmp\.\w+\.s32\.totalorder %\w+, (\d+)", text))
    branches = re.compile(r"sbr\.rel \(!?%(p\w+)\) target = \$region(\d+)")
    ends = {region: tests.get(test) for test, region in branches.findall(text)}
    bundles = cycles = open_loops = body = 0
    starts, jumps = {}, []  # of regions, and (where, to which region) of branches
    around: list[tuple[int, set[str]]] = []  # trips of the loops around the bundle, and their first regions
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found is None:
            continue
        starts |= {region: bundles for region in _START.findall(line)}
        jumps += [(bundles, region) for _, region in branches.findall(line)]
        if found[1]:
            regions = set(re.findall(r"Start region (\d+)", line))
            trips = next((ends[region] for region in regions if ends.get(region)), None)
            open_loops += trips is None
            around.append((int(trips or 1), regions))
        body = body + 1 if around else body
        bundles, cycles = bundles + 1, cycles + math.prod(trips for trips, _ in around)
        back = {region for _, region in branches.findall(line)}
        while around and any(back & regions for _, regions in around):
            around.pop()
    if not bundles:
        raise ValueError("this is no schedule as libtpu 0.0.42 dumps it: no bundles")
    skipped = [(start, starts[region]) for start, region in jumps if starts.get(region, 0) > start]
    inner = [(a, b) for a, b in skipped if not any(a < c and d <= b for c, d in skipped)]
    return Schedule(bundles, cycles, open_loops, body if open_loops else 0, tuple(b - a for a, b in inner))

