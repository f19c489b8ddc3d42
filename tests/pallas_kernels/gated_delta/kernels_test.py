"""Mosaic and Triton kernels of the gated delta rule: parity in interpretation, memory faults and races, lowering."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Stream, two_stream_gated_delta
from pallas_kernels.gated_delta import folded_gpu, folded_tpu, folded_xla
from pallas_kernels.gated_delta.chunk import Operands, Plan
from pallas_kernels.gated_delta.streams import document_starts


def setup(block, views, documents, key_heads=1, heads=2, tokens=48, chunk=16, batch=1, dtype=jnp.float32):
    rng = np.random.default_rng(block)
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)

    def stream(lead):
        parts = (unit(rng.normal(size=(*lead, key_heads, 8))), unit(rng.normal(size=(*lead, key_heads, 8))),
                 rng.normal(size=(*lead, heads, 12)), -rng.random((*lead, heads)), rng.random((*lead, heads)))
        return Stream(*(jnp.asarray(a, dtype) for a in parts))
    clean, noisy = stream((batch, tokens)), stream((batch, views, tokens)) if views else None
    starts = None
    if documents:
        numbers = np.cumsum(rng.random((batch, tokens // block)) < 0.3, 1).repeat(block, 1)
        starts = document_starts(jnp.asarray(numbers, jnp.int32), True)
    state = jnp.asarray(rng.normal(size=(batch, heads, 8, 12)), jnp.float32)
    return Plan(block, 8 ** -0.5, Operands(jnp.dtype("float32")), documents), chunk, clean, noisy, starts, state


def run(module, arguments, **options):
    plan, chunk, clean, noisy, starts, state = arguments

    def both(clean, noisy, state):
        out, noisy_out, final, kept = module.forward(plan, chunk, clean, noisy, starts, state, True, **options)
        bend = lambda a: None if a is None else jnp.cos(a)
        return (out, noisy_out, final), module.backward(plan, chunk, clean, noisy, starts, kept, bend(out), bend(noisy_out),
                                                        bend(final), **options)
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(both)(clean, noisy, state))]


@pytest.mark.parametrize("module, block, views, documents", [
    (folded_tpu, 4, 2, True), pytest.param(folded_gpu, 4, 2, True, marks=pytest.mark.slow),
    pytest.param(folded_tpu, 16, 1, False, marks=pytest.mark.slow), pytest.param(folded_gpu, 1, 1, False, marks=pytest.mark.slow),
    pytest.param(folded_tpu, 1, 0, True, marks=pytest.mark.slow), pytest.param(folded_gpu, 1, 0, True, marks=pytest.mark.slow)])
def test_kernel_matches_xla(module, block, views, documents):
    arguments = setup(block, views, documents)
    for got, want in zip(run(module, arguments, interpret=True), run(folded_xla, arguments), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.slow
def test_no_races_or_stray_memory():
    """The TPU interpreter with race detection on a grid of two heads and two chunks."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    arguments = setup(4, 1, True, tokens=32)
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    for got, want in zip(run(folded_tpu, arguments, interpret=params), run(folded_xla, arguments), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("dtype, block", [(jnp.bfloat16, 4), pytest.param(jnp.float32, 64, marks=pytest.mark.slow)])
def test_triton_lowering(lower_for_gpu, dtype, block):
    """Forward and backward lower for CUDA; nothing is compiled further or run."""
    make = lambda lead, tail, kind: jax.ShapeDtypeStruct((*lead, *tail), kind)
    stream = lambda lead: Stream(make(lead, (2, 128), dtype), make(lead, (2, 128), dtype), make(lead, (4, 128), dtype),
                                 make(lead, (4,), jnp.float32), make(lead, (4,), jnp.float32))

    def training(clean, noisy, documents):
        outs, pullback = jax.vjp(lambda c, n: two_stream_gated_delta(c, n, block_size=block, documents=documents,
                                                                     backend="gpu")[:3], clean, noisy)
        return outs, pullback(outs)
    text = lower_for_gpu(training, stream((1, 128)), stream((1, 2, 128)), make((1, 128), (), jnp.int32))
    assert text.count("triton") >= 2
