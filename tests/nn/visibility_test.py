"""The visibility rule and its constructors, against loops that spell out who sees whom."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import visibility as vis

SEEDS = range(4)


def loop(batch, queries, keys, sees):
    return np.array([[[bool(sees(b, i, j)) for j in range(keys)] for i in range(queries)] for b in range(batch)])


def padding(draw, batch, length):
    """A validity mask with padding on either side and in the middle."""
    valid = draw.random((batch, length)) < 0.8
    valid[0] = True
    return valid


@pytest.mark.parametrize("seed", SEEDS)
def test_dense_is_the_rule(seed):
    draw = np.random.default_rng(seed)
    B, T, S = 2, 7, 9
    q = {n: draw.integers(lo, 6, (B, T)) for n, lo in
         {"floor_q": 0, "limit_q": -1, "group_q": -1, "order_q": -1}.items()}
    k = {n: draw.integers(-1, 6, (B, S)) for n in ("rank_k", "group_k", "order_k")}
    rule = vis.Visibility(**{n: jnp.asarray(x, jnp.int32) for n, x in (q | k).items()})

    def sees(b, i, j):
        in_range = q["floor_q"][b, i] <= k["rank_k"][b, j] <= q["limit_q"][b, i]
        in_group = q["group_q"][b, i] == k["group_k"][b, j] >= 0 and k["order_k"][b, j] <= q["order_q"][b, i]
        return in_range or in_group

    expected = loop(B, T, S, sees)
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(rule.dense(), expected)
    assert (rule.query_length, rule.key_length) == (T, S)
    np.testing.assert_array_equal(rule.queries(2, 3).dense(), expected[:, 2:5])
    index = draw.integers(0, T, (B, 4))
    np.testing.assert_array_equal(rule.take(jnp.asarray(index)).dense(), expected[np.arange(B)[:, None], index])


def test_take_of_one_rule_for_every_row():
    index = np.array([[2, 0], [1, 1], [0, 2]])
    got = vis.causal(jnp.ones((1, 3), bool)).take(jnp.asarray(index)).dense()
    np.testing.assert_array_equal(got, np.arange(3) <= index[:, :, None])


@pytest.mark.parametrize("seed", SEEDS)
def test_causal_and_bidirectional(seed):
    valid = padding(np.random.default_rng(seed), 3, 8)
    np.testing.assert_array_equal(vis.causal(jnp.asarray(valid)).dense(),
                                  loop(3, 8, 8, lambda b, i, j: valid[b, j] and j <= i))
    np.testing.assert_array_equal(vis.bidirectional(jnp.asarray(valid)).dense(),
                                  loop(3, 8, 8, lambda b, i, j: valid[b, j]))


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_by_block_are_causal_by_blocks(seed):
    draw = np.random.default_rng(seed)
    block = np.sort(draw.integers(0, 4, (3, 12)), axis=1)
    block[2, 10:] = -1
    number = jnp.asarray(block, jnp.int32)
    got = vis.by_rank(jnp.zeros_like(number), number, number).dense()
    np.testing.assert_array_equal(got, loop(3, 12, 12, lambda b, i, j: block[b, j] >= 0 and block[b, j] <= block[b, i]))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_stream(seed):
    draw = np.random.default_rng(seed)
    T = 9
    block = np.sort(draw.integers(0, 4, (3, T)), axis=1)
    block[2, 7:] = -1
    block[1, :2] = -1  # left padding too

    def sees(b, i, j):
        mine, other = block[b, i % T], block[b, j % T]
        if mine < 0 or other < 0:
            return False
        if j >= T:
            return i >= T and mine == other
        return other <= mine if i < T else other < mine

    np.testing.assert_array_equal(vis.two_stream(jnp.asarray(block, jnp.int32)).dense(),
                                  loop(3, 2 * T, 2 * T, sees))


@pytest.mark.parametrize("seed", SEEDS)
def test_orthrus_dual(seed):
    draw = np.random.default_rng(seed)
    B, S, J, K = 3, 9, 3, 4
    valid = padding(draw, B, S)
    limit = draw.integers(-1, S, (B, J * K))

    def sees(b, i, j):
        return valid[b, j] and j <= limit[b, i] if j < S else (j - S) // K == i // K

    rule = vis.orthrus_dual(jnp.asarray(valid), jnp.asarray(limit, jnp.int32), K)
    np.testing.assert_array_equal(rule.dense(), loop(B, J * K, S + J * K, sees))


def test_padding_matches_nothing_even_through_groups():
    rule = vis.bidirectional(jnp.array([[True, True, False]]))
    grouped = dataclasses.replace(rule, group_q=jnp.array([[-1, 0, -1]]), group_k=jnp.array([[-1, 0, -1]]),
                                  order_q=jnp.zeros((1, 3), jnp.int32), order_k=jnp.zeros((1, 3), jnp.int32))
    np.testing.assert_array_equal(grouped.dense()[0, :, 2], False)
