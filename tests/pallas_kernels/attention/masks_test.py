"""Every layout's metadata against the plain statement of who sees whom, and tile classes against the dense mask."""
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Visibility
from pallas_kernels.attention import tiles
from pallas_kernels.attention.arg_specs import ragged_decode
from pallas_kernels.attention.visibility import causal
from tests.pallas_kernels.attention import layouts
from tests.pallas_kernels.attention.layouts import two_stream


def brute(queries, keys, sees):
    return np.array([[bool(sees(t, s)) for s in range(keys)] for t in range(queries)])


def check(mask, row, sees):
    got = np.asarray(mask.dense())[row]
    np.testing.assert_array_equal(got, brute(*got.shape, sees))


DOCUMENTS = np.array([[0] * 7 + [1] * 3 + [2] * 4 + [-1] * 2, [0] * 16])


def bounds(row, t):
    same = np.flatnonzero(DOCUMENTS[row] == DOCUMENTS[row, t])
    return same[0], same[-1]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("token_causal, causal_noise, views", [(True, False, 2), (False, False, 1), (True, True, 1)])
def test_two_stream(row, token_causal, causal_noise, views):
    """FLARE with complementary views, BD3-LM, and token-causal noise."""
    block, length, d = 3, 16, DOCUMENTS[row]

    def sees(t, s):
        stream_q, stream_k, t, s = t // length, s // length, t % length, s % length
        if d[t] < 0 or d[t] != d[s]:
            return False
        start = bounds(row, t)[0]
        block_q, block_k = (t - start) // block, (s - start) // block
        if stream_q == 0:
            return stream_k == 0 and (s <= t if token_causal else block_k <= block_q)
        if stream_k == 0:
            return block_k < block_q
        return stream_q == stream_k and block_q == block_k and (not causal_noise or s <= t)
    check(two_stream(DOCUMENTS, block, views, token_causal, causal_noise), row, sees)


def test_ragged_decode():
    mask = ragged_decode(jnp.asarray([2, 7]), 3, 12)
    for row, length in enumerate((2, 7)):
        check(mask, row, lambda t, s: s <= length + t)


def measured():
    two = jnp.zeros((1, 1024), jnp.int32)
    packed = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 6, 2048))[None], jnp.int32)
    blocky = jnp.asarray(np.repeat(np.arange(5), [320, 64, 700, 500, 464])[None], jnp.int32)
    return {
        "causal": causal(jnp.ones((1, 2048), bool)), "bidirectional": layouts.packed(two, True),
        "two_stream": two_stream(two, 32), "two_stream_views": two_stream(two, 4, 2),
        "bd3lm": two_stream(two, 64, token_causal=False),
        "token_causal": two_stream(two, 16, causal_noise=True),
        "orthrus": layouts.blocks_over_context(1024, jnp.repeat(jnp.arange(0, 1024, 128), 64)[None] - 1, 64),
        "decode": ragged_decode(jnp.asarray([300]), 128, 2048),
        "packed": layouts.packed(packed), "packed_two_stream": two_stream(blocky, 4),
    }


@pytest.mark.parametrize("name", measured())
@pytest.mark.parametrize("edge", [128, 256])
def test_tile_work(name, edge):
    """No needed tile is skipped, no full tile hides a pair, and few or no tiles are visited in vain."""
    mask = measured()[name]
    padded = tiles.pad_mask(mask, -(-mask.floor_q.shape[1] // edge) * edge, -(-mask.rank_k.shape[1] // edge) * edge)
    classes = np.asarray(tiles.tile_classes(padded, edge, edge))
    dense = np.asarray(padded.dense())
    pieces = dense.reshape(dense.shape[0], dense.shape[1] // edge, edge, -1, edge)
    needed, full = pieces.any((2, 4)), pieces.all((2, 4))
    assert np.all(classes[needed] != tiles.EMPTY)
    assert np.all(full[classes == tiles.FULL])
    ratio = (classes != tiles.EMPTY).sum() / needed.sum()
    assert ratio <= (1.1 if name.startswith("packed") else 1.0), ratio
    if not name.startswith("packed"):
        assert np.all(classes[full] == tiles.FULL)


def test_tile_classes_are_safe_on_random_metadata():
    rng = np.random.default_rng(1)
    for trial in range(50):
        lowest = (-1, 2)[trial % 2]  # of groups; with one group alone, a tile may be full by it
        pick = lambda low, high, n: jnp.asarray(rng.integers(low, high, (2, n)), jnp.int32)
        mask = Visibility(pick(0, 6, 32), pick(-1, 9, 32), pick(lowest, 3, 32), pick(0, 3, 32),
                          pick(-1, 9, 48), pick(lowest, 3, 48), pick(0, 3, 48))
        classes = np.asarray(tiles.tile_classes(tiles.pad_mask(mask, 32, 48), 4, 4))
        pieces = np.asarray(mask.dense()).reshape(2, 8, 4, 12, 4)
        assert np.all(classes[pieces.any((2, 4))] != tiles.EMPTY)
        assert np.all(pieces.all((2, 4))[classes == tiles.FULL])
        floor, limit, rank = mask.floor_q[:, :, None], mask.limit_q[:, :, None], mask.rank_k[:, None]
        by_rank = (floor <= rank) & (rank <= limit)
        alike = (pieces == np.asarray(by_rank).reshape(pieces.shape)).all((2, 4))
        assert np.all(alike[classes == tiles.RANKED])


def test_work_list_visits_each_tile_once_and_every_row():
    classes = jnp.asarray([[[1, 0, 2], [0, 0, 0]], [[0, 0, 1], [2, 2, 2]]])
    work = tiles.work_list(classes)
    count = int(work.count)
    assert count == 2 + 1 + 1 + 3
    steps = [(int(r), int(t) >> 4, (int(t) >> 2) & 3, (int(t) >> 1) & 1, int(t) & 1)
             for r, t in zip(work.rows[:count], work.tiles[:count])]
    assert steps == [(0, 0, 1, 1, 0), (0, 2, 2, 0, 1), (1, 0, 0, 1, 1), (2, 2, 1, 1, 1),
                     (3, 0, 2, 1, 0), (3, 1, 2, 0, 0), (3, 2, 2, 0, 1)]
