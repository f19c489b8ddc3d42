"""Bad input is refused by name before anything compiles; unsupported shapes fall back with one warning."""
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Stream, dispatch, short_conv, two_stream_gated_delta, use_backend


def stream(lead=(1, 8), keys=1, heads=2, width=4, dtype=jnp.float32):
    z = lambda *s: jnp.zeros((*lead, *s), dtype)
    return Stream(z(keys, width), z(keys, width), z(heads, width), z(heads), z(heads))


@pytest.mark.parametrize("options, words", [
    (dict(block_size=3), "block_size=3 with chunk_size=64"),
    (dict(block_size=128), "block_size=128"),
    (dict(block_size=0), "block_size=0"),
    (dict(form="route_iii"), "form='route_iii'"),
    (dict(form="route_i", backend="tpu"), "form='route_i', .* only form 'folded'"),
    (dict(backend="rocm"), "backend 'rocm' is unknown"),
    (dict(backend="tpu"), r"head widths \(4, 4\)"),
    (dict(precision="float16"), "precision='float16'"),
    (dict(documents=jnp.zeros((1, 7), jnp.int32)), r"documents has shape \(1, 7\)"),
    (dict(documents=jnp.asarray([[0] * 3 + [1] * 5]), block_size=4), r"\(0, 3\), inside a block of 4"),
    (dict(initial_state=jnp.zeros((1, 2, 4, 5))), r"initial_state has shape \(1, 2, 4, 5\)"),
    (dict(return_states=True, backend="tpu"), "return_states=True; only form 'folded' without states"),
])
def test_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        two_stream_gated_delta(stream(), stream((1, 1, 8)), **options)


@pytest.mark.parametrize("change, words", [
    (dict(q=jnp.zeros((1, 8, 4))), r"clean.q has shape \(1, 8, 4\)"),
    (dict(k=jnp.zeros((1, 8, 1, 5))), "clean.q .* and clean.k .* differ"),
    (dict(g=jnp.zeros((1, 8, 3))), "clean.g has 3 heads"),
    (dict(beta=jnp.zeros((1, 9, 2))), "clean.beta has leading axes"),
    (dict(v=jnp.zeros((1, 8, 2, 4), jnp.int32)), "clean.v has dtype int32"),
])
def test_refuses_streams(change, words):
    with pytest.raises(ValueError, match=words):
        two_stream_gated_delta(stream()._replace(**change))


def test_refuses_views_of_another_length_or_none_of_them():
    with pytest.raises(ValueError, match="matching clean.q"):
        two_stream_gated_delta(stream(), stream((1, 1, 16)))
    with pytest.raises(ValueError, match="W = 0 views"):
        two_stream_gated_delta(stream(), stream((1, 0, 8)))


@pytest.mark.parametrize("name", Stream._fields)
def test_kernels_refuse_a_wide_array_by_name(x64, name):
    """One float64 array is enough: no kernel takes it."""
    noisy = stream((1, 1, 8), width=64)
    with pytest.raises(ValueError, match="dtype float64"):
        wide = noisy._replace(**{name: getattr(noisy, name).astype(jnp.float64)})
        two_stream_gated_delta(stream(width=64), wide, backend="tpu")


def test_products_follow_the_dtype_of_v():
    program = lambda precision: str(jax.make_jaxpr(
        lambda s: two_stream_gated_delta(s, precision=precision).out)(stream(dtype=jnp.bfloat16)))
    assert program(None) == program("bfloat16") != program("float32")


@pytest.mark.parametrize("tokens", [1, 20, 40, 100])
def test_gpu_kernels_take_any_number_of_tokens(tokens):
    """Short inputs get short chunks, which stay powers of two."""
    jax.eval_shape(lambda s: two_stream_gated_delta(s, backend="gpu"), stream((1, tokens), width=64))


def test_falls_back_with_one_warning():
    dispatch._warned.clear()
    with use_backend("tpu"):
        with pytest.warns(UserWarning, match="using the XLA form"):
            two_stream_gated_delta(stream())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            two_stream_gated_delta(stream())


def test_use_backend_refuses_unknown_names():
    with pytest.raises(ValueError, match="accepted"):
        with use_backend("cpu"):
            pass


def test_short_conv_refuses():
    x = jnp.zeros((1, 6, 4))
    with pytest.raises(ValueError, match="weight has shape"):
        short_conv(x, jnp.zeros((3, 4)))
    with pytest.raises(ValueError, match="noisy has shape"):
        short_conv(x, jnp.zeros((4, 4)), x)
    with pytest.raises(ValueError, match="state has shape"):
        short_conv(x, jnp.zeros((4, 4)), state=jnp.zeros((1, 4, 4)))


def test_short_conv_state_continues_a_sequence():
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(2, 11, 3)), jnp.float32), jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    whole, _, _ = short_conv(x, w)
    state, parts = None, []
    for piece in (x[:, :2], x[:, 2:3], x[:, 3:]):
        out, _, state = short_conv(piece, w, state=state)
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-6)
    np.testing.assert_array_equal(state, x[:, -3:])


def test_short_conv_state_forgets_earlier_documents():
    """Decoding on from a packed row reads the last document only; a carried state lasts as long as its document."""
    rng = np.random.default_rng(2)
    x, w = jnp.asarray(rng.normal(size=(3, 9, 3)), jnp.float32), jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    starts, before = (0, 4, 8), jnp.asarray(rng.normal(size=(3, 3, 3)), jnp.float32)
    documents = jnp.asarray([[int(t >= start) for t in range(9)] for start in starts])
    for state in (None, before):
        _, _, packed = short_conv(x[:, :8], w, documents=documents[:, :8], state=state)
        _, _, longer = short_conv(x, w, documents=documents, state=state)
        for row, start in enumerate(starts):
            carried = state[row:row + 1] if state is not None and start == 0 else None
            np.testing.assert_array_equal(longer[row:row + 1], short_conv(x[row:row + 1, start:], w, state=carried)[2])
            if start < 8:
                np.testing.assert_array_equal(packed[row:row + 1],
                                              short_conv(x[row:row + 1, start:8], w, state=carried)[2])


def test_short_conv_noisy_reads_clean_before_its_block():
    """Against the definition, token by token, with documents."""
    rng = np.random.default_rng(1)
    block, documents = 2, np.repeat([0, 1, 2], [4, 2, 4])[None]
    x, n, w = rng.normal(size=(1, 10, 2)), rng.normal(size=(1, 2, 10, 2)), rng.normal(size=(2, 4))
    out, noisy_out, _ = short_conv(*(jnp.asarray(a, jnp.float32) for a in (x, w, n)), block_size=block,
                                   documents=jnp.asarray(documents))
    first = [0] * 4 + [4] * 2 + [6] * 4
    for t in range(10):
        want = want_noisy = 0.0
        for lag in range(4):
            s = t - lag
            if s >= first[t]:
                want = want + w[:, lag] * x[0, s]
                want_noisy = want_noisy + w[:, lag] * (n[0, :, s] if s >= t // block * block else x[0, s])
        np.testing.assert_allclose(out[0, t], want, atol=1e-5)
        np.testing.assert_allclose(noisy_out[0, :, t], want_noisy, atol=1e-5)


@pytest.mark.parametrize("backend, kind, capability, problem", [
    ("tpu", "TPU v3", None, "older than TPU v4"), ("tpu", "TPU v5 lite", None, None),
    ("gpu", "NVIDIA H200", "9.0", None), ("gpu", "NVIDIA B200", "10.0", None),
    ("gpu", "Tesla V100", "7.0", "compute capability 8.0"),
    ("gpu", "AMD Instinct MI300X", "gfx942", "not an NVIDIA one")])
def test_old_chips_get_no_kernels(monkeypatch, backend, kind, capability, problem):
    class Device:
        device_kind, compute_capability = kind, capability
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    found = dispatch.device_problem(backend)
    assert found is None if problem is None else problem in found
    # ahead of time, for a chip that is not here
    assert dispatch.device_problem("gpu" if backend == "tpu" else "tpu") is None
