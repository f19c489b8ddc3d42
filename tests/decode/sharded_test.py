"""Decoding over 8 devices, rows over the data axes and heads over the tensor axis, gives the tokens of one device."""

import numpy as np
import pytest

import jax
from dlm_jax.decode import Runner, generate
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from tests.decode.decode_test import DECODERS, peaked, prompts

MESHES = [dict(data=1, fsdp=4, tensor=2), dict(data=2, fsdp=2, tensor=2), dict(data=8)]


def spread(model, params, sizes):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    return jax.device_put(params, sharding.params(model, sharding.make_mesh(MeshConfig(**sizes))))


@pytest.mark.parametrize("name, sizes", [
    ("greedy", MESHES[0]), ("greedy", MESHES[1]), ("sampled", MESHES[2]), ("refusion", MESHES[1]),
    ("orthrus", MESHES[1])])
def test_eight_devices_decode_as_one(name, sizes):
    model, params = peaked(0)
    rows = prompts(20, 3)  # which no mesh divides
    one = generate(model, params, rows, DECODERS[name], max_new_tokens=20)
    many = generate(model, spread(model, params, sizes), rows, DECODERS[name], max_new_tokens=20)
    for a, b in zip(one.tokens, many.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.ledger.totals() == many.ledger.totals()


def test_each_device_holds_its_rows_and_heads_and_newcomers_are_taken_in():
    model, params = peaked(0)
    runner = Runner(model, spread(model, params, MESHES[1]), DECODERS["greedy"])
    prompt = prompts(21, 5)
    rows = runner.run(runner.start(runner.request(prompt, max_new_tokens=20)))
    held = lambda x: x.sharding.shard_shape(x.shape)
    assert rows.request.batch == 8 and held(rows.request.prompt)[0] == 2
    keys = jax.tree.leaves(rows.state.cache)[0]  # layers, rows, heads, entries, width
    assert held(keys) == (keys.shape[0], 2, 1, *keys.shape[3:])
    want = runner.read(rows, [0]).tokens[0]
    rows = runner.run(runner.admit(rows, 4, prompt[0], max_new_tokens=20))
    np.testing.assert_array_equal(runner.read(rows, [4]).tokens[0], want)
