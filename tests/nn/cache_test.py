"""The cache against a list of lists, whatever the order of writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.nn import cache as kv
from dlm_jax.scoring import Cache

L, B, S, K, H = 3, 2, 9, 2, 4


def tokens(draw, count):
    return tuple(draw.standard_normal((B, count, K, H)).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("seed", range(3))
def test_write_in_any_order_equals_assignment(seed):
    draw = np.random.default_rng(seed)
    cache, expected = kv.init(L, B, S, K, H), np.zeros((2, L, B, K, S, H), np.float32)
    write = jax.jit(kv.write)
    for _ in range(4):
        layer, count = int(draw.integers(L)), 5
        # entries beyond S are discarded; several of a row may share such an entry
        slots = np.stack([draw.permutation(S + 2)[:count] for _ in range(B)])
        slots[slots == S + 1] = S
        keys, values = tokens(draw, count)
        cache = write(cache, layer, jnp.asarray(slots), keys, values)
        for b in range(B):
            for t, slot in enumerate(slots[b]):
                if slot < S:
                    expected[:, layer, b, :, slot] = keys[b, t], values[b, t]
    np.testing.assert_array_equal(cache.keys, expected[0])
    np.testing.assert_array_equal(cache.values, expected[1])


def test_write_with_everything_discarded_changes_nothing():
    draw = np.random.default_rng(0)
    cache = kv.write(kv.init(L, B, S, K, H), 0, jnp.arange(S)[None].repeat(B, 0), *tokens(draw, S))
    after = kv.write(cache, 0, jnp.full((B, 4), S), *tokens(draw, 4))
    np.testing.assert_array_equal(after.keys, cache.keys)
    np.testing.assert_array_equal(after.values, cache.values)


def test_write_stores_in_the_cache_dtype():
    cache = kv.write(kv.init(L, B, S, K, H, jnp.bfloat16), 1, jnp.zeros((B, 1), jnp.int32),
                     *tokens(np.random.default_rng(0), 1))
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    assert bool(jnp.any(cache.keys[1, :, :, 0] != 0))


def test_gather_rows_repeats_and_reorders():
    cache = kv.KVCache(*(jnp.arange(L * B * S * K * H, dtype=jnp.float32).reshape(L, B, K, S, H) + i for i in (0, 1)))
    taken = cache.take(jnp.array([1, 1, 0]))
    for field in ("keys", "values"):
        np.testing.assert_array_equal(getattr(taken, field), np.asarray(getattr(cache, field))[:, [1, 1, 0]])


def test_grow_keeps_entries_and_adds_empty_ones():
    cache = kv.write(kv.init(L, B, S, K, H), 2, jnp.arange(S)[None].repeat(B, 0), *tokens(np.random.default_rng(0), S))
    grown = cache.grow(S + 3)
    assert (cache.capacity, grown.capacity) == (S, S + 3)
    np.testing.assert_array_equal(grown.keys[:, :, :, :S], cache.keys)
    np.testing.assert_array_equal(grown.values[:, :, :, S:], 0.0)


def test_inserted_rows_replace_those_rows_alone():
    draw = np.random.default_rng(0)
    one = lambda rows: jnp.asarray(draw.standard_normal((L, rows, K, S, H)), jnp.float32)
    fill = lambda rows: kv.KVCache(one(rows), one(rows))
    cache, other = fill(3), fill(2)
    made = cache.insert(jnp.array([2, 0]), other)
    for field in ("keys", "values"):
        new, old, theirs = (np.asarray(getattr(c, field)) for c in (made, cache, other))
        np.testing.assert_array_equal(new, np.stack([theirs[:, 1], old[:, 1], theirs[:, 0]], axis=1))


def test_a_cache_of_several_keeps_the_contract():
    draw = np.random.default_rng(1)
    member = lambda: kv.KVCache(*(jnp.asarray(draw.standard_normal((L, B, K, S, H)), jnp.float32) for _ in range(2)))
    both = kv.Caches((member(), member()))
    assert isinstance(both, Cache) and isinstance(both.members[0], Cache)
    assert (both.batch, both.capacity, both.grow(S + 2).capacity) == (B, S, S + 2)
    rows = jnp.array([1])
    made = both.insert(rows, both.take(jnp.array([0]))).commit(jnp.zeros(B, jnp.int32))
    for mine, old in zip(made.members, both.members):
        np.testing.assert_array_equal(mine.keys[:, 1], old.keys[:, 0])
    assert made.at(0, both.members[1]).members[0] is both.members[1]
