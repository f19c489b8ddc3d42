"""The programs that are compiled: a training step of an experiment, a round of a decoder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import math
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import configs
from dlm_jax import text
from dlm_jax.decode import executables, parts
from dlm_jax.decode.request import Request
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.train import sharding, step
from dlm_jax.train.config import MeshConfig
from launch import decoders
from launch.compile import work
from pallas_kernels import use_backend

DOCUMENTS = 4  # of a packed row


@dataclasses.dataclass
class Job:
    """What is compiled, and what it needs at least; all sizes are a chip's.

    Attributes:
      title: one line.
      jitted, arguments: what is compiled for which shapes and shardings.
      mesh: whose axes the names of activations mean; None where they have none.
      flops: of the step.
      moved: bytes between memory and chip in a step, where everything that is read or written is so once.
      looped: whether the step is the body of a loop whose length is data.
      facts: more that is known of it, by name.
      rules: of visibility of its forwards, of one row each.
    """

    title: str
    jitted: Any
    arguments: tuple
    mesh: Mesh | None
    flops: float
    moved: float
    looped: bool
    facts: dict[str, Any]
    rules: tuple = ()

    def trace(self) -> Any:
        """Returns the traced function."""
        with contextlib.nullcontext() if self.mesh is None else sharding.activate(self.mesh):
            return self.jitted.trace(*self.arguments)


def held(tree: Any) -> int:
    """Returns the bytes a chip holds of a tree of shapes with shardings."""
    local = lambda x: math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape)
    return sum(local(x) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def models() -> dict[str, TransformerConfig]:
    """Returns the shapes that `configs` names, as "file:name"."""
    found = {}
    for file in pkgutil.iter_modules(configs.__path__):
        module = importlib.import_module(f"configs.{file.name}")
        experiments = {name: experiment.model for name, experiment in getattr(module, "EXPERIMENTS", {}).items()}
        shapes = {**experiments, **getattr(module, "MODELS", {})}
        found |= {f"{file.name}:{name}": shape for name, shape in shapes.items() if shape is not None}
    return found


def shape_of(name: str, dual: bool | None = None) -> TransformerConfig:
    """Returns a shape by its name, "file:name" or the name alone where that is clear.

    Args:
      name: of `models`.
      dual: whether it must have a second view; None for either.

    Raises:
      ValueError: no such shape, or several, with those there are.
    """
    known = {full: shape for full, shape in models().items() if dual is None or shape.dual == dual}
    meant = [full for full in known if name in (full, full.partition(":")[2])]
    if not meant or any(known[full] != known[meant[0]] for full in meant):
        problem = f"stands in several files: {', '.join(meant)}" if meant else (
            f"is not known{text.close_to(name, known)}; accepted: {', '.join(known)}")
        raise ValueError(f"--model {name} {problem}")
    return known[meant[0]]


def make_mesh(axes: str | None, devices: list[Any], shape: TransformerConfig, default: MeshConfig) -> Mesh:
    """Returns the mesh of "fsdp=16,tensor=4", or the default.

    Raises:
      ValueError: a mesh that does not fit the devices or the model, with some that do.
    """
    try:
        config = default if axes is None else text.override(MeshConfig(data=1), axes.split(","), flag="--mesh")
        mesh = sharding.make_mesh(config, devices)
        sharding.params(build.build(shape), mesh)
        return mesh
    except ValueError as problem:
        tensors = [size for size in range(1, shape.num_kv_heads + 1)
                   if shape.num_kv_heads % size == 0 and len(devices) % size == 0]
        fitting = ", or ".join(f"fsdp={len(devices) // size},tensor={size}" for size in tensors)
        raise ValueError(f"{problem}; on {len(devices)} devices for example --mesh {fitting}") from None


def sample(rows: int, length: int, pack: bool, unit: int) -> dict[str, np.ndarray]:
    """Returns a batch of full rows: a quarter prompt, the rest response, packed into several documents or one."""
    each = length // DOCUMENTS // unit * unit if pack else length
    count = DOCUMENTS if pack else 1
    index = np.arange(length)
    document = np.minimum(index // each, count - 1)
    place = index - document * each
    batch = {"tokens": np.zeros((rows, length), np.int32),
             "loss_mask": np.broadcast_to(place >= each // 4, (rows, length)).copy()}
    of_documents = lambda values: np.broadcast_to(np.int32(values), (rows, count)).copy()
    numbers = {"prompt_length": [each // 4] * count, "example_id": range(count),
               "length": [*[each] * (count - 1), length - (count - 1) * each]}
    if not pack:
        return batch | {name: of_documents(list(value))[:, 0] for name, value in numbers.items()}
    batch |= {name: np.broadcast_to(np.int32(value), (rows, length)).copy()
              for name, value in (("documents", document), ("positions", place))}
    numbers["start"] = range(0, count * each, each)
    return batch | {name: of_documents(list(value)) for name, value in numbers.items()}


def training(options: argparse.Namespace, devices: list[Any]) -> Job:
    """Returns a training step of an experiment.

    Args:
      options: the command line.
      devices: of the slice.

    Raises:
      ValueError: names, sizes or a mesh that do not fit.
    """
    experiment = configs.load(options.config, options.settings)
    shape = experiment.model or shape_of(options.model or options.config)
    shape = shape.replace(num_layers=options.layers or shape.num_layers)
    objective = experiment.train.objective
    ids = {name: shape.vocab_size - 1 for name in objective.ids if getattr(objective, name) is None}
    length, config = options.length or experiment.length, experiment.train
    mesh = make_mesh(options.mesh, devices, shape, config.mesh)
    config = dataclasses.replace(config, objective=dataclasses.replace(objective, **ids),
                                 batch_size=options.batch or config.batch_size,
                                 mesh=MeshConfig(**dict(mesh.shape)))
    model = build.build(shape)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), build.abstract_params(model))
    state = step.abstract_state(model, params, config, mesh)
    one = sample(1, length, experiment.pack, objective.unit)
    batch = {name: jax.ShapeDtypeStruct((config.batch_size, *x.shape[1:]), x.dtype, sharding=sharding.rows(mesh))
             for name, x in one.items()}
    rows = config.batch_size / len(devices)
    return Job(
        title=f"training step of {options.config}, {objective.name}: {shape.num_layers} layers, {config.batch_size} "
              f"{'packed ' if experiment.pack else ''}rows of {length} tokens",
        jitted=step.make_step(model, config, mesh).jitted, arguments=(state, batch), mesh=mesh,
        flops=rows * work.training(shape, config.objective, one), moved=2.0 * held(state), looped=False,
        facts={"mesh": dict(mesh.shape), "parameters": sum(x.size for x in jax.tree.leaves(params)),
               "trained": sum(x.size for x in jax.tree.leaves(state.trainable)), "rows_a_chip": rows},
        rules=tuple(rule for _, _, rule in work.forwards(shape, config.objective, one)))


def _whole(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree of shapes, each of which every device holds whole."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)), tree)


def decoding_arguments(model: Any, mesh: Mesh, decoder: Any, batch: int, prompt: int, answer: int) -> tuple:
    """Returns bfloat16 parameters, decoder and request as shapes, what `executables.init` takes.

    Args:
      model: the module.
      mesh: of the devices.
      decoder: a `decode.Decoder`.
      batch, prompt, answer: rows, and the tokens of each.
    """
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=s),
                          build.abstract_params(model), sharding.params(model, mesh))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    request = Request(array(batch, prompt), array(batch), array(batch), array(), array(), keys, answer)
    chosen = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, parts.traced(decoder)))
    return params, *_whole((chosen, request), mesh)


def decoding(options: argparse.Namespace, devices: list[Any]) -> Job:
    """Returns the loop of a decoder whose rounds are the steps; on several devices it compiles the prefill first.

    Args:
      options: the command line.
      devices: of the slice.

    Raises:
      ValueError: names, sizes or a mesh that do not fit.
    """
    decoder = decoders.make(options.decode, options.settings).decoder
    if decoder.needs.guide:
        raise ValueError("--decode guided: a second model judges there; compile --decode masked, or the guide's own "
                         "--decode autoregressive")
    shape = shape_of(options.model, decoder.needs.dual)
    shape = shape.replace(num_layers=options.layers or shape.num_layers)
    decoder.check_model(shape)
    decoder = decoder.fitted(shape)
    tensor = math.gcd(len(devices), shape.num_kv_heads)
    spare = {"fsdp" if shape.moe else "data": len(devices) // tensor}  # experts are too many to be held twice
    mesh = make_mesh(options.mesh, devices, shape, MeshConfig(**{"data": 1, "fsdp": 1, **spare}, tensor=tensor))
    model = dataclasses.replace(build.build(shape), scan=not options.unroll)
    B, entries, answer = options.batch or 8, options.cache or 4096, options.answer or 512
    if answer >= entries:
        raise ValueError(f"--cache {entries}: the entries of prompt and answer, so more than --answer {answer}")
    arguments = decoding_arguments(model, mesh, decoder, B, entries - answer, answer)
    begin, params = executables.jitted(executables.init, model), arguments[0]
    if len(devices) == 1 or options.kernels:  # of kernels alone it does not matter where the state lies
        state = _whole(jax.eval_shape(begin, *arguments), mesh)
    else:
        # only where its state lies is asked: plain forms compile sooner
        with use_backend("xla"):
            lowered = begin.lower(*arguments)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                             lowered.out_info, lowered.compile().output_shardings)
    one_step = jax.make_jaxpr(lambda *given: executables.step(model, *given))(*arguments, state)
    cache, looked_up = jax.tree.leaves(state.cache), 0 if shape.tie_word_embeddings else held(params["embed"])
    most = _whole(jax.ShapeDtypeStruct((), jnp.int32), mesh)
    return Job(
        title=f"round of {options.decode} decoding, {options.model}: {shape.num_layers} layers"
              f"{' unrolled' if options.unroll else ''}, {B} rows, {entries} cache entries",
        jitted=executables.jitted(executables.loop, model), arguments=(*arguments, state, most), mesh=None,
        flops=work.products(one_step) / len(devices), moved=float(held((params, state.cache)) - looked_up), looped=True,
        facts={"mesh": dict(mesh.shape), "parameters": sum(x.size for x in jax.tree.leaves(params)),
               "cache_bytes": held(state.cache), "cache_row_bytes": sum(x.size * x.dtype.itemsize for x in cache) / B,
               "cache_spec": str(cache[0].sharding.spec) if cache else None})  # some decoders keep nothing
