"""Decoding with parameters sharded over 8 devices gives the tokens of one device."""

import numpy as np
import pytest

import jax
from dlm_jax.decode import generate
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from tests.decode.decode_test import DECODERS, peaked, prompts


@pytest.mark.parametrize("name", ["greedy", "refusion", "orthrus"])
def test_eight_devices_decode_as_one(name):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    model, params = peaked(0)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    spread = jax.device_put(params, sharding.params(model, mesh))
    rows = prompts(20, 3)
    one = generate(model, params, rows, DECODERS[name], max_new_tokens=20)
    many = generate(model, spread, rows, DECODERS[name], max_new_tokens=20)
    for a, b in zip(one.tokens, many.tokens):
        np.testing.assert_array_equal(a, b)
    assert one.ledger.totals() == many.ledger.totals()
