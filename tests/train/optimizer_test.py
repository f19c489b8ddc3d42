"""Learning-rate schedule, clipping and decay."""

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.train import optimizer
from tests.train.toy import config, params


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_schedule_rises_from_the_first_step_and_then_follows_its_shape(schedule, warmup):
    rate = optimizer.schedule(config(steps=20, warmup_steps=warmup, learning_rate=1.0, schedule=schedule))
    got = [float(rate(step)) for step in range(20)]
    np.testing.assert_allclose(got[:warmup], [(i + 1) / warmup for i in range(warmup)], rtol=1e-6)
    after = np.arange(20 - warmup) / (20 - warmup)
    want = 0.5 * (1 + np.cos(np.pi * after)) if schedule == "cosine" else np.ones_like(after)
    np.testing.assert_allclose(got[warmup:], want, rtol=1e-5)


def test_decay_spares_norms_and_biases_and_nothing_else():
    spared = lambda tree, path=(): [
        item for name, value in tree.items() for item in (
            spared(value, (*path, name)) if isinstance(value, dict) else [] if value else ["/".join((*path, name))])]
    assert set(spared(optimizer.decayed(params()))) == {
        "final_norm", "layers/input_norm", "layers/post_attention_norm", "layers/attention/q_norm",
        "layers/attention/k_norm"}
    assert optimizer.decayed({"q_bias": 0, "q_proj": 0}) == {"q_bias": False, "q_proj": True}


def test_gradients_are_clipped_by_their_global_norm():
    # Adam forgets the scale of gradients except through epsilon: a large one shows it
    made = optimizer.make(config(clip_norm=1.0, epsilon=1.0, weight_decay=0.0, warmup_steps=0, learning_rate=1.0))
    tree = {"a": jnp.asarray([0.0]), "b": jnp.asarray([0.0])}
    update, _ = made.update({"a": jnp.asarray([30.0]), "b": jnp.asarray([40.0])}, made.init(tree), tree)
    # clipped to (0.6, 0.8); the first Adam step is g / (|g| + epsilon)
    np.testing.assert_allclose([update["a"][0], update["b"][0]], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-5)
