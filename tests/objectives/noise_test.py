"""What masked objectives share: times, masking rates, who is taught, and normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.objectives import noise

EPS = (1e-3, 1.0)


def draw(ids, length=12, interval=EPS, seed=0, block=None, **options):
    number = None if block is None else jnp.broadcast_to(jnp.arange(length) // block, (len(ids), length))
    return noise.draw(jax.random.key(seed), jnp.asarray(ids), length, interval, block=number, **options)


@pytest.mark.parametrize("block", [None, 4, 5])
def test_times_are_uniform_in_the_interval_and_shared_by_what_shares_them(block):
    drawn = draw(range(4000), interval=(0.3, 0.8), block=block)
    time = np.asarray(drawn.time)
    assert time.shape == (4000, 12) and 0.3 <= time.min() and time.max() < 0.8
    starts = range(0, 12, block or 12)
    for start in starts:
        of_block = time[:, start: start + (block or 12)]
        assert (of_block == of_block[:, :1]).all()
        np.testing.assert_allclose(np.quantile(of_block[:, 0], [0.25, 0.5, 0.75]), [0.425, 0.55, 0.675], atol=0.02)
    assert len(np.unique(time[0])) == len(starts)
    np.testing.assert_allclose(np.mean(drawn.uniform, axis=0), 0.5, atol=0.02)


def test_a_row_draws_alike_in_any_batch_and_differently_by_step():
    whole, part = draw(range(10, 20), block=4), draw([17, 12], block=4)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(b, a[jnp.asarray([7, 2])]), whole, part)
    other = draw(range(10, 20), block=4, seed=1)
    assert (other.time != whole.time).all() and (other.uniform != whole.uniform).all()


def test_times_masks_and_cuts_are_independent():
    # keys made by folding may coincide with keys made by splitting; a draw reused twice would correlate fully
    key, ids = jax.random.key(0), jnp.arange(4000)
    drawn = draw(ids)
    cut = jax.vmap(lambda k: jax.random.uniform(k, (2,)))(noise.row_keys(key, ids, 2))
    columns = np.stack([drawn.time[:, 0], drawn.uniform[:, 0], drawn.uniform[:, 1], cut[:, 0], cut[:, 1]])
    assert np.abs(np.corrcoef(columns) - np.eye(5)).max() < 0.06


@pytest.mark.parametrize("block", [None, 4])
def test_antithetic_times_fill_the_interval_evenly(block):
    B, steps = 8, 300
    first = []
    for seed in range(steps):
        time = np.asarray(draw(range(B), interval=(0.0, 1.0), seed=seed, block=block, antithetic=True).time)
        times = np.unique(np.sort(time[:, :: block or 12].ravel()))
        gaps = np.diff(times, append=times[0] + 1)
        np.testing.assert_allclose(gaps, 1 / (B * (3 if block else 1)), atol=1e-5)
        first.append(time[0, 0])
    np.testing.assert_allclose(np.quantile(first, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.08)


@pytest.mark.parametrize("schedule", noise.SCHEDULES)
def test_weight_is_the_slope_of_the_rate_over_the_rate(schedule):
    time = jnp.linspace(0.05, 0.95, 19)
    slope = jax.vmap(jax.grad(lambda t: noise.rate(schedule, t)))(time)
    np.testing.assert_allclose(noise.weight(schedule, time), slope / noise.rate(schedule, time), rtol=1e-4)
    ends = noise.rate(schedule, jnp.asarray([0.0, 1.0]))
    np.testing.assert_allclose(ends, [0, 1], atol=1e-6)
    assert np.isfinite(noise.weight(schedule, jnp.zeros(()))).all()


def _batch():
    return {"tokens": jnp.asarray([[5, 6, 7, 8, 0, 0, 0, 0], [5, 6, 7, 8, 9, 0, 0, 0]]),
            "loss_mask": jnp.asarray([[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0]], bool),
            "length": jnp.asarray([4, 5])}


def test_padding_becomes_taught_ends_up_to_the_longest_row():
    got = noise.supervise(_batch(), "response", "eos", 1)
    np.testing.assert_array_equal(got.tokens, [[5, 6, 7, 8, 1, 0, 0, 0], [5, 6, 7, 8, 9, 0, 0, 0]])
    np.testing.assert_array_equal(got.valid, [[1] * 5 + [0] * 3] * 2)
    np.testing.assert_array_equal(got.taught, [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize("block_size, first, ends", [
    (3, (0, 0), (6, 6)), (4, (0, 0), (8, 8)), (7, (0, 0), (7, 7)), (16, (0, 0), (8, 8)), (3, (2, 3), (5, 6)),
    (2, (2, 3), (6, 5)), (5, (2, 3), (7, 8))])
def test_padding_is_taught_to_the_end_of_a_block(block_size, first, ends):
    got = noise.supervise(_batch(), "response", "eos", 1, block_size, jnp.asarray(first)[:, None])
    np.testing.assert_array_equal(np.asarray(got.valid).sum(1), ends)
    np.testing.assert_array_equal(np.asarray(got.taught).sum(1), [ends[0] - 2, ends[1] - 3])


def test_padding_is_left_out_or_everything_is_taught():
    got = noise.supervise(_batch(), "response", "ignore", None)
    np.testing.assert_array_equal(got.tokens, _batch()["tokens"])
    np.testing.assert_array_equal(np.asarray(got.valid).sum(1), [4, 5])
    np.testing.assert_array_equal(got.taught, _batch()["loss_mask"])
    everything = noise.supervise(_batch(), "all", "ignore", None)
    np.testing.assert_array_equal(everything.taught, everything.valid)


def test_normalisations():
    taught = jnp.asarray([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    total = lambda name: np.asarray(noise.scales(taught, name) * taught).sum(1)
    np.testing.assert_allclose(total("sequence"), [1 / 3, 1 / 3, 0])  # the empty row counts as a row
    np.testing.assert_allclose(total("token"), [2 / 6, 4 / 6, 0])
    np.testing.assert_allclose(total("batch"), [2 / 3, 4 / 3, 0])
    for name in noise.NORMALISATIONS:
        assert np.isfinite(noise.scales(jnp.zeros((2, 3), bool), name)).all()


def test_one_block_is_taught_between_clean_tokens_and_hidden_ones():
    T, L, many = 12, 3, 600
    first, length = np.array([2, 5, 11]), np.array([9, 12, 11])  # the last row has no response
    index = np.arange(T)
    taught = (first[:, None] <= index) & (index < length[:, None])
    tile = lambda x: jnp.asarray(np.repeat(x, many, axis=0))
    rows = noise.Supervision(tile(np.tile(10 + index, (3, 1))), tile(index < length[:, None]), tile(taught))
    got = noise.one_block(rows, jax.random.key(0), {"length": tile(length), "example_id": jnp.arange(3 * many)},
                          tile(first[:, None]), L, 99)
    active = []
    for row in range(3 * many):
        which = row // many
        mine = np.flatnonzero(got.taught[row])
        if which == 2:
            np.testing.assert_array_equal(got.tokens[row], 10 + index)
            assert mine.size == 0
            continue
        block = (mine[0] - first[which]) // L
        start, end = first[which] + block * L, min(first[which] + (block + 1) * L, length[which])
        assert mine.tolist() == list(range(start, end))
        hidden = (index >= end) & (index < length[which])
        np.testing.assert_array_equal(got.tokens[row], np.where(hidden, 99, 10 + index))
        active.append((which, block))
    for which in (0, 1):  # three blocks each
        counts = np.array([active.count((which, block)) for block in range(3)])
        assert counts.sum() == many and (abs(counts - many / 3) < 4 * np.sqrt(many * 2 / 9)).all()
    np.testing.assert_array_equal(got.valid, rows.valid)
