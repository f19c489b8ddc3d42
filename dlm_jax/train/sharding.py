"""Where arrays live: a mesh of the devices there are, and logical axis names mapped onto it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax
from flax import traverse_util
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dlm_jax.models import build
from dlm_jax.train.config import MeshConfig, TrainConfig
from dlm_jax.train.state import TrainState, split
from dlm_jax.types import ROWS, Params

AXES = ("data", "fsdp", "tensor")
RULES = (
    ("batch", ROWS),
    ("length", None),
    ("layers", None),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("experts", "tensor"),
    ("mlp", "tensor"),
)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arranges devices in the axes data, fsdp and tensor.

    Args:
      config: axis sizes; -1 takes the devices left over.
      devices: default all of the job.

    Returns:
      A mesh whose axes are all automatic.

    Raises:
      ValueError: sizes that do not multiply to the number of devices, or replicas that slices do not divide.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = 1
    for size in sizes.values():
        fixed *= size if size != -1 else 1
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    if open_axis is not None and len(devices) % fixed == 0:
        sizes[open_axis] = len(devices) // fixed
    elif open_axis is not None or fixed != len(devices):
        raise ValueError(
            f"mesh {sizes} needs {'a multiple of ' if open_axis else ''}{fixed} devices but there are {len(devices)}; "
            "pick sizes whose product is the number of devices, or -1 for one of them")
    shape = tuple(sizes.values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        # splitting a physical axis lets 16 x 4 lie on a 4 x 4 x 4 torus
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    elif sizes["data"] % slices:
        raise ValueError(f"mesh.data = {sizes['data']} cannot be split over {slices} slices; pick a multiple of "
                         f"{slices}: only replicas should talk over the network between slices")
    else:
        placed = mesh_utils.create_hybrid_device_mesh(
            (shape[0] // slices, *shape[1:]), (slices, 1, 1), devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def params(model: Any, mesh: Mesh) -> Params:
    """Returns the `NamedSharding` of every parameter.

    Args:
      model: the module.
      mesh: from `make_mesh`.

    Raises:
      ValueError: a parameter axis (heads, vocabulary...) that its mesh axis does not divide.
    """
    axes = traverse_util.flatten_dict(build.logical_axes(model), sep="/")
    shapes = traverse_util.flatten_dict(build.abstract_params(model), sep="/")
    shardings = {}
    for path, names in axes.items():
        spec = nn.logical_to_mesh_axes(names, RULES)
        for name, size, axis in zip(names, shapes[path].shape, spec):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{path}: {name} = {size} cannot be split over mesh.{axis} = {mesh.shape[axis]}; "
                    f"pick a divisor of {size}")
        shardings[path] = NamedSharding(mesh, spec)
    return traverse_util.unflatten_dict(shardings, sep="/")


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that lead with the batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ValueError where a piece of the batch cannot be split over the devices that see different rows."""
    piece = config.batch_size // config.grad_accumulation
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if piece % ways:
        raise ValueError(
            f"batch_size / grad_accumulation = {piece} rows cannot be split over data x fsdp = {ways} devices; "
            f"pick a multiple of {ways}")


def state(model: Any, optimizer: optax.GradientTransformation, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns the shardings of a `TrainState`; optimiser moments lie with the parameter they belong to.

    Args:
      model: the module.
      optimizer: from `optimizer.make`.
      config: which parameters are trained.
      mesh: from `make_mesh`.
    """
    trainable, frozen = split(params(model, mesh), config)
    shapes, _ = split(build.abstract_params(model), config)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, jax.eval_shape(optimizer.init, shapes), trainable,
        transform_non_params=lambda _: replicated(mesh))
    return TrainState(replicated(mesh), replicated(mesh), trainable, frozen, opt_state)


@contextlib.contextmanager
def activate(mesh: Mesh) -> Iterator[None]:
    """Makes the logical names of activations mean axes of `mesh` while a function is traced."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield
