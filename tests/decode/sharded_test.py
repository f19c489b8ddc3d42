"""Decoding over 8 devices, rows over the data axes and heads over the tensor axis, gives the tokens of one device."""

import numpy as np
import pytest

import jax
from dlm_jax.decode import BlockDiffusion, Editing, Runner, generate
from dlm_jax.models import build
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from tests.conftest import random_params, tiny_config
from tests.decode.decode_test import DECODERS, peaked, prompts
from tests.models.mixtures import mixture_config

MESHES = [dict(data=1, fsdp=4, tensor=2), dict(data=2, fsdp=2, tensor=2), dict(data=8)]


def spread(model, params, sizes):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    return jax.device_put(params, sharding.params(model, sharding.make_mesh(MeshConfig(**sizes))))


@pytest.mark.parametrize("name, sizes", [
    ("greedy", MESHES[0]), ("greedy", MESHES[1]), ("sampled", MESHES[2]), ("refusion", MESHES[1]),
    ("orthrus", MESHES[1]), ("ar_trust_sampled", MESHES[1])])
def test_eight_devices_decode_as_one(name, sizes):
    model, params = peaked(0)
    rows = prompts(20, 3)  # which no mesh divides
    one = generate(model, params, rows, DECODERS[name], max_new_tokens=20)
    many = generate(model, spread(model, params, sizes), rows, DECODERS[name], max_new_tokens=20)
    for a, b in zip(one.tokens, many.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.ledger.totals() == many.ledger.totals()


def test_devices_that_share_a_vocabulary_read_their_own_rows_of_every_tile():
    """The head's table is never gathered: a tile has as many rows on each device."""
    model = build.build(tiny_config("qwen3", vocab_size=1024, num_layers=1))
    params = spread(model, random_params(model), dict(data=4, tensor=2))
    tile = jax.jit(lambda params, hidden, index: model.scorer(params).head_tile(hidden, index, 2)[0])
    text = tile.lower(params, np.zeros((2, 3, 32), np.float32), np.int32(0)).compile().as_text()
    assert "f32[256," in text and "f32[512,32]" in text  # a device's part of 512 logits, and its rows of the table
    assert "1024" not in text, "some device holds the whole table"


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


@pytest.mark.parametrize("sizes", MESHES[:2])
def test_eight_devices_share_experts_as_one_has_them(sizes):
    model = build.build(mixture_config("llada2_moe", vocab_size=96, mask_token_id=95, block_size=4))
    params, rows = random_params(model), prompts(20, 3)
    decoder = BlockDiffusion(editing=Editing(0.5, 2))
    one = generate(model, params, rows, decoder, max_new_tokens=6)
    many = generate(model, spread(model, params, sizes), rows, decoder, max_new_tokens=6)
    for a, b in zip(one.tokens, many.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.ledger.totals() == many.ledger.totals()
