"""The delta rule of passes over a state, short and long, beside a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import gated_delta
from dlm_jax.nn.gated_delta import CHUNK
from pallas_kernels import Stream

B, J, H, E, F = 3, 2, 4, 6, 5


def drawn(tokens):
    """A pass and the state before it."""
    keys = iter(jax.random.split(jax.random.key(tokens), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = Stream(unit(normal(B, tokens, J, E)), unit(normal(B, tokens, J, E)), normal(B, tokens, H, F),
               -0.2 * jnp.abs(normal(B, tokens, H)), jax.nn.sigmoid(normal(B, tokens, H)))
    return x, normal(B, H, E, F)


def plain(state, x, advance, block):
    """Returns what tokens read, 0 at padding, and the state after those that go on."""
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in x)
    out, after = np.zeros(v.shape), np.array(state, np.float64)
    for b, h in np.ndindex(B, H):
        s, head = np.array(state[b, h], np.float64), h // (H // J)
        for t in range(advance[b] + block[b]):
            s = np.exp(g[b, t, h]) * s
            s = s + np.outer(k[b, t, head], beta[b, t, h] * (v[b, t, h] - k[b, t, head] @ s))
            if t < advance[b]:
                out[b, t, h], after[b, h] = q[b, t, head] @ s, s
        for t in range(advance[b], advance[b] + block[b]):
            out[b, t, h] = q[b, t, head] @ s
    return E**-0.5 * out, after


@pytest.mark.parametrize("tokens, advance, block", [
    (7, (5, 0, 3), (2, 4, 0)),
    (CHUNK + 6, (CHUNK, CHUNK - 3, 2), (6, 5, CHUNK)),  # a block behind a chunk's end, across it, and over most of one
    (2 * CHUNK + 1, (2 * CHUNK + 1, CHUNK + 1, 0), (0, 3, 2 * CHUNK))])
def test_passes_of_any_length_are_a_loop_over_tokens(tokens, advance, block):
    x, state = drawn(tokens)
    advance, block = (jnp.asarray(count, jnp.int32) for count in (advance, block))
    want, after = plain(state, x, advance, block)
    live = np.arange(tokens) < (advance + block)[:, None]
    out, end = jax.jit(gated_delta.read_long)(state, x, advance, block)
    np.testing.assert_allclose(np.where(live[..., None, None], out, 0), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(end, after, rtol=1e-4, atol=1e-5)
    out, writes = jax.jit(gated_delta.read)(state, x, advance, block)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gated_delta.write(state, writes, advance), after, rtol=1e-4, atol=1e-5)


def test_nothing_written_leaves_the_state_bit_for_bit():
    x, state = drawn(5)
    _, writes = gated_delta.read(state, x, jnp.zeros(B, jnp.int32), jnp.full(B, 5))
    np.testing.assert_array_equal(gated_delta.write(state, writes, jnp.zeros(B, jnp.int32)), state)
