"""What a kernel's walk over tiles takes: bundles of its branches, times the tiles that the rules of a program show.

The attention kernels' loops have no fixed length: they visit the tiles in which something is visible, one branch
for each class of tiles. A sample of the program's rows says how many there are of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from launch.compile.chips import Chip
from launch.compile.schedules import Schedule
from pallas_kernels.attention.tiles import EMPTY, FULL, PARTIAL, RANKED, pad_mask, tile_classes
from pallas_kernels.attention.visibility import Visibility

NAME = "block_mask_attention"
_CLASSES = (FULL, PARTIAL, RANKED)  # in the order of their branches, the longest there are


def cycles(schedule: Schedule, name: str, eqn: Any, rules: Sequence[Visibility], chip: Chip) -> int:
    """Returns the cycles of an attention kernel's run, by the rule of its size that shows most.

    Without such a rule, as in decoding, every tile counts, as one whose ranks are compared. A step takes no less than
    the time in which its tiles of two arrays come from memory.

    Args:
      schedule: of the kernel.
      name: of the kernel.
      eqn: its call, as traced.
      rules: of one row each, concrete.
      chip: that it is compiled for; its cores share heads and memory.
    """
    mapping = eqn.params["grid_mapping"]
    listed, _, q, k = (x.aval for x in eqn.invars[mapping.num_dynamic_grid_bounds:][:4])
    by_keys = name.endswith("dkv")
    blocks = [_block(mapping, 0), _block(mapping, 1)]
    wait = 2 * math.prod(blocks[not by_keys]) * q.dtype.itemsize * chip.cores / chip.bandwidth * chip.clock
    programs = math.prod(size for size in mapping.grid[1:] if isinstance(size, int)) * -(-mapping.grid[0] // chip.cores)
    edges, found = [block[0] for block in blocks], []
    for rule in rules:
        sizes = [-(-length // edge) * edge for length, edge in zip((rule.query_length, rule.key_length), edges)]
        if sizes == [q.shape[2], k.shape[2]]:
            classes = tile_classes(pad_mask(rule, *sizes), *edges)[0]
            classes = classes.T if by_keys else classes
            visited = [int(jnp.sum(classes == kind)) for kind in _CLASSES]
            lonely = int(jnp.sum(jnp.all(classes == EMPTY, axis=1)))
            found.append(q.shape[0] * _walk(schedule, visited, lonely, classes.shape[0], wait))
    if not found:
        tiles = listed.shape[0] // q.shape[0]
        found.append(q.shape[0] * _walk(schedule, [0, 0, tiles], 0, q.shape[2] // edges[0], wait))
    return int(programs * max(found))


def _walk(schedule: Schedule, visited: Sequence[int], lonely: int, rows: int, wait: float) -> float:
    """Cycles of so many tiles of each class, steps without one, and rows of tiles."""
    longest = sorted(range(len(schedule.branches)), key=schedule.branches.__getitem__)[-len(_CLASSES):]
    inside = [schedule.branches[i] for i in sorted(longest)]
    once = sum(schedule.branches) - sum(inside)  # what begins and ends a row
    own = schedule.body - sum(schedule.branches)
    return sum(n * max(own + bundles, wait) for n, bundles in zip(visited, inside)) + lonely * own + rows * once


def _block(mapping: Any, index: int) -> list[int]:
    """The sizes of an array's tile, those of axes that it has one of left out."""
    sizes = (getattr(d, "block_size", d) for d in mapping.block_mappings[index].block_shape)
    return [size for size in sizes if isinstance(size, int)]
