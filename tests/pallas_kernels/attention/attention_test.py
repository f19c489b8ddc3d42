"""Every form of block-mask attention against dense attention in float64: values, gradients, and refusals."""
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Visibility, block_mask_attention, dispatch, use_backend
from pallas_kernels.attention import flash_gpu, flash_tpu, tiles
from pallas_kernels.attention.arg_specs import ragged_decode
from pallas_kernels.attention.reference import dense_attention
from pallas_kernels.attention.scores import Scoring
from pallas_kernels.attention.visibility import by_rank, causal
from tests.pallas_kernels.attention import layouts
from tests.pallas_kernels.attention.layouts import two_stream


def arrays(seed, batch, queries, keys, heads, key_heads, width):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s) for s in ((batch, queries, heads, width), (batch, keys, key_heads, width),
                                         (batch, keys, key_heads, width), (batch, queries, heads, width))]


def values_and_gradients(attend, inputs, dtype):
    def both(q, k, v, d_out):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(d_out)
    return [np.asarray(x, np.float64) for x in jax.jit(both)(*(jnp.asarray(a, dtype) for a in inputs))]


def compare(mask, heads, key_heads, width, dtype, tolerance, seed=0, **options):
    rule = {name: options[name] for name in ("scale", "soft_cap") if name in options}
    inputs = arrays(seed, mask.floor_q.shape[0], mask.floor_q.shape[1], mask.rank_k.shape[1], heads, key_heads, width)
    want = values_and_gradients(lambda q, k, v: dense_attention(q, k, v, mask, **rule), inputs, jnp.float64)
    got = values_and_gradients(lambda q, k, v: block_mask_attention(q, k, v, mask, **options), inputs, dtype)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()), err_msg=name)
    return got


def padded_documents(sizes):
    return jnp.asarray([np.repeat([*range(len(s) - 1), -1], s) for s in sizes], jnp.int32)


DOCUMENTS = padded_documents([[20, 1, 16, 4], [8, 21, 4, 8]])


@pytest.mark.parametrize("mask, heads, key_heads, edges", [
    (two_stream(DOCUMENTS, 4, 2, causal_noise=True), 4, 2, (32, 48)),      # empty rows: padding sees nothing
    (two_stream(DOCUMENTS, 1, 3), 3, 1, (16, 16)),
    (causal(jnp.ones((2, 1), bool)), 2, 2, (None, None)),                                 # one token
    (ragged_decode(jnp.asarray([5, 90]), 3, 101), 6, 2, (16, 32)),
], ids=["two-stream", "three-views", "one-token", "ragged"])
def test_xla_form_float64(x64, mask, heads, key_heads, edges):
    compare(mask, heads, key_heads, 8, jnp.float64, 1e-12, block_q=edges[0], block_k=edges[1], backend="xla")


def random_mask(rng, batch, queries, keys):
    """Any seven integers are a mask: crossing intervals, recurring groups, ranks in no order, rows that see nothing."""
    pick = lambda low, high, n: jnp.asarray(rng.integers(low, high, (batch, n)), jnp.int32)
    return Visibility(pick(0, 6, queries), pick(-1, 9, queries), pick(-1, 3, queries), pick(0, 3, queries),
                      pick(-1, 9, keys), pick(-1, 3, keys), pick(0, 3, keys))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend, dtype, tolerance", [
    ("xla", jnp.float64, 1e-12), pytest.param("interpret", jnp.float32, 1e-5, marks=pytest.mark.slow)])
def test_any_mask_any_size(x64, seed, backend, dtype, tolerance):
    rng = np.random.default_rng(seed)
    key_heads = int(rng.integers(1, 4))
    mask = random_mask(rng, int(rng.integers(1, 3)), int(rng.integers(1, 70)), int(rng.integers(1, 70)))
    options = dict(soft_cap=float(rng.choice([0.5, 3.0])), scale=0.7) if seed % 2 else {}
    compare(mask, key_heads * int(rng.integers(1, 4)), key_heads, 8, dtype, tolerance, seed, backend=backend,
            block_q=16, block_k=32, **options)


def blind_stretches():
    """64 queries and 96 keys of which whole tiles of 32 see nothing, or are seen by nobody."""
    index = jnp.arange(96)[None]
    seeing, shown = index[:, :64] >= 32, (index < 32) | (index >= 64)
    return Visibility(*(jnp.asarray(a, jnp.int32) for a in (
        jnp.zeros_like(seeing), jnp.where(seeing, 90, -1), jnp.full_like(seeing, -1, jnp.int32), jnp.zeros_like(seeing),
        jnp.where(shown, index, -1), jnp.full_like(index, -1), jnp.zeros_like(index))))


@pytest.mark.parametrize("module", [flash_tpu, flash_gpu])
def test_kernels_write_zeros_where_no_tile_is_needed(module):
    mask = blind_stretches()
    assert np.asarray(tiles.tile_classes(mask, 32, 32) == tiles.EMPTY).tolist() == [[[True] * 3, [False, True, False]]]
    got, want = module_gradients(module, mask, 32, True)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()), err_msg=name)
    out, dq, dk, dv = got
    assert not out[:, :, :32].any() and not dq[:, :, :32].any()
    assert not dk[:, :, 32:64].any() and not dv[:, :, 32:64].any()


@pytest.mark.parametrize("module", [flash_tpu, flash_gpu])
def test_kernels_cap_scores(module):
    got, want = module_gradients(module, two_stream(DOCUMENTS[:1, :32], 4, 1), 32, True, cap=0.3)
    uncapped, _ = module_gradients(module, two_stream(DOCUMENTS[:1, :32], 4, 1), 32, True)
    for a, b, c in zip(got, want, uncapped):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))
        assert np.abs(a - c).max() > 1e-2


@pytest.mark.parametrize("key_heads", [1, 2])
def test_decode_reads_only_the_valid_prefix(key_heads):
    """What lies in cache tiles behind a row's last token may be anything, and each row has its own end."""
    lengths, edge, tokens = np.array([5, 100, 200]), 32, 2
    mask = ragged_decode(jnp.asarray(lengths), tokens, 256)
    q, k, v, _ = (jnp.asarray(a, jnp.float32) for a in arrays(0, 3, tokens, 256, 4, key_heads, 16))
    ends = -(-(lengths + tokens) * key_heads // edge) * edge // key_heads                   # in tokens, whole tiles
    stale = (jnp.arange(256) >= jnp.asarray(ends)[:, None])[:, :, None, None]
    attend = jax.jit(lambda k, v: block_mask_attention(q, k, v, mask, backend="interpret", block_k=edge))
    assert int(stale.sum()) > 256
    np.testing.assert_array_equal(attend(jnp.where(stale, jnp.nan, k), jnp.where(stale, jnp.nan, v)), attend(k, v))


def test_long_work_lists_are_split_by_batch_rows(monkeypatch):
    """Scalar memory bounds the list of tiles: several rows at once while they fit, then one by one, then no kernel."""
    from pallas_kernels.attention import api
    seen = []

    def note(call, q, k, v, mask):
        seen.append((q.shape[0], *mask.floor_q.shape))
        return q, q
    monkeypatch.setattr(api, "_run_forward", note)
    same = jax.ShapeDtypeStruct((6, 1024, 1, 64), jnp.bfloat16)
    mask = causal(jnp.ones((1, 1024), bool))
    attend = lambda: jax.eval_shape(lambda *a: block_mask_attention(*a, mask, backend="tpu"), same, same, same)
    for limit, rows in ((24, 6), (23, 3), (4, 1)):
        monkeypatch.setattr(api, "_MAX_TILES", limit)
        assert attend().shape == (6, 1024, 1, 64) and seen.pop() == (rows, rows, 1024)
    monkeypatch.setattr(api, "_MAX_TILES", 3)
    with pytest.raises(ValueError, match="4 tiles for 1024 queries and 1024 keys"):
        attend()


def test_batch_rows_taken_in_groups_give_the_same(monkeypatch):
    from pallas_kernels.attention import api
    mask = layouts.packed(DOCUMENTS[jnp.asarray([0, 1, 0, 1])])
    q, k, v, d_out = (jnp.asarray(a, jnp.float32) for a in arrays(0, 4, 41, 41, 2, 1, 8))
    call = api._Call("tpu", Scoring(0.3), 41, 41, (1, 1))
    monkeypatch.setattr(api, "_attend", lambda call, *rows: api._run_forward(call._replace(backend="xla"), *rows)[0])
    heads_first = [jnp.moveaxis(a, 2, 1) for a in (q, k, v)]
    for limit in (1, 2, 3, 4):
        monkeypatch.setattr(api, "_MAX_TILES", limit)
        out = api._attend_rows(call, 1, *heads_first, mask)
        np.testing.assert_allclose(jnp.moveaxis(out, 1, 2), dense_attention(q, k, v, mask, 0.3), atol=2e-6)


def test_blind_rows_are_zero_with_zero_gradient(x64):
    mask = two_stream(DOCUMENTS, 4, 1)
    blind = ~np.asarray(mask.dense()).any(-1)
    out, dq, dk, dv = compare(mask, 2, 1, 8, jnp.float64, 1e-12, backend="xla")
    assert blind.any() and np.all(out[blind] == 0) and np.all(dq[blind] == 0)
    unseen = ~np.asarray(mask.dense()).any(1)
    assert unseen.any() and np.all(dk[unseen] == 0) and np.all(dv[unseen] == 0)


@pytest.mark.parametrize("mask, heads, key_heads, width, options", [
    (two_stream(DOCUMENTS, 4, 2), 4, 2, 16, dict(block_q=48, block_k=32)),
    (ragged_decode(jnp.asarray([5, 200]), 3, 300), 8, 2, 64, {}),
    (ragged_decode(jnp.asarray([5, 700]), 3, 1024), 6, 2, 16, dict(heads_first=True)),
    pytest.param(layouts.window([5, 200], 300, 2, 5), 8, 1, 64, {}, marks=pytest.mark.slow),
    pytest.param(causal(jnp.ones((1, 700), bool)), 2, 1, 64, {}, marks=pytest.mark.slow),
    pytest.param(layouts.blocks_over_context(200, [[9] * 8 + [-1] * 8], 8), 2, 2, 128, {}, marks=pytest.mark.slow),
], ids=["two-stream", "decode", "heads-first", "trust", "causal", "orthrus"])
def test_tpu_kernels_in_interpretation(x64, mask, heads, key_heads, width, options):
    compare(mask, heads, key_heads, width, jnp.float32, 1e-5, backend="interpret", **options)


def test_bfloat16_inputs(x64):
    mask = two_stream(DOCUMENTS, 4, 1)
    compare(mask, 2, 1, 64, jnp.bfloat16, 2e-2, backend="interpret", block_q=48, block_k=48)


def head_major(mask, heads, key_heads, width, edge):
    """Padded head-major inputs for calling a kernel module directly."""
    def fit(a):
        heads_first = jnp.asarray(np.moveaxis(a, 2, 1), jnp.float32)
        return jnp.pad(heads_first, ((0, 0), (0, 0), (0, -a.shape[1] % edge), (0, 0)))
    q, k, v, d_out = map(fit, arrays(3, *mask.floor_q.shape, mask.rank_k.shape[1], heads, key_heads, width))
    return q, k, v, tiles.pad_mask(mask, q.shape[2], k.shape[2]), d_out


def module_gradients(module, mask, edge, interpret, cap=None):
    q, k, v, padded, d_out = head_major(mask, 4, 2, 16, edge)

    def both(q, k, v, d_out):
        out, lse = module.forward(q, k, v, padded, Scoring(0.25, cap), edge, edge, interpret=interpret)
        delta = jnp.sum(out * d_out, -1)[:, :, None]
        return out, *module.backward(q, k, v, padded, Scoring(0.25, cap), edge, edge, lse, delta, d_out,
                                     interpret=interpret)

    def dense(*operands):
        return jnp.moveaxis(dense_attention(*(jnp.moveaxis(x, 1, 2) for x in operands), padded, 0.25, cap), 1, 2)
    want = values_and_gradients(dense, (q, k, v, d_out), jnp.float32)
    return [np.asarray(x) for x in jax.jit(both)(q, k, v, d_out)], want


@pytest.mark.parametrize("module", [flash_tpu, flash_gpu])
def test_kernels_follow_any_rule(module):
    """One row of random integers, one of the last 64 queries of a causal row: tiles of every class, all at once."""
    index = jnp.arange(96, dtype=jnp.int32)[None]
    tail = by_rank(0 * index[:, :64], index[:, 32:], index)
    rule = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), random_mask(np.random.default_rng(0), 1, 64, 96), tail)
    assert set(np.unique(tiles.tile_classes(rule, 32, 32))) == {tiles.EMPTY, tiles.FULL, tiles.PARTIAL, tiles.RANKED}
    got, want = module_gradients(module, rule, 32, True)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()), err_msg=name)


@pytest.mark.slow
def test_no_races_or_stray_memory():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    got, want = module_gradients(flash_tpu, two_stream(DOCUMENTS[:1], 4, 1), 32, params)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("width, dtype, queries, keys, heads", [
    (64, jnp.bfloat16, 256, 256, 4), (64, jnp.float32, 1, 200, 2),       # no power of two but the tiles
    pytest.param(128, jnp.bfloat16, 200, 700, 16, marks=pytest.mark.slow),
    pytest.param(256, jnp.bfloat16, 256, 256, 4, marks=pytest.mark.slow)])
def test_triton_lowering(lower_for_gpu, width, dtype, queries, keys, heads):
    make = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    integers = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)
    mask = Visibility(*[integers(queries)] * 4, *[integers(keys)] * 3)

    def training(q, k, v, mask):
        out, pullback = jax.vjp(lambda *a: block_mask_attention(*a, mask, backend="gpu"), q, k, v)
        return out, pullback(out)
    q, k = make(1, queries, heads, width), make(1, keys, 2, width)
    text = lower_for_gpu(training, q, k, k, mask)
    assert text.count("triton") >= 3


# width, dtype, tile edges; the most bytes Triton's passes allocate for one of the kernels (results/triton_resources.md)
ALLOCATIONS = [
    (64, "bfloat16", 64, 64, 49_152), (64, "bfloat16", 64, 128, 90_112), (128, "bfloat16", 64, 64, 98_304),
    (128, "bfloat16", 128, 64, 148_480), (128, "bfloat16", 64, 128, 167_936), (256, "bfloat16", 64, 64, 139_264),
    (256, "bfloat16", 128, 64, 212_992), (256, "bfloat16", 64, 128, 212_992), (64, "float32", 64, 64, 81_920),
    (64, "float32", 128, 64, 132_096), (128, "float32", 64, 64, 147_456), (256, "float32", 64, 64, 294_912)]


@pytest.mark.parametrize("width, dtype, block_q, block_k, allocated", ALLOCATIONS)
def test_no_gpu_kernel_asks_for_more_than_a_block_has(width, dtype, block_q, block_k, allocated):
    limit = dispatch.shared_memory()
    assert flash_gpu.shared_memory(width, block_q, block_k, dtype) >= min(allocated, limit + 1)
    q = jax.ShapeDtypeStruct((1, 128, 1, width), dtype)
    mask = causal(jnp.ones((1, 128), bool))
    call = functools.partial(block_mask_attention, mask=mask, backend="gpu", block_q=block_q, block_k=block_k)
    if allocated <= limit:
        jax.eval_shape(call, q, q, q)
    else:
        with pytest.raises(ValueError, match=f"bytes of shared memory for {dtype} tiles of {block_q} queries"):
            jax.eval_shape(call, q, q, q)


WIDE = dict(q=jnp.zeros((1, 4, 2, 64)), k=jnp.zeros((1, 4, 1, 64)), v=jnp.zeros((1, 4, 1, 64)))


@pytest.mark.parametrize("change, words", [
    (dict(q=jnp.zeros((1, 4, 8))), r"q has shape \(1, 4, 8\)"),
    (dict(k=jnp.zeros((1, 4, 3, 8)), v=jnp.zeros((1, 4, 3, 8))), "2 query heads over 3 key heads"),
    (dict(v=jnp.zeros((1, 5, 1, 8))), "k .* and v .* differ"),
    (dict(q=jnp.zeros((1, 4, 2, 8), jnp.bfloat16)), "expected one dtype"),
    (dict(mask=causal(jnp.ones((1, 5), bool))), r"mask.floor_q has shape \(1, 5\)"),
    (dict(mask=jnp.ones((1, 4, 4), bool)), "the mask is of type .*; expected a Visibility"),
    (dict(backend="cuda"), "backend 'cuda' is unknown"),
    (dict(backend="tpu"), "head width 8"),
    (dict(block_q=10), "block_q=10"),
    (dict(soft_cap=0.0), "soft_cap=0.0; expected a positive number"),
    (dict(soft_cap=float("nan")), "soft_cap=nan"),
    (dict(WIDE, backend="tpu", block_q=48), "block_q=48 .TPU tiles are multiples of 128"),
    (dict(WIDE, backend="gpu", block_k=48), "block_k=48 .GPU tiles are powers of two"),
])
def test_refuses(change, words):
    call = dict(q=jnp.zeros((1, 4, 2, 8)), k=jnp.zeros((1, 4, 1, 8)), v=jnp.zeros((1, 4, 1, 8)),
                mask=causal(jnp.ones((1, 4), bool)))
    with pytest.raises(ValueError, match=words):
        block_mask_attention(**{**call, **change})


def test_falls_back_with_one_warning():
    dispatch._warned.clear()
    call = [jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 1, 8)), jnp.zeros((1, 4, 1, 8)), causal(jnp.ones((1, 4), bool))]
    with use_backend("tpu"):
        with pytest.warns(UserWarning, match="head width 8"):
            block_mask_attention(*call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            block_mask_attention(*call)
