"""Training the second view of a dual model: the first stays as it is, and everything else a run promises holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax import decode
from dlm_jax.models import build, convert
from dlm_jax.objectives import Orthrus
from dlm_jax.train import loop, sharding, step
from dlm_jax.train.config import MeshConfig
from tests.train import toy

ORTHRUS = Orthrus(mask_id=23, block_size=4, blocks=3, head_chunk=5)
ONE = sharding.make_mesh(MeshConfig(), jax.devices()[:1])


@functools.cache
def _start():
    # weights large enough that the views disagree about more than rounding
    model, params = convert.init_from_ar(toy.MODEL, jax.tree.map(lambda x: 3 * x, toy.params()), mask_id=23)
    return model, params


def _config(**changes):
    return toy.config(**{"objective": ORTHRUS, "checkpoint_every": 100} | changes)


@functools.cache
def _step(config):
    mesh = sharding.make_mesh(config.mesh, jax.devices()[: 8 if config.mesh.fsdp > 1 else 1])
    return step.make_step(_start()[0], config, mesh)


def _train(steps=3, dtype=jnp.float32, **changes):
    config = _config(**changes)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[: 8 if config.mesh.fsdp > 1 else 1])
    model, params = _start()
    state, history = step.init_state(model, jax.tree.map(lambda x: x.astype(dtype), params), config, mesh), []
    for number in range(steps):
        state, metrics = _step(config)(state, jax.device_put(toy.Counting().batch(number), sharding.rows(mesh)))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


@pytest.fixture(scope="module")
def trained():
    return _train()


def test_only_the_diffusion_view_is_trained_and_has_optimiser_memory(trained):
    state, history = _train(dtype=jnp.bfloat16, compute_dtype="bfloat16")
    np.testing.assert_allclose(history[0]["loss"], trained[1][0]["loss"], rtol=0.05)
    _, params = _start()
    assert set(state.trainable) == {"layers"} and set(state.trainable["layers"]) == {"attention_diffusion"}
    assert "attention_diffusion" not in state.frozen["layers"]
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.trainable))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.frozen):
        start = functools.reduce(lambda tree, key: tree[key.key], path, params).astype(jnp.bfloat16)
        assert leaf.dtype == jnp.bfloat16 and np.asarray(leaf).tobytes() == np.asarray(start).tobytes(), path
    for name, leaf in state.trainable["layers"]["attention_diffusion"].items():
        assert (leaf != params["layers"]["attention"][name]).any(), name
    moments = sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert moments == 2 * 4 * build.parameter_shares(_start()[0])["diffusion"]


def test_a_trained_view_drafts_what_the_other_would_say(tmp_path):
    fit = lambda model, params, config, name: loop.fit(
        model, params, toy.Counting(), config, tmp_path / name, progress=False, devices=jax.devices()[:1])
    brief = lambda steps: dict(steps=steps, checkpoint_every=steps, log_every=steps, schedule="cosine", epsilon=1e-8)
    seed = fit(toy.MODEL, toy.params(), toy.config(**brief(150)), "seed")
    dual, params = convert.init_from_ar(toy.MODEL, seed.params, mask_id=23)
    result = fit(dual, params, _config(**brief(80)), "dual")
    first, last = result.history
    # a copy of the AR view is one token ahead already: it reads the anchor and what comes before
    assert first["agreement_1"] > 0.9 and first["agreement_2"] < 0.5 and first["accepted"] < 1.5
    assert first["loss"] == first["kl"] > 1.0 and last["loss"] < 0.1
    assert last["overlap"] > 0.9 and last["accepted"] > 2.8
    prompts = [[3, 4, 5, 6], [9, 10, 11, 12, 13]]
    want, got = (dlm_jax.generate(dual, result.params, prompts, decoder, max_new_tokens=12, eos_id=None)
                 for decoder in (decode.Autoregressive(), decode.Orthrus(block_size=4)))
    for row in range(2):
        np.testing.assert_array_equal(got.tokens[row], want.tokens[row])
        assert got.ledger.forwards["verify"][row] <= 4 < want.ledger.forwards["decode"][row]


def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    model, params = _start()
    fit = lambda folder, **more: loop.fit(model, params, toy.Counting(), _config(steps=6, checkpoint_every=2), folder,
                                          progress=False, devices=jax.devices()[:1], **more)
    whole = fit(tmp_path / "whole")
    original = toy.Counting.__next__

    def killed(self):
        if self.next == 5:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(toy.Counting, "__next__", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "run")
    resumed = fit(tmp_path / "run", resume=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), resumed.params, whole.params)
    timeless = lambda lines: [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
    assert timeless(resumed.history) == timeless(whole.history)


def test_eight_devices_train_like_one(trained):
    state, history = _train(mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    for name in history[0]:
        np.testing.assert_allclose([line[name] for line in history], [line[name] for line in trained[1]], rtol=1e-4,
                                   atol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.trainable, trained[0].trainable)


@pytest.mark.parametrize("changes", [
    {"grad_accumulation": 4}, {"remat": True}, {"objective": Orthrus(mask_id=23, block_size=4, blocks=3)}],
    ids=["pieces of the batch", "remat", "whole head"])
def test_what_saves_memory_changes_nothing(trained, changes):
    state, history = _train(**changes)
    for name in history[0]:
        np.testing.assert_allclose([line[name] for line in history], [line[name] for line in trained[1]], rtol=2e-5,
                                   atol=1e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.trainable, trained[0].trainable)


@pytest.mark.parametrize("pattern, message", [
    ("q_proj", "'q_proj' matches layers/attention/q_proj, but the objective 'orthrus' trains only"),
    ("embed", "'embed' matches embed, but"), ("lora", "'lora' matches no parameter")])
def test_patterns_beyond_the_diffusion_view_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        step.make_step(_start()[0], _config(trainable=pattern), ONE)


def test_a_part_of_the_diffusion_view_can_be_trained():
    config, (model, params) = _config(trainable="attention_diffusion/[qkv]_proj"), _start()
    state = step.init_state(model, params, config, ONE)
    assert set(state.trainable["layers"]["attention_diffusion"]) == {"q_proj", "k_proj", "v_proj"}


def test_models_of_the_wrong_kind_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="qwen3 model has no diffusion view.*to-orthrus"):
        loop.fit(toy.MODEL, toy.params(), toy.Counting(), _config(), tmp_path / "run", devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="objective 'autoregressive' would train both views of a dual model"):
        loop.fit(*_start(), toy.Counting(), toy.config(), tmp_path / "run", devices=jax.devices()[:1])
    assert not (tmp_path / "run").exists()
