"""The masked objectives in the trainer: on one device, on eight in pieces, and refused before anything is written."""

import jax
import numpy as np
import pytest

from dlm_jax.models import build
from dlm_jax.objectives import BlockDiffusion, MaskedDiffusion
from dlm_jax.train import loop, sharding, step
from dlm_jax.train.config import MeshConfig
from tests.train import toy

MODEL = build.build(toy.MODEL.config.replace(family="a2d-qwen3"))
OBJECTIVES = [MaskedDiffusion(mask_id=23, eos_id=17, antithetic=True),
              BlockDiffusion(mask_id=23, eos_id=17, block_size=4)]


def _train(config, devices, steps=2):
    mesh = sharding.make_mesh(config.mesh, devices)
    state, run = step.init_state(MODEL, toy.params(), config, mesh), step.make_step(MODEL, config, mesh)
    losses = []
    for number in range(steps):
        state, metrics = run(state, jax.device_put(toy.Counting().batch(number), sharding.rows(mesh)))
        losses.append(metrics["loss"])
    return state.trainable, np.asarray(losses)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
def test_eight_devices_in_two_pieces_train_like_one(objective):
    one, alone = _train(toy.config(objective=objective), jax.devices()[:1])
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    config = toy.config(objective=objective, mesh=mesh, grad_accumulation=2)
    many, together = _train(config, jax.devices())
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), many, one)


@pytest.mark.parametrize("model, objective, message", [
    (toy.MODEL, OBJECTIVES[0], "needs a bidirectional model"),
    (build.build(MODEL.config.replace(logit_shift=1)), OBJECTIVES[1], "shifted by 1"),
    (MODEL, MaskedDiffusion(mask_id=23), "eos_id is None"),
])
def test_a_model_that_the_objective_cannot_train_is_refused_at_once(tmp_path, model, objective, message):
    with pytest.raises(ValueError, match=message):
        loop.fit(model, toy.params(), toy.Counting(), toy.config(objective=objective), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
