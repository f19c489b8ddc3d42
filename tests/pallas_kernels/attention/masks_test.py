"""Every layout's metadata against the plain statement of who sees whom, and tile classes against the dense mask."""
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import mask_spec, tiles


def brute(queries, keys, sees):
    return np.array([[bool(sees(t, s)) for s in range(keys)] for t in range(queries)])


def check(mask, row, sees):
    got = np.asarray(mask_spec.visible(mask))[row]
    np.testing.assert_array_equal(got, brute(*got.shape, sees))


DOCUMENTS = np.array([[0] * 7 + [1] * 3 + [2] * 4 + [-1] * 2, [0] * 16])


def bounds(row, t):
    same = np.flatnonzero(DOCUMENTS[row] == DOCUMENTS[row, t])
    return same[0], same[-1]


def test_causal_tail():
    check(mask_spec.causal(1, 3, 8), 0, lambda t, s: s <= t + 5)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("row", [0, 1])
def test_packed(row, both_ways):
    d = DOCUMENTS[row]
    check(mask_spec.packed(jnp.asarray(DOCUMENTS), both_ways), row,
          lambda t, s: d[t] >= 0 and d[t] == d[s] and (both_ways or s <= t))


def test_bidirectional_with_padding():
    check(mask_spec.bidirectional(jnp.asarray([3, 6]), 6), 0, lambda t, s: t < 3 and s < 3)


def test_refusion_physical_order():
    check(mask_spec.physical_order(jnp.asarray([4, 6]), 6), 0, lambda t, s: s <= t < 4)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("clean, noise, views", [
    ("causal", "bidirectional", 2), ("block", "bidirectional", 1), ("causal", "causal", 1)])
def test_two_stream(row, clean, noise, views):
    """FLARE with complementary views, BD3-LM, and token-causal noise."""
    block, length, d = 3, 16, DOCUMENTS[row]

    def sees(t, s):
        stream_q, stream_k, t, s = t // length, s // length, t % length, s % length
        if d[t] < 0 or d[t] != d[s]:
            return False
        start = bounds(row, t)[0]
        block_q, block_k = (t - start) // block, (s - start) // block
        if stream_q == 0:
            return stream_k == 0 and (s <= t if clean == "causal" else block_k <= block_q)
        if stream_k == 0:
            return block_k < block_q
        return stream_q == stream_k and block_q == block_k and (noise == "bidirectional" or s <= t)
    check(mask_spec.two_stream(jnp.asarray(DOCUMENTS), block, views, clean, noise), row, sees)


def test_two_stream_refuses():
    with pytest.raises(ValueError, match="clean='bidirectional'"):
        mask_spec.two_stream(jnp.zeros((1, 4), jnp.int32), 2, clean="bidirectional")
    with pytest.raises(ValueError, match="block_size=0"):
        mask_spec.two_stream(jnp.zeros((1, 4), jnp.int32), 0)


def test_orthrus_dual_pass():
    limits = np.array([[4, 4, 4, 0, 0, 0, -1, -1, -1]])
    check(mask_spec.dual_pass(6, jnp.asarray(limits), 3), 0,
          lambda t, s: s <= limits[0, t] if s < 6 else (s - 6) // 3 == t // 3)


@pytest.mark.parametrize("verify, draft", [(2, 3), (0, 4)])
def test_trust_windows(verify, draft):
    """AR-Trust with verify rows, and the Diffusion-Trust block without."""
    prefix, capacity = 5, 8

    def sees(t, s):
        if s < capacity:
            return s < prefix
        s -= capacity
        return s <= t if t < verify else True
    mask = mask_spec.trust_window(jnp.asarray([prefix, 0]), capacity, verify, draft)
    check(mask, 0, lambda t, s: sees(t, s) and (s < capacity + verify or t >= verify))


def test_ragged_decode():
    mask = mask_spec.ragged_decode(jnp.asarray([2, 7]), 3, 12)
    for row, length in enumerate((2, 7)):
        check(mask, row, lambda t, s: s <= length + t)


def layouts():
    two = jnp.zeros((1, 1024), jnp.int32)
    packed = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 6, 2048))[None], jnp.int32)
    blocky = jnp.asarray(np.repeat(np.arange(5), [320, 64, 700, 500, 464])[None], jnp.int32)
    return {
        "causal": mask_spec.causal(1, 2048), "bidirectional": mask_spec.packed(two, True),
        "two_stream": mask_spec.two_stream(two, 32), "two_stream_views": mask_spec.two_stream(two, 4, 2),
        "bd3lm": mask_spec.two_stream(two, 64, clean="block"),
        "token_causal": mask_spec.two_stream(two, 16, noise="causal"),
        "orthrus": mask_spec.dual_pass(1024, jnp.repeat(jnp.arange(0, 1024, 128), 64)[None] - 1, 64),
        "decode": mask_spec.ragged_decode(jnp.asarray([300]), 128, 2048),
        "packed": mask_spec.packed(packed), "packed_two_stream": mask_spec.two_stream(blocky, 4),
    }


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("edge", [128, 256])
def test_tile_work(name, edge):
    """No needed tile is skipped, no full tile hides a pair, and few or no tiles are visited in vain."""
    mask = layouts()[name]
    padded = tiles.pad_mask(mask, -(-mask.floor_q.shape[1] // edge) * edge, -(-mask.rank_k.shape[1] // edge) * edge)
    classes = np.asarray(tiles.tile_classes(padded, edge, edge))
    dense = np.asarray(mask_spec.visible(padded))
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
    for _ in range(50):
        pick = lambda low, high, n: jnp.asarray(rng.integers(low, high, (2, n)), jnp.int32)
        mask = mask_spec.Mask(pick(0, 6, 32), pick(-1, 9, 32), pick(-1, 3, 32), pick(0, 3, 32),
                              pick(-1, 9, 48), pick(-1, 3, 48), pick(0, 3, 48))
        classes = np.asarray(tiles.tile_classes(tiles.pad_mask(mask, 32, 48), 4, 4))
        pieces = np.asarray(mask_spec.visible(mask)).reshape(2, 8, 4, 12, 4)
        assert np.all(classes[pieces.any((2, 4))] != tiles.EMPTY)
        assert np.all(pieces.all((2, 4))[classes == tiles.FULL])


def test_work_list_visits_each_tile_once_and_every_row():
    classes = jnp.asarray([[[1, 0, 2], [0, 0, 0]], [[0, 0, 1], [2, 2, 2]]])
    work = tiles.work_list(classes)
    count = int(work.count)
    assert count == 2 + 1 + 1 + 3
    steps = [(int(r), int(t) >> 4, (int(t) >> 2) & 3, (int(t) >> 1) & 1, int(t) & 1)
             for r, t in zip(work.rows[:count], work.tiles[:count])]
    assert steps == [(0, 0, 1, 1, 0), (0, 2, 2, 0, 1), (1, 0, 0, 1, 1), (2, 2, 1, 1, 1),
                     (3, 0, 2, 1, 0), (3, 1, 2, 0, 0), (3, 2, 2, 0, 1)]
