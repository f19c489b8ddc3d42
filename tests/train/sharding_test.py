"""Meshes, and the same training on 8 devices as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.train import sharding, step
from dlm_jax.train.config import MeshConfig
from tests.train import toy


@pytest.mark.parametrize("sizes, shape", [
    ({}, (8, 1, 1)), ({"data": 1, "fsdp": -1}, (1, 8, 1)), ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ({"tensor": 4}, (2, 1, 4))])
def test_axis_sizes(sizes, shape):
    mesh = sharding.make_mesh(MeshConfig(**sizes))
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == sharding.AXES


@pytest.mark.parametrize("sizes, count, message", [
    ({"data": 3}, 8, "needs 3 devices but there are 8"), ({"fsdp": 3}, 8, "multiple of 3 devices but there are 8"),
    ({"data": 2}, 1, "needs 2 devices but there are 1")])
def test_sizes_that_do_not_multiply_to_the_devices_are_refused(sizes, count, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(MeshConfig(**sizes), jax.devices()[:count])


def test_heads_that_do_not_divide_are_refused_before_any_compile():
    mesh = MeshConfig(tensor=4)
    with pytest.raises(ValueError, match="k_proj: kv_heads = 2 cannot be split over mesh.tensor = 4.*divisor of 2"):
        step.make_step(toy.MODEL, toy.config(mesh=mesh), sharding.make_mesh(mesh))


def test_a_batch_that_does_not_divide_is_refused():
    mesh = sharding.make_mesh(MeshConfig())
    with pytest.raises(ValueError, match="= 4 rows cannot be split over data x fsdp = 8"):
        step.make_step(toy.MODEL, toy.config(grad_accumulation=2), mesh)


def _train(config, devices, steps=3):
    mesh = sharding.make_mesh(config.mesh, devices)
    state = step.init_state(toy.MODEL, toy.params(), config, mesh)
    run, losses = step.make_step(toy.MODEL, config, mesh), []
    for number in range(steps):
        state, metrics = run(state, jax.device_put(toy.Counting().batch(number), sharding.rows(mesh)))
        losses.append(metrics["loss"])
    return state, np.asarray(losses)


@pytest.mark.parametrize("objective, sizes", [
    (toy.AR, MeshConfig(data=8)), (toy.REFUSION, MeshConfig(data=2, fsdp=2, tensor=2))], ids=["data", "all axes"])
def test_eight_devices_train_like_one(objective, sizes):
    one_state, one = _train(toy.config(objective=objective), jax.devices()[:1])
    state, many = _train(toy.config(objective=objective, mesh=sizes), jax.devices())
    np.testing.assert_allclose(many, one, atol=1e-5, rtol=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.trainable, one_state.trainable)


def test_the_given_parameters_outlive_training_on_eight_devices():
    config, params = toy.config(mesh=MeshConfig(data=2, fsdp=2, tensor=2)), toy.params()
    mesh, before = sharding.make_mesh(config.mesh), jax.tree.map(np.array, params)
    state = step.init_state(toy.MODEL, params, config, mesh)
    step.make_step(toy.MODEL, config, mesh)(state, jax.device_put(toy.Counting().batch(0), sharding.rows(mesh)))
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_parameters_and_moments_are_split_as_the_rules_say():
    config = toy.config(mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    state = step.init_state(toy.MODEL, toy.params(), config, sharding.make_mesh(config.mesh))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 4]
    for x in (state.trainable["layers"]["attention"]["q_proj"], *[m for m in moments if m.shape == (2, 16, 4, 8)]):
        assert x.addressable_shards[0].data.shape == (2, 8, 2, 8)  # layers, embed / fsdp, heads / tensor, head dim
    assert len(moments) == 8
    assert state.trainable["embed"].addressable_shards[0].data.shape == (12, 8)


def test_activations_keep_their_rows_on_the_devices_that_own_them():
    mesh = sharding.make_mesh(MeshConfig(data=4, fsdp=2))
    shardings, params, seen = (sharding.params(toy.MODEL, mesh), sharding.rows(mesh)), toy.params(), []

    def total(params, tokens):
        out = toy.MODEL.scorer(params)(tokens)
        jax.debug.inspect_array_sharding(out, callback=seen.append)
        return jnp.sum(out)

    with sharding.activate(mesh):
        jax.jit(total, in_shardings=shardings)(params, np.zeros((8, 4), np.int32))
    assert seen[0].shard_shape((8, 4, 24))[0] == 1
