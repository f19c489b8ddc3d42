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
    assert optimizer.decayed({"q_bias": 0, "q_proj": 0, "a_log": 0, "dt_bias": 0, "q_conv": 0}) == {
        "q_bias": False, "q_proj": True, "a_log": False, "dt_bias": False, "q_conv": True}


def test_updates_are_adamw_spelled_out():
    """With numbers that are nobody's default, so that none of them can be a constant."""
    rate, b1, b2, epsilon, decay, most = 0.1, 0.7, 0.8, 1e-2, 0.3, 2.0
    made = optimizer.make(config(
        learning_rate=rate, warmup_steps=2, steps=9, schedule="constant", beta1=b1, beta2=b2, epsilon=epsilon,
        weight_decay=decay, clip_norm=most))
    draw = np.random.default_rng(0)
    tree = {name: jnp.asarray(draw.standard_normal(3), jnp.float32) for name in ("q_proj", "q_norm", "q_bias")}
    state, mean, square = made.init(tree), dict.fromkeys(tree, 0.0), dict.fromkeys(tree, 0.0)
    for step in range(1, 5):
        slope = {name: (0.5 if step == 3 else 5) * draw.standard_normal(3) for name in tree}  # the third is not clipped
        length = np.sqrt(sum(np.sum(g**2) for g in slope.values()))
        assert (length < most) == (step == 3)
        update, state = made.update({name: jnp.asarray(g, jnp.float32) for name, g in slope.items()}, state, tree)
        for name, g in slope.items():
            g = g * min(1.0, most / length)
            mean[name], square[name] = b1 * mean[name] + (1 - b1) * g, b2 * square[name] + (1 - b2) * g**2
            adam = mean[name] / (1 - b1**step) / (np.sqrt(square[name] / (1 - b2**step)) + epsilon)
            want = -rate * min(step / 2, 1) * (adam + (decay * tree[name] if name == "q_proj" else 0))
            np.testing.assert_allclose(update[name], want, rtol=1e-4, err_msg=f"{name}, step {step}")


def test_gradients_are_clipped_by_their_global_norm():
    # Adam forgets the scale of gradients except through epsilon: a large one shows it
    made = optimizer.make(config(clip_norm=1.0, epsilon=1.0, weight_decay=0.0, warmup_steps=0, learning_rate=1.0))
    tree = {"a": jnp.asarray([0.0]), "b": jnp.asarray([0.0])}
    update, _ = made.update({"a": jnp.asarray([30.0]), "b": jnp.asarray([40.0])}, made.init(tree), tree)
    # clipped to (0.6, 0.8); the first Adam step is g / (|g| + epsilon)
    np.testing.assert_allclose([update["a"][0], update["b"][0]], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-5)
