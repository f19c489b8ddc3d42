"""Mosaic and Triton kernels of the gated delta rule: parity in interpretation, memory faults and races, lowering."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Stream, dispatch, two_stream_gated_delta
from pallas_kernels.gated_delta import arg_specs, folded_gpu, folded_tpu, folded_xla
from pallas_kernels.gated_delta.chunk import Operands, Plan
from pallas_kernels.gated_delta.streams import document_starts


def setup(block, views, documents, batch=2, key_heads=2, heads=4, tokens=48, chunk=16):
    """Arguments of a kernel's forward; rows have documents of their own, and key heads are shared in pairs."""
    rng = np.random.default_rng(block)
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)

    def stream(lead):
        parts = (unit(rng.normal(size=(*lead, key_heads, 8))), unit(rng.normal(size=(*lead, key_heads, 8))),
                 rng.normal(size=(*lead, heads, 12)), -rng.random((*lead, heads)), rng.random((*lead, heads)))
        return Stream(*(jnp.asarray(a, jnp.float32) for a in parts))
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
        *outs, kept = module.forward(plan, chunk, clean, noisy, starts, state, True, **options)
        cotangents = (None if a is None else jnp.cos(a) for a in outs)
        return outs, module.backward(plan, chunk, clean, noisy, starts, kept, *cotangents, **options)
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(both)(clean, noisy, state))]


@pytest.mark.parametrize("block, views, documents", [
    (4, 2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((16, 1, False), (1, 0, True)))])
def test_kernels_match_xla(block, views, documents):
    arguments = setup(block, views, documents)
    for got, want in zip(run(folded_tpu, arguments, interpret=True), run(folded_xla, arguments), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("block, views, documents", [
    (4, 2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1, False), (1, 0, True)))])
def test_gpu_gradients_match_the_recurrence(monkeypatch, block, views, documents):
    """The public operation on backend "gpu", its kernel interpreted: a Triton forward under an XLA backward pass."""
    monkeypatch.setattr(folded_gpu, "forward", functools.partial(folded_gpu.forward, interpret=True))
    shape = arg_specs.GatedDeltaShape(2, 40, 2, 4, 64, 64, max(views, 1), "float32")
    clean, noisy = arg_specs.random_streams(shape)
    starts = jnp.zeros((2, 40), jnp.int32).at[0, 12::16].set(1).at[1, 20].set(1)
    numbers = jnp.cumsum(starts, 1) if documents else None
    state = jax.random.normal(jax.random.key(1), (2, 4, 64, 64))

    def values_and_gradients(clean, noisy, state, **options):
        def run(clean, noisy, state):
            return two_stream_gated_delta(clean, noisy, block_size=block, chunk_size=16, documents=numbers,
                                          initial_state=state, **options)
        outs, pullback = jax.vjp(run, clean, noisy, state)
        return outs, pullback(jax.tree.map(jnp.cos, outs))
    arguments = clean, noisy if views else None, state
    got, want = (jax.tree.leaves(jax.jit(functools.partial(values_and_gradients, **options))(*arguments))
                 for options in (dict(backend="gpu"), dict(form="sequential")))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.slow
def test_no_races_or_stray_memory():
    """The TPU interpreter with race detection on a grid of two heads and two chunks."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    arguments = setup(4, 1, True, batch=1, key_heads=1, heads=2, tokens=32)
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    for got, want in zip(run(folded_tpu, arguments, interpret=params), run(folded_xla, arguments), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("dtype, width, block", [
    ("bfloat16", 128, 4), pytest.param("float32", 64, 64, marks=pytest.mark.slow)])
def test_triton_lowering(lower_for_gpu, dtype, width, block):
    """A training step lowers for CUDA with one kernel, the forward's; nothing is compiled further or run."""
    streams = arg_specs.abstract_streams(arg_specs.GatedDeltaShape(1, 128, 2, 4, width, width, 2, dtype))

    def training(clean, noisy, documents):
        outs, pullback = jax.vjp(lambda c, n: two_stream_gated_delta(c, n, block_size=block, documents=documents,
                                                                     backend="gpu")[:3], clean, noisy)
        return outs, pullback(outs)
    text = lower_for_gpu(training, *streams, jax.ShapeDtypeStruct((1, 128), jnp.int32))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


# chunk, key width, value width, views, products; bytes Triton's passes allocate (results/triton_resources.md)
ALLOCATIONS = [
    (64, 128, 128, 0, "bfloat16", 163_840), (64, 128, 128, 1, "bfloat16", 196_608),
    (64, 128, 128, 2, "bfloat16", 229_376), (64, 64, 64, 1, "bfloat16", 139_264),
    (64, 128, 256, 0, "bfloat16", 196_608), (64, 256, 128, 0, "bfloat16", 229_376),
    (32, 64, 64, 2, "bfloat16", 28_672), (32, 128, 256, 1, "bfloat16", 131_072),
    (16, 256, 128, 2, "bfloat16", 106_496), (32, 128, 128, 2, "float32", 131_072),
    (64, 64, 64, 1, "float32", 196_608), (64, 64, 64, 4, "float32", 196_608),
    (64, 128, 128, 3, "bfloat16", 262_144), (64, 256, 256, 1, "bfloat16", 360_448),
    (128, 64, 64, 0, "bfloat16", 434_176), (64, 128, 128, 1, "float32", 360_448),
    (16, 128, 256, 0, "float32", 262_144)]


@pytest.mark.parametrize("chunk, key_width, value_width, views, products, allocated", ALLOCATIONS)
def test_no_gpu_kernel_asks_for_more_than_a_block_has(chunk, key_width, value_width, views, products, allocated):
    """What fits a Hopper block is taken, what does not is refused by name before anything is lowered."""
    limit = dispatch.shared_memory()
    estimate = folded_gpu.shared_memory(chunk, key_width, value_width, views, jnp.dtype(products))
    assert estimate >= allocated
    shape = arg_specs.GatedDeltaShape(1, chunk, 1, 1, key_width, value_width, max(views, 1), products)
    clean, noisy = arg_specs.abstract_streams(shape)
    call = functools.partial(two_stream_gated_delta, chunk_size=chunk, backend="gpu")
    arguments = (clean, noisy) if views else (clean,)
    if allocated <= limit:
        jax.eval_shape(call, *arguments)
    else:
        with pytest.raises(ValueError, match=f"{estimate} bytes of shared memory for a chunk of {chunk} tokens"):
            jax.eval_shape(call, *arguments)


def test_a_smaller_gpu_is_asked_how_much_it_has(monkeypatch):
    class Device:
        device_kind, compute_capability, shared_memory_per_block_optin = "NVIDIA A100", "8.0", 166_912
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    clean, noisy = arg_specs.abstract_streams(arg_specs.SHAPES["paper"])
    run = functools.partial(two_stream_gated_delta, backend="gpu")
    jax.eval_shape(run, clean)
    with pytest.raises(ValueError, match="196608 bytes .*a block here has 166912"):
        jax.eval_shape(run, clean, noisy)
