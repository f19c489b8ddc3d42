"""Token losses: float32 values, and the chunked head against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.objectives import losses


@dataclasses.dataclass(frozen=True)
class Head:
    """A scorer that is only a head."""

    table: jax.Array
    largest: list = dataclasses.field(default_factory=list, compare=False)

    def head(self, hidden):
        self.largest.append(hidden.shape[:-1])
        return jnp.einsum("...d,vd->...v", hidden, self.table)


def _example(T):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, T, 8))
    labels = jax.random.randint(keys[1], (2, T), 0, 11).at[:, ::3].set(losses.IGNORE)
    return hidden, labels, jax.random.normal(keys[2], (11, 8))


def test_token_nll_is_minus_log_softmax_and_zero_where_ignored():
    hidden, labels, table = _example(7)
    logits = np.asarray(Head(table).head(hidden), np.float64)
    want = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    got = losses.token_nll(jnp.asarray(logits, jnp.float32), labels)
    np.testing.assert_allclose(got, np.where(labels == losses.IGNORE, 0.0, want), rtol=1e-5)


def test_token_nll_of_bfloat16_logits_is_reduced_in_float32():
    logits = jnp.asarray([[2.0, 1.0, 0.0]], jnp.bfloat16)
    got = losses.token_nll(logits, jnp.asarray([0]))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [np.log(1 + np.exp(-1) + np.exp(-2))], rtol=1e-6)


@pytest.mark.parametrize("T, chunk", [(8, 4), (7, 3), (5, 1), (6, 6)])
def test_chunked_head_equals_the_plain_one_in_value_and_gradient(T, chunk):
    hidden, labels, table = _example(T)
    weight = jnp.arange(2 * T, dtype=jnp.float32).reshape(2, T)

    def total(chunk):
        f = lambda hidden, table: jnp.sum(weight * losses.head_nll(Head(table), hidden, labels, chunk))
        return jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, table)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), total(chunk), total(T))


def test_chunked_head_never_sees_more_than_a_chunk():
    hidden, labels, table = _example(8)
    head = Head(table)
    jax.grad(lambda h: jnp.sum(losses.head_nll(head, h, labels, 2)))(hidden)
    assert set(head.largest) == {(2, 2)}


def test_chunk_below_one_is_refused():
    hidden, labels, table = _example(4)
    with pytest.raises(ValueError, match="chunk = 0.*at least 1"):
        losses.head_nll(Head(table), hidden, labels, 0)
