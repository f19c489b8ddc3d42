"""Attention: both forms against float64, values and gradients, and the edges of the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from dlm_jax.nn import attention as module
from dlm_jax.nn import devices
from dlm_jax.nn import visibility as vis
from dlm_jax.nn.attention import CHUNK
from pallas_kernels import use_backend

attention = jax.jit(module.attention, static_argnames=("form", "scale"))  # op by op, compiling takes minutes


def draw_inputs(seed, B=2, T=10, S=13, N=4, K=2, H=8):
    draw = np.random.default_rng(seed)
    q, k, v = (draw.standard_normal(shape).astype(np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
    integers = lambda low, length: jnp.asarray(draw.integers(low, 6, (B, length)), jnp.int32)
    rule = vis.Visibility(integers(0, T), integers(-1, T), integers(-1, T), integers(-1, T),
                          integers(-1, S), integers(-1, S), integers(-1, S))
    return q, k, v, rule


def attend_float64(q, k, v, mask):
    k, v = (np.repeat(x.astype(np.float64), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q.astype(np.float64), k) / np.sqrt(q.shape[-1])
    weight = np.exp(logits) * mask[:, None]
    total = weight.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weight / np.where(total == 0, 1, total), v)


@pytest.mark.parametrize("form", ["reference", "chunked", "kernel"])
@pytest.mark.parametrize("T, S", [(10, 13), (CHUNK, 40), (CHUNK + 5, 200), (1, 30)])
def test_matches_float64(form, T, S):
    q, k, v, rule = draw_inputs(T, T=T, S=S)
    expected = attend_float64(q, k, v, np.asarray(rule.dense()))
    np.testing.assert_allclose(attention(q, k, v, rule, form=form), expected, atol=3e-6)


@pytest.mark.parametrize("T", [11, CHUNK + 3])
def test_forms_agree_in_gradients(T):
    q, k, v, rule = draw_inputs(T, T=T, S=20)
    target = np.random.default_rng(9).standard_normal(q.shape).astype(np.float32)
    grads = {form: jax.jit(jax.grad(lambda *x: jnp.sum(attention(*x, rule, form=form) * target), (0, 1, 2)))(q, k, v)
             for form in ("reference", "chunked", "kernel")}
    for a, b, c in zip(*grads.values()):
        assert float(jnp.abs(a).max()) > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5)
        np.testing.assert_allclose(a, c, atol=2e-5)


def test_one_rule_serves_every_row_in_every_form():
    q, k, v, rule = draw_inputs(5, B=3, T=9, S=9)
    once = vis.causal(jnp.ones((1, 9), bool))
    thrice = vis.causal(jnp.ones((3, 9), bool))
    for form in ("reference", "chunked", "kernel"):
        np.testing.assert_allclose(attention(q, k, v, once, form=form), attention(q, k, v, thrice), atol=2e-6)


@pytest.mark.parametrize("form", ["reference", "chunked", "kernel"])
def test_queries_that_see_nothing_give_zeros_and_finite_gradients(form):
    q, k, v, _ = draw_inputs(0, S=10)
    rule = vis.causal(jnp.zeros((2, 10), bool).at[:, 4:].set(True))
    out, grads = jax.jit(lambda *x: (attention(*x, rule, form=form), jax.grad(
        lambda *x: jnp.sum(attention(*x, rule, form=form)), (0, 1, 2))(*x)))(q, k, v)
    np.testing.assert_array_equal(out[:, :4], 0.0)
    assert (np.abs(out[:, 4:]) > 0).all()
    for grad in grads:
        assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grads[0][:, :4], 0.0)


def test_unseen_keys_have_no_influence_at_all():
    q, k, v, rule = draw_inputs(1)
    rule = vis.by_rank(rule.floor_q, rule.limit_q, jnp.where(jnp.arange(13) == 5, vis.NONE, rule.rank_k))
    assert bool(rule.dense().any())
    poisoned = [x.copy() for x in (k, v)]
    poisoned[0][:, 5], poisoned[1][:, 5] = 1e30, 1e30
    for form in ("reference", "chunked", "kernel"):
        np.testing.assert_array_equal(attention(q, k, v, rule, form=form), attention(q, *poisoned, rule, form=form))


def test_grouped_heads_equal_repeated_heads():
    q, k, v, rule = draw_inputs(2, N=6, K=2)
    np.testing.assert_allclose(attention(q, k, v, rule), attention(q, *(np.repeat(x, 3, 2) for x in (k, v)), rule),
                               atol=1e-6)


def test_dense_mask_scale_and_dtype():
    q, k, v, rule = draw_inputs(3)
    np.testing.assert_array_equal(attention(q, k, v, rule.dense()), attention(q, k, v, rule, form="reference"))
    scaled = attention(q * 0.5 * 8**0.5, k, v, rule)
    for form in ("reference", "chunked", "kernel"):
        np.testing.assert_allclose(attention(q, k, v, rule, scale=0.5, form=form), scaled, atol=1e-6)
    half = attention(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), rule)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), attention(q, k, v, rule), atol=0.05)


def test_large_logits_do_not_overflow():
    q, k, v, rule = draw_inputs(4)
    for form in ("reference", "chunked", "kernel"):
        assert np.isfinite(attention(q * 1e4, k * 1e4, v, rule, form=form)).all()


def test_chunked_memory_grows_linearly():
    def temporaries(form, T):
        shape = lambda heads: jax.ShapeDtypeStruct((1, T, heads, 16), jnp.float32)
        loss = lambda q, k, v: jnp.sum(attention(q, k, v, vis.causal(jnp.ones((1, T), bool)), form=form))
        exe = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape(2), shape(1), shape(1)).compile()
        return exe.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked", 4096) < 5 * temporaries("chunked", 1024)
    assert temporaries("reference", 4096) > 12 * temporaries("reference", 1024)


def wide(B=2, T=256, S=256, N=4, K=2, H=64, dtype="bfloat16"):
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, H), (B, S, K, H)))
    at = lambda length: jax.ShapeDtypeStruct((B, length), jnp.int32)
    return q, k, k, vis.Visibility(*[at(T)] * 4, *[at(S)] * 3)


@pytest.mark.parametrize("shape, kernel", [
    (dict(), True), (dict(T=200, S=300, H=128), True), (dict(T=module.FEW, H=256, dtype="float32"), True),
    (dict(T=module.FEW - 1), False), (dict(H=96), False), (dict(dtype="float16"), False)])
def test_only_programs_for_a_tpu_take_the_kernel_and_only_where_it_serves(shape, kernel):
    def takes(backend, **how):
        with use_backend(backend), devices.alone(how.pop("one", True)):
            return "pallas_call" in str(jax.make_jaxpr(lambda *x: module.attention(*x, **how))(*wide(**shape)))
    assert takes("tpu") == kernel
    assert not takes("xla") and not takes("tpu", form="chunked") and not takes("tpu", form="reference")
    if jax.device_count() > 1:
        assert not takes("tpu", one=False), "several devices, and no mesh says how they share"


def test_a_dense_mask_never_meets_the_kernel():
    q, k, v, _ = wide()
    with use_backend("tpu"), devices.alone():
        run = jax.make_jaxpr(module.attention)(q, k, v, jax.ShapeDtypeStruct((1, 256, 256), bool))
    assert "pallas_call" not in str(run)


@pytest.mark.parametrize("shape, kernel", [
    (dict(B=4), True), (dict(B=2), False), (dict(B=4, N=3, K=1), False)])
def test_devices_of_a_mesh_share_the_kernel_where_its_axes_divide_rows_and_heads(shape, kernel):
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    other = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    found = []
    for mesh in (mesh, other):
        with use_backend("tpu"), use_abstract_mesh(mesh):
            found.append(str(jax.make_jaxpr(module.attention)(*wide(**shape))))
    assert ("shard_map" in found[0]) == ("pallas_call" in found[0]) == kernel
    assert "pallas_call" not in found[1]


def test_what_auto_takes_in_interpretation_is_the_reference():
    q, k, v, rule = draw_inputs(6, B=1, T=module.FEW + 5, S=150)
    with use_backend("interpret"), devices.alone():
        got = jax.jit(lambda *x: module.attention(*x))(q, k, v, rule)
    np.testing.assert_allclose(got, attention(q, k, v, rule, form="reference"), atol=3e-6)


@pytest.mark.parametrize("change, message", [
    (dict(k=np.zeros((2, 13, 3, 8))), "4 query heads cannot share 3 KV heads"),
    (dict(form="flash"), "'flash'.*'chunked', 'kernel'"),
    (dict(visibility=vis.causal(jnp.ones((2, 13), bool))), r"\(13, 13\).*\(10, 13\)"),
    (dict(visibility=jnp.ones((2, 10, 12), bool)), r"\(10, 12\).*\(10, 13\)"),
    (dict(visibility=jnp.ones((2, 10, 13), bool), form="kernel"), "'kernel' takes a Visibility"),
])
def test_bad_input_is_named(change, message):
    q, k, v, rule = draw_inputs(0)
    with pytest.raises(ValueError, match=message):
        attention(**{**dict(q=q, k=k, v=v, visibility=rule), **change})
