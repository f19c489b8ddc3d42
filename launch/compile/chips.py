"""What a TPU chip can do, and slices of them that need not be here."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """Limits of a chip.

    Attributes:
      clock: cycles a second of the compiler's estimates.
      memory: bytes a program may use, which are fewer than the data sheet's; from the compiler's refusals.
      bandwidth: bytes a second between memory and chip.
      flops: bfloat16 products and sums a second.
      links: bytes a second out of the chip over all its links.
      cores: that share the first axis of a kernel's grid.

    Source: data sheets of Google Cloud (memory and links as the compiler and "How to Scale Your Model" have them).
    """

    clock: float
    memory: float
    bandwidth: float
    flops: float
    links: float
    cores: int = 1


CHIPS = {
    "v5e": Chip(1.5e9, 15.75 * 2**30, 819e9, 197e12, 4 * 45e9),
    "v5p": Chip(1.75e9, 95.74 * 2**30, 2765e9, 459e12, 6 * 90e9, cores=2),
    "v6e": Chip(1.75e9, 31.25 * 2**30, 1640e9, 918e12, 4 * 90e9),
}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SLICES = {
    "v5e": _FLAT, "v6e": _FLAT,
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
            "16x16x16", "16x16x24")}


def devices(topology: str, slices: int = 1) -> tuple[Chip, list[Any]]:
    """Returns the chip of a topology and its devices.

    Args:
      topology: "v6e:2x4".
      slices: so many such slices, joined by the data centre's network.

    Raises:
      ValueError: no such topology, with those there are.
    """
    kind, _, shape = topology.partition(":")
    if kind not in CHIPS or shape not in SLICES[kind]:
        known = "; ".join(f"{kind}:{', '.join(shapes)}" for kind, shapes in SLICES.items())
        raise ValueError(f"--topology {topology}: no such slice; accepted: {known}")
    from jax.experimental import topologies

    more = {"chips_per_host_bounds": [1, 1, 1]} if set(shape) == {"1", "x"} else {}
    more |= {"num_slices": slices} if slices > 1 else {}
    return CHIPS[kind], topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices
