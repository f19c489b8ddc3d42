"""Hybrid models at work: one program or many layers, several devices, gradients, decoding, rows that come and go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax import objectives
from dlm_jax.decode import Autoregressive, ReFusion, Runner, generate, join
from dlm_jax.models import build, convert
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass, Streams
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from pallas_kernels import use_backend
from tests.conftest import random_params, tiny_config
from tests.models.hybrids import DELTA, EXPERTS, draw, hybrid

MESH = dict(data=2, fsdp=2, tensor=2)


def even():
    """A model whose every axis two devices share."""
    return hybrid("qwen3_next", vocab_size=96, moe=dataclasses.replace(EXPERTS, experts=4))


def total(model, params, tokens):
    """A sum over the outputs of rows of [clean | one view]; of two documents each."""
    B, L = tokens.shape[0], tokens.shape[1] // 2
    documents = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32) // 8, (B, L))
    told = Pass(jnp.tile(jnp.arange(L), (B, 2)), vis.causal(jnp.ones(tokens.shape, bool)),
                recurrence=Streams(documents, 1, 4))
    score = model.scorer(params)
    logits = score.head(score.hidden(tokens, told)[0])
    return jnp.mean(jax.nn.log_softmax(logits)[..., 5])


def test_eight_devices_compute_what_one_does():
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    (model, params), tokens = even(), draw((4, 32), vocabulary=96)
    run = lambda model: jax.jit(jax.value_and_grad(lambda params, tokens: total(model, params, tokens)))
    want = run(model)(params, tokens)
    mesh = sharding.make_mesh(MeshConfig(**MESH))
    spread = jax.device_put((params, tokens), (sharding.params(model, mesh), sharding.rows(mesh)))
    with sharding.activate(mesh):
        got = run(dataclasses.replace(model, remat=True))(*spread)
    # on one device float32 is itself 6e-5 of the largest gradient from float64
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4 * max(np.abs(b).max(), 1e-2))
    jax.tree.map(near, got, want)
    experts = spread[0]["layers"]["layer_1"]["moe"]["up_proj"]
    assert experts.sharding.shard_shape(experts.shape) == (2, 2, 16, 12)  # layers, experts / tensor, embed / fsdp
    conv = spread[0]["layers"]["layer_0"]["gated_delta"]["v_conv"]
    assert conv.sharding.shard_shape(conv.shape) == (2, 2, 6, 4)
    blank = jax.tree_util.tree_flatten_with_path(want[1])[0]
    assert not [path for path, x in blank if not np.any(np.asarray(x))], "every parameter has a gradient"


def test_layers_of_their_own_are_the_same_network():
    model, params = hybrid("qwen3_next")
    tokens = draw((2, 9))
    plain, unrolled = dlm_jax.forward(model, params, tokens), dlm_jax.forward(*build.unroll(model, params), tokens)
    np.testing.assert_allclose(plain, unrolled, atol=1e-4)


def greedy(model, params, prompt, tokens):
    """Greedy decoding by recomputing a row of one length over and over."""
    row = jnp.zeros((1, 24), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt))
    for index in range(len(prompt), len(prompt) + tokens):
        row = row.at[0, index].set(jnp.argmax(dlm_jax.forward(model, params, row)[0, index - 1]))
    return row[0, len(prompt): len(prompt) + tokens].tolist()


def test_rows_decode_as_they_would_alone_and_come_and_go():
    model, params = even()
    rows, newcomer, limits = [[5, 6, 7, 8, 9], [3]], [8, 1, 4], [3, 9]
    want = [greedy(model, params, row, limit) for row, limit in zip(rows, limits)]
    runner = Runner(model, params, Autoregressive())
    batch = runner.run(runner.start(runner.request(rows, max_new_tokens=limits, eos_id=-1)), steps=4)
    first, batch = runner.release(batch, [0])
    done = runner.read(runner.run(runner.admit(batch, 0, newcomer, max_new_tokens=6)), [0, 1])
    assert [first.tokens[0].tolist(), done.tokens[1].tolist()] == want
    assert done.tokens[0].tolist() == greedy(model, params, newcomer, 6)


def test_eight_devices_decode_as_one():
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    model, params = even()
    rows = [[5, 6, 7, 8, 9], [3], [4, 4]]
    spread = jax.device_put(params, sharding.params(model, sharding.make_mesh(MeshConfig(**MESH))))
    runs = [generate(model, p, rows, Autoregressive(), max_new_tokens=6, eos_id=-1) for p in (params, spread)]
    for one, many in zip(*(run.tokens for run in runs)):
        np.testing.assert_array_equal(one, many)


def test_fresh_parameters_are_fit_to_train():
    model, _ = hybrid("qwen3_next")
    params = jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(0))
    delta = params["layers"]["layer_0"]["gated_delta"]
    assert np.all(np.exp(delta["a_log"]) <= 16) and np.all(delta["dt_bias"] == 1)
    assert 0.3 < np.abs(delta["q_conv"]).max() <= 0.5 and np.any(delta["q_conv"] < -0.1)
    assert not np.any(params["final_norm"]), "a zero-centred scale"
    grads = jax.jit(jax.grad(lambda p: jnp.mean(model.scorer(p)(draw((1, 8)))[..., 5])))(params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(grads))


def test_only_on_a_mesh_do_several_devices_run_kernels_each_on_its_own():
    """Outside of one, compilers would be asked to split a kernel, which they do not."""
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    model, _ = hybrid(vocab_size=96, gated_delta=dataclasses.replace(DELTA, key_dim=64, value_dim=64))
    mesh = sharding.make_mesh(MeshConfig(**MESH))
    described = lambda tree, of: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, of)
    params, tokens = build.abstract_params(model), jax.ShapeDtypeStruct((4, 128), jnp.int32)
    spread = described(params, sharding.params(model, mesh)), described(tokens, sharding.rows(mesh))

    def lowered(*arguments):
        run = jax.jit(lambda params, tokens: total(model, params, tokens))
        with use_backend("tpu"):
            return run.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()

    with sharding.activate(mesh):
        assert "tpu_custom_call" in lowered(*spread)
    assert "tpu_custom_call" in lowered(*spread), "arrays that are spread over a mesh tell it themselves"
    assert "tpu_custom_call" not in lowered(params, tokens)


def test_procedures_that_a_state_cannot_follow_are_refused():
    model, params = hybrid()
    with pytest.raises(ValueError, match="ReFusion reads tokens in an order of its own.*recurrent layers.*ARTrust"):
        generate(model, params, [[5]], ReFusion(), max_new_tokens=4, mask_id=96)
    with pytest.raises(ValueError, match="ReFusion reads tokens in an order of its own.*the objective Flare"):
        objectives.ReFusion(mask_id=96).check(model.scorer(params))
    drafter = build.build(tiny_config("llada"))
    with pytest.raises(ValueError, match="the guide, a qwen3_5_text, has recurrent layers"):
        join(drafter, random_params(drafter), model, params)
    for make in (lambda: convert.init_from_ar(model, params, 96), lambda: convert.denoiser(model.config, 1)):
        with pytest.raises(ValueError, match="a qwen3_5_text model has recurrent layers, which go one way"):
            make()
