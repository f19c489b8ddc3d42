"""What a kernel's walk over tiles takes: bundles of its branches, times the tiles that the rules of a program show.

The attention kernels' loops have no fixed length: they visit the tiles in which something is visible, one branch
for each class of tiles. A sample of the program's rows says how many there are of each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from launch.compile.schedules import Schedule
from pallas_kernels.attention.tiles import EMPTY, FULL, PARTIAL, RANKED, pad_mask, tile_classes
from pallas_kernels.attention.visibility import Visibility

NAME = "block_mask_attention"
_CLASSES = (FULL, PARTIAL, RANKED)  # in the order of their branches, the longest there are


def cycles(schedule: Schedule, name: str, eqn: Any, rules: Sequence[Visibility], cores: int) -> int | None:
    """Returns the cycles of an attention kernel's run, by the rule of its size that shows most; None without one.

    Args:
      schedule: of the kernel.
      name: of the kernel.
      eqn: its call, as traced.
      rules: of one row each, concrete.
      cores: of a chip, which share heads.
    """
    mapping = eqn.params["grid_mapping"]
    q, k = (x.aval.shape for x in eqn.invars[mapping.num_dynamic_grid_bounds + mapping.num_index_operands:][:2])
    edges = [next(size for size in shape[2:] if size) for shape in (_block(mapping, 0), _block(mapping, 1))]
    programs = math.prod(size for size in mapping.grid[1:] if isinstance(size, int)) * -(-mapping.grid[0] // cores)
    found = []
    for rule in rules:
        sizes = [-(-length // edge) * edge for length, edge in zip((rule.query_length, rule.key_length), edges)]
        if sizes != [q[2], k[2]]:
            continue
        classes = tile_classes(pad_mask(rule, *sizes), *edges)[0]
        if name.endswith("dkv"):
            classes = classes.T
        lonely = int(jnp.sum(jnp.all(classes == EMPTY, axis=1)))
        visited = [int(jnp.sum(classes == kind)) for kind in _CLASSES]
        inside, once = _split(schedule)
        steps = (sum(visited) + lonely) * (schedule.body - sum(inside) - once)
        found.append(programs * q[0] * (steps + sum(map(operator.mul, visited, inside)) + classes.shape[0] * once))
    return max(found, default=None)


def _block(mapping: Any, index: int) -> list[int | None]:
    size = lambda d: getattr(d, "block_size", d)
    return [size(d) if isinstance(size(d), int) else None for d in mapping.block_mappings[index].block_shape]


def _split(schedule: Schedule) -> tuple[list[int], int]:
    """Bundles of the branch of each class of tiles, and of all the others, which begin and end a row of tiles."""
    longest = sorted(range(len(schedule.branches)), key=schedule.branches.__getitem__)[-len(_CLASSES):]
    inside = [schedule.branches[i] for i in sorted(longest)]
    return inside, sum(schedule.branches) - sum(inside)
