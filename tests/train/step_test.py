"""The training step: accumulation, frozen parameters, dtypes and compilations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.train import optimizer, sharding, step
from dlm_jax.train.config import MeshConfig
from tests.train import toy

ONE = sharding.make_mesh(MeshConfig(), jax.devices()[:1])


_step = functools.lru_cache(lambda config: step.make_step(toy.MODEL, config, ONE))


def _train(steps=1, params=None, **changes):
    config = toy.config(**changes)
    state = step.init_state(toy.MODEL, toy.params() if params is None else params, config, ONE)
    run = _step(config)
    for number in range(steps):
        state, metrics = run(state, jax.device_put(toy.Counting().batch(number), sharding.rows(ONE)))
    return state, metrics, run


@pytest.mark.parametrize("objective", [toy.AR, toy.REFUSION], ids=["autoregressive", "refusion"])
def test_accumulated_pieces_equal_the_whole_batch(objective):
    # rows differ in length, so a mean of piecewise means would be another number
    whole, piecewise = (_train(objective=objective, grad_accumulation=n) for n in (1, 4))
    for name in whole[1]:
        np.testing.assert_allclose(piecewise[1][name], whole[1][name], rtol=2e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), piecewise[0].trainable, whole[0].trainable)


def test_frozen_parameters_keep_every_bit_and_cost_no_optimiser_memory():
    params = toy.params()
    params["embed"] = params["embed"].astype(jnp.bfloat16)
    state, metrics, _ = _train(steps=2, params=params, trainable="q_proj|up_proj")
    assert state.frozen["embed"].dtype == jnp.bfloat16
    assert "q_proj" not in state.frozen["layers"]["attention"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.frozen):
        start = params
        for key in path:
            start = start[key.key]
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(start), err_msg=str(path))
    assert (state.trainable["layers"]["mlp"]["up_proj"] != params["layers"]["mlp"]["up_proj"]).any()
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert moments == 2 * sum(x.size for x in jax.tree.leaves(state.trainable))
    assert metrics["grad_norm"] > 0


def test_many_steps_share_one_compilation():
    run = step.make_step(toy.MODEL, toy.config(objective=toy.REFUSION), ONE)
    state = step.init_state(toy.MODEL, toy.params(), toy.config(objective=toy.REFUSION), ONE)
    batches, losses = [toy.Counting().batch(number) for number in range(3)], []
    for batch, rate in zip(batches, (0.005, 0.01, 0.01)):  # the rate of this step: warm-up takes two
        state, metrics = run(state, jax.device_put(batch, sharding.rows(ONE)))
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
        assert metrics["tokens"] == batch["length"].sum()
        assert (metrics["truncated_rows"], metrics["empty_rows"]) == (batch["truncated"].sum(), batch["empty"].sum())
    assert {b["truncated"].sum() for b in batches} != {b["empty"].sum() for b in batches} != {0}
    assert run.jitted._cache_size() == 1
    assert len(set(losses)) == 3


def test_a_step_is_the_gradient_of_the_loss_through_the_optimiser():
    config = toy.config(objective=toy.REFUSION)
    state, metrics, _ = _train(objective=toy.REFUSION)
    key, batch, params = jax.random.fold_in(jax.random.key(config.seed), 0), toy.Counting().batch(0), toy.params()
    loss = lambda params: config.objective.loss(toy.MODEL.scorer(params), jax.tree.map(jnp.asarray, batch), key)[0]
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    length = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], length, rtol=1e-5)
    assert length > config.clip_norm
    made = optimizer.make(config)
    updates, _ = jax.jit(made.update)(gradient, made.init(params), params)
    jax.tree.map(lambda new, old, update: np.testing.assert_allclose(new, old + update, atol=2e-6),
                 state.trainable, params, updates)


def test_bfloat16_computes_near_float32_and_trains_float32():
    full, half = (_train(compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(half[0].trainable))
    assert full[1]["loss"] != half[1]["loss"]
    np.testing.assert_allclose(half[1]["loss"], full[1]["loss"], rtol=2e-2)


def test_remat_changes_nothing():
    kept, recomputed = _train(), _train(remat=True)
    np.testing.assert_allclose(recomputed[1]["grad_norm"], kept[1]["grad_norm"], rtol=1e-5)


def test_the_given_parameters_outlive_training():
    params = toy.params()
    before = jax.tree.map(np.array, params)
    _train(params=params)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_the_corruption_follows_the_step_and_the_seed():
    run = _step(toy.config(objective=toy.REFUSION))
    batch = jax.device_put(toy.Counting().batch(0), sharding.rows(ONE))

    def first(seed=0, at=0):
        state = step.init_state(toy.MODEL, toy.params(), toy.config(objective=toy.REFUSION, seed=seed), ONE)
        # the same parameters and rows: only the draws can differ
        return float(run(dataclasses.replace(state, step=state.step + at), batch)[1]["loss"])

    assert first() == first()
    assert len({first(), first(at=1), first(at=2), first(seed=1)}) == 4
