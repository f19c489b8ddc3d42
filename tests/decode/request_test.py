"""A token's number, position, entry and rank: four names for where it stands, and how they follow from each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import request as requests
from dlm_jax.decode.canvas import DRAFTED, Canvas, scatter

P, G = 16, 24


@pytest.fixture(scope="module")
def request_of_two():
    return requests.make([[5, 6, 7], [8]], max_new_tokens=[10, 24], capacity=G, eos_id=1, mask_id=2)


def test_by_hand(request_of_two):
    r = request_of_two
    assert (r.batch, r.prompt_capacity, r.capacity, r.entries) == (2, P, G, P + G)
    number = jnp.array([[-3, -1, 0, 9], [-1, 0, 1, 23]])
    assert r.position(number).tolist() == [[0, 2, 3, 12], [0, 1, 2, 24]]
    assert r.entry(number).tolist() == [[0, 2, 16, 25], [0, 16, 17, 39]]
    assert r.entry(jnp.array([[-9, 24], [-9, 99]])).tolist() == [[0, 39], [0, 39]]  # always within the buffer
    ranks = np.asarray(r.ranks())
    assert ranks[0].tolist() == [0, 1, 2, *[-1] * 13, *range(3, 13), *[-1] * 14]
    assert ranks[1].tolist() == [0, *[-1] * 15, *range(1, 25)]


def test_there_and_back(request_of_two):
    r = request_of_two
    entry, number = np.arange(r.entries), np.asarray(r.numbers())
    for row, length in enumerate((3, 1)):
        there = (entry < length) | (entry >= P)
        np.testing.assert_array_equal(np.asarray(r.entry(r.numbers()))[row, there], entry[there])
        np.testing.assert_array_equal(np.sort(number[row, there]), np.arange(-length, G))
        assert (number[row, ~there] == G).all()  # padding is no token
        rank, limit = np.asarray(r.ranks())[row], (10, 24)[row]
        np.testing.assert_array_equal(rank[there & (number[row] < limit)],
                                      np.asarray(r.position(r.numbers()))[row, there & (number[row] < limit)])
        assert (rank[~there | (number[row] >= limit)] == -1).all()


def test_a_buffer_is_prompt_and_canvas(request_of_two):
    tokens = jnp.arange(2 * G).reshape(2, G)
    buffer = np.asarray(request_of_two.buffer(tokens))
    number = jnp.array([[-3, -2, -1, 0, 5], [-1, -1, 0, 1, 23]])
    read = np.take_along_axis(buffer, np.asarray(request_of_two.entry(number)), axis=1)
    assert read.tolist() == [[5, 6, 7, 0, 5], [8, 8, 24, 25, 47]]


def test_rows_and_fillers():
    r = requests.make([[3], [4, 5]], max_new_tokens=[7, 9], capacity=G, seed=6, first_row=2, batch=5,
                      prompt_capacity=17)
    assert r.prompt.shape == (6, 24) and r.max_new_tokens.tolist() == [7, 9, 0, 0, 0, 0]
    assert r.prompt_length.tolist() == [1, 2, 1, 1, 1, 1] and (int(r.eos_id), int(r.mask_id)) == (-1, -1)
    later = requests.make([[4, 5]], max_new_tokens=9, capacity=G, seed=6, first_row=3)
    data = lambda keys: np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(data(later.keys)[0], data(r.keys)[1])  # a row's key knows its number, not its place
    assert len({tuple(key) for key in data(r.keys)}) == 6


@pytest.mark.parametrize("size, least, expected", [
    (1, 16, 16), (17, 16, 24), (24, 16, 24), (25, 16, 32), (33, 16, 48), (1, 1, 1), (2, 1, 2), (3, 1, 3), (5, 1, 6)])
def test_buckets(size, least, expected):
    assert requests.bucket(size, least) == expected


def test_a_canvas_takes_what_the_mask_holds(request_of_two):
    canvas = Canvas.empty(request_of_two)
    assert (canvas.tokens == 2).all() and (canvas.committed_at == -1).all() and (canvas.origin == -1).all()
    number, mask = jnp.array([[3, 0], [23, 5]]), jnp.array([[True, True], [True, False]])
    canvas = canvas.commit(number, mask, jnp.array([[7, 8], [9, 10]]), DRAFTED, jnp.array([4, 6]))
    assert canvas.tokens[0, :5].tolist() == [8, 2, 2, 7, 2] and canvas.tokens[1, jnp.array([5, 23])].tolist() == [2, 9]
    assert canvas.committed_at[0, :5].tolist() == [4, -1, -1, 4, -1] and int(canvas.committed_at[1, 23]) == 6
    assert int((canvas.origin == DRAFTED).sum()) == 3
    assert scatter(jnp.zeros((2, 4), int), number, mask, 5).tolist() == [[5, 0, 0, 5], [0, 0, 0, 0]]
