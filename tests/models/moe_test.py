"""Experts: sorted and multiplied together, each token gets what its own experts make of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import experts
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig

TOKENS, WIDTH, EXPERTS, ACTIVE, INNER = 7, 6, 5, 2, 4


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def one_by_one(x, weights, chosen, gate, up, down):
    """Every token and every expert by itself."""
    def token(x, weights, chosen):
        each = lambda e: (jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e]
        return sum(weights[i] * each(chosen[i]) for i in range(chosen.shape[0]))
    return jax.vmap(token)(x, weights, chosen)


@pytest.fixture(scope="module")
def weights():
    return (draw(EXPERTS, WIDTH, INNER, seed=1), draw(EXPERTS, WIDTH, INNER, seed=2),
            draw(EXPERTS, INNER, WIDTH, seed=3))


@pytest.mark.parametrize("crowded", [False, True])
def test_values_and_gradients_are_those_of_tokens_one_by_one(weights, crowded):
    """Crowded: all tokens want the same two experts, and get them."""
    logits = draw(TOKENS, EXPERTS, seed=4) + (jnp.array([0, 50, 0, 49, 0]) if crowded else 0)
    x, push = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH, seed=5)

    def total(function, logits, x, *weights):
        return jnp.sum(push * function(x, *experts.route(jax.nn.softmax(logits), ACTIVE, True), *weights))

    for got, want in zip(*(jax.jit(jax.value_and_grad(lambda *a, f=f: total(f, *a), argnums=range(5)))(
            logits, x, *weights) for f in (experts.mixture, one_by_one))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), got, want)


def test_rows_do_not_see_each_other(weights):
    run = jax.jit(lambda x, logits: experts.mixture(x, *experts.route(jax.nn.softmax(logits), ACTIVE, True), *weights))
    x, logits = draw(TOKENS, WIDTH), draw(TOKENS, EXPERTS, seed=4)
    others = jnp.arange(TOKENS)[:, None] != 3
    there = run(jnp.where(others, 9 * draw(TOKENS, WIDTH, seed=6), x),
                jnp.where(others, draw(TOKENS, EXPERTS, seed=7), logits))
    np.testing.assert_allclose(run(x, logits)[3], there[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_are_of_all_experts_or_of_the_chosen(normalise):
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.25, 0.05]], jnp.bfloat16))
    weights, chosen = experts.route(jax.nn.softmax(logits.astype(jnp.float32)), 2, normalise)
    assert chosen.tolist() == [[1, 3]] and weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, [[0.4 / 0.65, 0.25 / 0.65] if normalise else [0.4, 0.25]], rtol=1e-2)


def choose_by_hand(scores, active, normalise, bias, weigh_bias, groups, active_groups, scale):
    """One token's experts and weights."""
    judged = scores + bias
    size = len(scores) // groups
    worth = [sum(sorted(judged[g * size: (g + 1) * size])[-2:]) for g in range(groups)]
    kept = {*sorted(range(groups), key=lambda g: -worth[g])[:active_groups]}
    ranked = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -judged[e])[:active]
    weights = np.array([(judged if weigh_bias else scores)[e] for e in ranked])
    return ranked, scale * (weights / weights.sum() if normalise else weights)


@pytest.mark.parametrize("active, normalise, biased, weigh_bias, groups, active_groups, scale", [
    (3, True, True, False, 4, 2, 2.5), (2, True, True, False, 2, 1, 1.5), (3, False, True, True, 1, 1, 1.0),
    (1, False, True, False, 6, 3, 1.0), (4, True, False, False, 1, 1, 1.0), (6, True, True, False, 3, 3, 0.5)])
def test_choices_are_those_made_by_hand(active, normalise, biased, weigh_bias, groups, active_groups, scale):
    scores = np.asarray(jax.nn.sigmoid(draw(9, 12, seed=8)), np.float64)
    bias = 0.3 * np.asarray(draw(12, seed=9), np.float64) if biased else None
    weights, chosen = experts.route(
        jnp.asarray(scores, jnp.float32), active, normalise, bias if bias is None else jnp.asarray(bias, jnp.float32),
        weigh_bias=weigh_bias, groups=groups, active_groups=active_groups, scale=scale)
    for row in range(9):
        want = choose_by_hand(scores[row], active, normalise, 0 if bias is None else bias, weigh_bias, groups,
                              active_groups, scale)
        assert chosen[row].tolist() == want[0]
        np.testing.assert_allclose(weights[row], want[1], rtol=1e-5)


@pytest.mark.parametrize("tokens", [16, 4, 3])
def test_devices_that_share_experts_make_what_one_makes(tokens):
    """Many tokens stay where they are, few travel; three are rows of no mesh."""
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    D, X, F, A = 8, 4, 4, 2
    x, push = draw(tokens, D), draw(tokens, D, seed=5)
    arguments = (draw(tokens, X, seed=4), x, draw(X, D, F, seed=1), draw(X, D, F, seed=2), draw(X, F, D, seed=3))

    def total(logits, x, *weights):
        return jnp.sum(push * experts.mixture(x, *experts.route(jax.nn.softmax(logits), A, True), *weights))

    run = lambda: jax.jit(jax.value_and_grad(total, argnums=range(5)))
    want = run()(*arguments)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    P = jax.P
    spread = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(arguments, (
        P(), P(), *(P("tensor", "fsdp"),) * 2, P("tensor", None, "fsdp")), strict=True)]
    with sharding.activate(mesh):
        program = run().lower(*spread).compile()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), program(*spread), want)
