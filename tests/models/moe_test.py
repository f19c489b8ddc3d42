"""Experts: sorted and multiplied together, each token gets what its own experts make of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import experts

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
        return jnp.sum(push * function(x, *experts.route(logits, ACTIVE, True), *weights))

    for got, want in zip(*(jax.jit(jax.value_and_grad(lambda *a, f=f: total(f, *a), argnums=range(5)))(
            logits, x, *weights) for f in (experts.mixture, one_by_one))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), got, want)


def test_rows_do_not_see_each_other(weights):
    run = jax.jit(lambda x, logits: experts.mixture(x, *experts.route(logits, ACTIVE, True), *weights))
    x, logits = draw(TOKENS, WIDTH), draw(TOKENS, EXPERTS, seed=4)
    others = jnp.arange(TOKENS)[:, None] != 3
    there = run(jnp.where(others, 9 * draw(TOKENS, WIDTH, seed=6), x),
                jnp.where(others, draw(TOKENS, EXPERTS, seed=7), logits))
    np.testing.assert_allclose(run(x, logits)[3], there[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_are_of_all_experts_or_of_the_chosen(normalise):
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.25, 0.05]], jnp.bfloat16))
    weights, chosen = experts.route(logits, 2, normalise)
    assert chosen.tolist() == [[1, 3]] and weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, [[0.4 / 0.65, 0.25 / 0.65] if normalise else [0.4, 0.25]], rtol=1e-2)
