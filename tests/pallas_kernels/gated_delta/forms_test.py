"""Every form of the two-stream gated delta rule against the recurrence in float64: values and gradients."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Stream, two_stream_gated_delta


def make_streams(rng, batch, tokens, views, key_heads, heads, key_width, width, gate=0.5):
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)

    def stream(lead):
        q, k = (unit(rng.normal(size=(*lead, key_heads, key_width))) for _ in range(2))
        v = rng.normal(size=(*lead, heads, width))
        return Stream(q, k, v, -gate * rng.random((*lead, heads)), rng.random((*lead, heads)))
    return stream((batch, tokens)), stream((batch, views, tokens)) if views else None


def values_and_gradients(clean, noisy, initial, cotangents, **options):
    """Outputs and gradients for the loss sum(outputs * cotangents), as one flat list of numpy arrays."""
    def run(clean, noisy, initial):
        result = two_stream_gated_delta(clean, noisy, initial_state=initial, **options)
        return [x for x in (result.out, result.noisy_out, result.final_state) if x is not None]

    def both(clean, noisy, initial, cotangents):
        outs, pullback = jax.vjp(run, clean, noisy, initial)
        return outs, pullback([c.astype(o.dtype) for c, o in zip(cotangents, outs)])
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(jax.jit(both)(clean, noisy, initial, cotangents))]


def cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def cotangents_for(rng, clean, noisy):
    shapes = [clean.v.shape] + ([] if noisy is None else [noisy.v.shape])
    shapes.append((clean.v.shape[0], clean.v.shape[2], clean.q.shape[-1], clean.v.shape[-1]))
    return [rng.normal(size=s) for s in shapes]


def assert_close(got, want, tolerance):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert np.all(np.isfinite(a)), f"leaf {i} is not finite"
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()), err_msg=f"leaf {i}")


def random_documents(rng, batch, tokens, block, chance):
    blocks = -(-tokens // block)
    return np.cumsum(rng.random((batch, blocks)) < chance, 1).repeat(block, 1)[:, :tokens].astype(np.int32)


# (block, chunk, tokens, views, key heads, value heads, documents?, initial state?)
CASES = [
    (1, 16, 37, 1, 1, 2, True, True),       # one-token blocks and documents
    (2, 16, 1, 3, 2, 2, False, False),      # a single token
    (4, 16, 53, 2, 2, 4, True, False),      # odd length, several views, shared keys
    pytest.param((8, 32, 64, 1, 1, 3, False, True), marks=pytest.mark.slow),
    (16, 16, 40, 1, 2, 2, True, True),      # block == chunk
    (24, 48, 100, 2, 1, 1, True, False),    # neither a power of two
    pytest.param((64, 64, 96, 1, 1, 1, False, False), marks=pytest.mark.slow),
    (1, 64, 70, 0, 1, 2, True, True),       # no noisy stream
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_folded_matches_recurrence_float64(x64, case):
    block, chunk, tokens, views, key_heads, heads, has_documents, has_state = case
    rng = np.random.default_rng(hash(case) % 2 ** 32)
    clean, noisy = make_streams(rng, 2, tokens, views, key_heads, heads, 8, 6)
    initial = rng.normal(size=(2, heads, 8, 6)) if has_state else None
    documents = jnp.asarray(random_documents(rng, 2, tokens, block, 0.3)) if has_documents else None
    args = (*cast((clean, noisy, initial), jnp.float64), cast(cotangents_for(rng, clean, noisy), jnp.float64))
    options = dict(block_size=block, chunk_size=chunk, documents=documents)
    want = values_and_gradients(*args, form="sequential", **options)
    assert_close(values_and_gradients(*args, form="folded", **options), want, 1e-12)


def test_causal_views_match_recurrence_float64(x64):
    """The last token of a block reads the same state either way; the others do not."""
    rng = np.random.default_rng(8)
    clean, noisy = make_streams(rng, 2, 44, 2, 1, 2, 8, 6)
    documents = jnp.asarray(random_documents(rng, 2, 44, 4, 0.3))
    args = (*cast((clean, noisy, None), jnp.float64), cast(cotangents_for(rng, clean, noisy), jnp.float64))
    options = dict(block_size=4, chunk_size=16, documents=documents)
    want = values_and_gradients(*args, form="sequential", causal=True, **options)
    assert_close(values_and_gradients(*args, form="folded", causal=True, **options), want, 1e-12)
    block_end = values_and_gradients(*args, form="sequential", **options)
    np.testing.assert_allclose(want[1][:, :, 3::4], block_end[1][:, :, 3::4], atol=1e-14)
    assert np.all(np.abs(want[1] - block_end[1]).max(axis=(0, 1, 3, 4)).reshape(-1, 4)[:, :3] > 1e-3)
    with pytest.raises(ValueError, match="form='route_i' with causal=True; accepted: 'folded', 'sequential'"):
        two_stream_gated_delta(*args[:2], form="route_i", causal=True, block_size=4)


@pytest.mark.parametrize("form", ["route_i", "route_ii"])
@pytest.mark.parametrize("block", [2, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 16))])
def test_routes_match_recurrence_float64(x64, form, block):
    rng = np.random.default_rng(block)
    clean, noisy = make_streams(rng, 2, 44, 2, 1, 2, 8, 6)
    documents = jnp.asarray(random_documents(rng, 2, 44, block, 0.3)).at[1].set(0)  # a row that chunks carry through
    initial = rng.normal(size=(2, 2, 8, 6))
    args = (*cast((clean, noisy, initial), jnp.float64), cast(cotangents_for(rng, clean, noisy), jnp.float64))
    options = dict(block_size=block, chunk_size=16, documents=documents)
    want = values_and_gradients(*args, form="sequential", **options)
    assert_close(values_and_gradients(*args, form=form, **options), want, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("views", [1, 2, 3])
def test_every_block_size_and_view_count(x64, block, views):
    rng = np.random.default_rng(100 * block + views)
    clean, noisy = make_streams(rng, 1, 150, views, 2, 4, 16, 8)
    documents = jnp.asarray(random_documents(rng, 1, 150, block, 0.2))
    args = (*cast((clean, noisy, None), jnp.float64), cast(cotangents_for(rng, clean, noisy), jnp.float64))
    options = dict(block_size=block, documents=documents)
    want = values_and_gradients(*args, form="sequential", **options)
    assert_close(values_and_gradients(*args, form="folded", **options), want, 1e-11)


@pytest.mark.parametrize("strongest", [80.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_strong_gates_over_4096_tokens(x64, strongest):
    """Float32 chunks stay finite and accurate when gates mix -80 with nearly none; sums of gates never cancel."""
    rng = np.random.default_rng(7)
    clean, noisy = make_streams(rng, 1, 4096, 1, 1, 1, 8, 8)
    pick = lambda shape: -np.where(rng.random(shape) < 0.3, strongest, 0.01) * rng.random(shape)
    clean, noisy = clean._replace(g=pick(clean.g.shape)), noisy._replace(g=pick(noisy.g.shape))
    cotangents = cotangents_for(rng, clean, noisy)
    options = dict(block_size=8)
    want = values_and_gradients(*cast((clean, noisy, None, cotangents), jnp.float64), form="sequential", **options)
    got = values_and_gradients(*cast((clean, noisy, None, cotangents), jnp.float32), form="folded", **options)
    assert_close(got, want, 1e-5)


def test_repeated_keys_do_not_break_the_inverse(x64):
    """Identical keys with full write strength: powers of the system grow like binomials, its inverse does not."""
    rng = np.random.default_rng(3)
    clean, noisy = make_streams(rng, 1, 128, 1, 1, 1, 8, 8, gate=1e-3)
    same = np.broadcast_to(clean.k[:, :1], clean.k.shape)
    clean = clean._replace(k=same, beta=np.ones_like(clean.beta))
    noisy = noisy._replace(k=same[:, None], beta=np.ones_like(noisy.beta))
    cotangents = cotangents_for(rng, clean, noisy)
    want = values_and_gradients(*cast((clean, noisy, None, cotangents), jnp.float64), form="sequential", block_size=64)
    got = values_and_gradients(*cast((clean, noisy, None, cotangents), jnp.float32), form="folded", block_size=64)
    assert_close(got, want, 1e-5)


def test_bfloat16_products_stay_close(x64):
    rng = np.random.default_rng(5)
    clean, noisy = make_streams(rng, 1, 128, 1, 1, 2, 16, 16)
    cotangents = cotangents_for(rng, clean, noisy)
    want = values_and_gradients(*cast((clean, noisy, None, cotangents), jnp.float64), form="sequential", block_size=4)
    got = values_and_gradients(*cast((clean, noisy, None, cotangents), jnp.float32), form="folded", block_size=4,
                               precision="bfloat16")
    assert_close(got, want, 3e-2)


def test_states_after_every_token(x64):
    rng = np.random.default_rng(11)
    clean, _ = make_streams(rng, 2, 5, 0, 1, 2, 4, 3)
    clean, initial = cast((clean, rng.normal(size=(2, 2, 4, 3))), jnp.float64)
    result = two_stream_gated_delta(clean, initial_state=initial, return_states=True)
    assert result.states.shape == (2, 5, 2, 4, 3)
    for t in (2, 5):
        prefix = two_stream_gated_delta(Stream(*(a[:, :t] for a in clean)), initial_state=initial)
        np.testing.assert_allclose(result.states[:, t - 1], prefix.final_state, atol=1e-13)


def test_rows_and_trailing_padding_do_not_matter(x64):
    """A row's result is the same alone, in a batch, and with no-op tokens (g = beta = 0) appended."""
    rng = np.random.default_rng(2)
    clean, noisy = make_streams(rng, 2, 20, 1, 1, 1, 4, 4)
    clean, noisy = cast((clean, noisy), jnp.float64)
    both = two_stream_gated_delta(clean, noisy, block_size=4)
    alone = two_stream_gated_delta(Stream(*(a[1:] for a in clean)), Stream(*(a[1:] for a in noisy)), block_size=4)
    np.testing.assert_allclose(both.out[1:], alone.out, atol=1e-14)
    pad = lambda a, axis: jnp.concatenate([a, jnp.zeros_like(a)], axis)
    longer = two_stream_gated_delta(Stream(*(pad(a, 1) for a in clean)), Stream(*(pad(a, 2) for a in noisy)),
                                    block_size=4)
    np.testing.assert_allclose(longer.noisy_out[:, :, :20], both.noisy_out, atol=1e-14)
    np.testing.assert_allclose(longer.final_state, both.final_state, atol=1e-14)


@pytest.mark.parametrize("form", ["sequential", "folded"])
def test_a_packed_row_is_its_documents_one_by_one(x64, form):
    """The first document goes on from the given state, the next begins without one."""
    rng = np.random.default_rng(4)
    clean, noisy = cast(make_streams(rng, 1, 8, 1, 1, 2, 4, 4), jnp.float64)
    state = jnp.asarray(rng.normal(size=(1, 2, 4, 4)))
    run = jax.jit(lambda c, n, s, d: two_stream_gated_delta(c, n, block_size=2, documents=d, initial_state=s,
                                                            form=form)[:3])
    row = run(clean, noisy, state, jnp.asarray([[0] * 4 + [1] * 4]))
    for at, start in ((slice(0, 4), state), (slice(4, 8), jnp.zeros_like(state))):
        part = run(Stream(*(a[:, at] for a in clean)), Stream(*(a[:, :, at] for a in noisy)), start, None)
        np.testing.assert_allclose(row[0][:, at], part[0], atol=1e-13)
        np.testing.assert_allclose(row[1][:, :, at], part[1], atol=1e-13)
    np.testing.assert_allclose(row[2], part[2], atol=1e-13)
