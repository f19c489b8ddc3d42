"""How devices that share arrays run a kernel, which compilers do not split: each on its own rows and heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType

from dlm_jax.types import HEADS, ROWS

_ALONE = ContextVar("alone", default=False)


@contextlib.contextmanager
def alone(one: bool = True) -> Iterator[None]:
    """Says that what is traced inside runs on one device, though the process has several."""
    token = _ALONE.set(one)
    try:
        yield
    finally:
        _ALONE.reset(token)


def mesh_of(x: Array) -> Any:
    """Returns the mesh of the devices that share an array of any shape: the ambient one, its own, or an empty one."""
    ambient = jax.sharding.get_abstract_mesh()
    return jax.typeof(x).sharding.mesh if ambient.empty else ambient


def can_share(x: Array, rows: int, heads: int) -> bool:
    """Returns whether each device can run a kernel on its own part of an array.

    On a mesh it can where the axes of rows and heads divide them; and one device can, and devices that already run a
    part of their own each (`jax.shard_map`).

    Args:
      x: the array, of any shape.
      rows, heads: that are to be divided.
    """
    mesh = mesh_of(x)
    if mesh.empty:  # arrays that are spread without a mesh look the same as arrays on one device
        return _ALONE.get() or jax.device_count() == 1
    if _inside(mesh):
        return True
    known = {*ROWS, HEADS} <= {*mesh.axis_names}
    return known and not (rows % (mesh.shape[ROWS[0]] * mesh.shape[ROWS[1]]) or heads % mesh.shape[HEADS])


def share(run: Callable, arguments: tuple, places: tuple, out: Any) -> Any:
    """Calls a function on each device's own part of arrays that `can_share`.

    Args:
      run: of arrays; what it returns for some rows and heads depends on these alone.
      arguments: trees of arrays; the first one's mesh is meant.
      places: a `jax.P`, or a tree of them, for each: how its axes lie on the mesh.
      out: the same of the result.
    """
    mesh = mesh_of(jax.tree.leaves(arguments)[0])
    if mesh.empty or _inside(mesh):
        return run(*arguments)
    return jax.shard_map(run, mesh=mesh, in_specs=places, out_specs=out, check_vma=False)(*arguments)


def _inside(mesh: Any) -> bool:
    return all(kind == AxisType.Manual for kind in mesh.axis_types)
