"""The jitted training step: corrupt, score, differentiate, update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from dlm_jax.train import optimizer as optimizers
from dlm_jax.train import sharding
from dlm_jax.train.config import TrainConfig
from dlm_jax.train.state import TrainState, merge, split
from dlm_jax.types import Params

Step = Callable[[TrainState, dict[str, Array]], tuple[TrainState, dict[str, Array]]]


def init_state(model: Any, params: Params, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Places parameters on the mesh and makes a fresh optimiser state.

    Args:
      model: the module.
      params: nested dict of arrays; copied, so that they outlive donation. Trained ones become float32.
      config: the run.
      mesh: from `sharding.make_mesh`.

    Returns:
      The state before the first step.
    """
    optimizer = optimizers.make(config)
    shardings = sharding.state(model, optimizer, config, mesh)
    trainable, frozen = split(params, config)
    trainable = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
    trainable = jax.tree.map(_copy, trainable, shardings.trainable)
    return TrainState(
        step=_copy(np.zeros((), np.int32), shardings.step),
        key=_copy(np.asarray(jax.random.key_data(jax.random.key(config.seed))), shardings.key),
        trainable=trainable,
        frozen=jax.tree.map(_copy, frozen, shardings.frozen),
        opt_state=jax.jit(optimizer.init, out_shardings=shardings.opt_state)(trainable),
    )


def _copy(x: Any, where: NamedSharding) -> Array:
    """Returns a copy with another sharding; never the same buffers."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:  # else spread over processes, and moved by the copy
        x = jax.device_put(x, where)  # which may keep a buffer that already lies where it should, whatever it is told
    return jax.jit(jnp.copy, out_shardings=where)(x)


def abstract_state(model: Any, params: Params, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of what `init_state` makes, without making it.

    Args:
      model: the module.
      params: nested dict of arrays or of `jax.ShapeDtypeStruct`.
      config: the run.
      mesh: from `sharding.make_mesh`.
    """
    optimizer = optimizers.make(config)
    trainable, frozen = split(params, config)
    trainable = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), trainable)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    made = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32), key, trainable, frozen, jax.eval_shape(optimizer.init, trainable))
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        made, sharding.state(model, optimizer, config, mesh))


def make_step(model: Any, config: TrainConfig, mesh: Mesh) -> Step:
    """Returns the compiled training step.

    Args:
      model: the module; its computation dtype and remat are replaced by the configuration's.
      config: the run.
      mesh: from `sharding.make_mesh`.

    Returns:
      A function (state, batch) -> (state, metrics) that consumes the state it is given. Metrics are () arrays:
      `loss`, `grad_norm` (before clipping), `learning_rate`, `tokens` (valid ones of the batch), and the
      objective's own.

    Raises:
      ValueError: a model that the objective cannot train, sizes that the mesh does not divide, or a pattern that
        trains nothing.
    """
    sharding.check_batch(config, mesh)
    objective, optimizer, rate = config.objective, optimizers.make(config), optimizers.schedule(config)
    objective.check(model.scorer(None))
    model = model.clone(dtype=jnp.dtype(config.compute_dtype), remat=config.remat)
    shardings = sharding.state(model, optimizer, config, mesh)
    pieces = config.grad_accumulation

    def loss(trainable, frozen, rows):
        return objective.rows_loss(model.scorer(merge(trainable, frozen)), rows)

    def gradient(state, rows):
        one = jax.value_and_grad(loss, has_aux=True)
        if pieces == 1:
            return one(state.trainable, state.frozen, rows)
        # piece i takes every pieces-th row: each device then scores rows of its own in every piece
        split = lambda x: jnp.swapaxes(x.reshape(x.shape[0] // pieces, pieces, *x.shape[1:]), 0, 1)
        rows = jax.tree.map(split, rows)
        add = lambda total, piece: (
            jax.tree.map(jnp.add, total, one(state.trainable, state.frozen, piece)), None)
        first = jax.tree.map(lambda x: x[0], rows)
        zero = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, state.trainable, state.frozen, first))
        return jax.lax.scan(add, zero, rows)[0]

    def step(state, batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        # the whole batch is prepared at once: weights are normalised over all of it
        rows = objective.prepare(batch, key)
        (value, metrics), grads = gradient(state, rows)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        metrics = metrics | {
            "loss": value, "grad_norm": optax.global_norm(grads), "learning_rate": jnp.asarray(rate(state.step)),
            "tokens": jnp.sum(batch["length"])}
        metrics |= {f"{name}_rows": jnp.sum(batch[name]) for name in ("truncated", "empty") if name in batch}
        trainable = optax.apply_updates(state.trainable, updates)
        return TrainState(state.step + 1, state.key, trainable, state.frozen, opt_state), metrics

    compiled = jax.jit(
        step, in_shardings=(shardings, sharding.rows(mesh)), out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=0)

    def run(state, batch):
        with sharding.activate(mesh):
            return compiled(state, batch)

    run.jitted = compiled
    return run
