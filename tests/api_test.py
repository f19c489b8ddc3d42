"""The public surface: names, and errors of `forward` that come before any compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax.models import build
from tests.conftest import random_params


def test_every_public_name_exists():
    for name in dlm_jax.__all__:
        assert getattr(dlm_jax, name) is not None
        assert name in dir(dlm_jax)
    with pytest.raises(AttributeError, match="'lode'.*load"):
        dlm_jax.lode


@pytest.mark.parametrize("change, message", [
    (dict(tokens=[[1, 2], [3, 97]]), r"token id 97 \(row 1, column 1\).*97 ids"),
    (dict(tokens=[[-1]]), "token id -1"),
    (dict(tokens=[1, 2]), r"shape \(2,\).*\(batch, length\)"),
    (dict(tokens=np.zeros((0, 3), int)), "neither empty"),
    (dict(tokens=[[1.0]]), "dtype float64; expected integers"),
    (dict(positions=[[0.0, 1.0]]), "positions has dtype"),
    (dict(positions=[[0, 1, 2]]), r"positions has shape \(1, 3\).*\(1, 2\)"),
    (dict(visibility=np.ones((1, 3, 3), bool)), r"\(3, 3\).*\(2, 2\)"),
])
def test_forward_names_bad_input_before_compiling(tiny, change, message):
    arguments = dict(tokens=[[1, 2]]) | change
    with pytest.raises(ValueError, match=message):
        dlm_jax.forward(*tiny, **arguments)


def test_forward_takes_lists_and_arrays_and_works_inside_jit(tiny):
    rows = [[1, 2, 3]]
    expected = dlm_jax.forward(*tiny, rows)
    assert expected.shape == (1, 3, 97) and expected.dtype == jnp.float32
    np.testing.assert_array_equal(dlm_jax.forward(*tiny, jnp.array(rows)), expected)
    inside = jax.jit(lambda params, tokens: dlm_jax.forward(tiny[0], params, tokens))
    np.testing.assert_allclose(inside(tiny[1], jnp.array(rows)), expected, atol=1e-6)


def test_loading_over_a_mesh(tiny, tmp_path):
    from dlm_jax.train import sharding
    from dlm_jax.train.config import MeshConfig

    model = build.build(tiny[0].config.replace(vocab_size=96))
    params = random_params(model)
    dlm_jax.save(tmp_path / "m", model, params)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    _, spread = dlm_jax.load(tmp_path / "m", dtype=jnp.bfloat16, mesh=mesh)
    assert spread["layers"]["mlp"]["up_proj"].sharding.spec == jax.P(None, "fsdp", "tensor")
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), spread, params)


def test_loading_with_what_a_config_leaves_out(tiny, tmp_path):
    plain = build.build(tiny[0].config.replace(family="qwen2", mask_token_id=None))
    params = random_params(plain)
    dlm_jax.save(tmp_path / "m", plain, params)
    asked = dlm_jax.decode.MaskedDiffusion(schedule=dlm_jax.decode.Blocks(4))
    read = lambda **config: dlm_jax.load(tmp_path / "m", config=config)
    with pytest.raises(ValueError, match="needs a bidirectional model"):
        dlm_jax.generate(*read(), [[1, 2]], asked, max_new_tokens=4)
    shifted = dlm_jax.conventions.Conventions(logits="shifted")
    model, found = read(conventions=shifted, mask_token_id=7)
    assert (model.config.bidirectional, model.config.shift, model.config.mask_token_id) == (True, 1, 7)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    dlm_jax.decode.Runner(model, found, asked)
    with pytest.raises(ValueError, match=r"config has \['mask_id'\].*mask_token_id"):
        read(mask_id=7)
