"""README's parts and decoder of one's own, run as they are printed there."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.decode import generate
from tests.conftest import ROOT
from tests.decode.masked_test import peaked, prompts

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.fixture(scope="module")
def printed():
    """The names that README's code defines."""
    names = {"decode": decode, "jnp": jnp}
    for block in BLOCKS:
        if "@decode.decoder" in block or "@flax.struct.dataclass" in block:
            exec(block, names)
    return names


def test_the_parts_run(printed):
    model, params = peaked(family="llada")
    out = generate(model, params, prompts(1, 2), printed["decoder"], max_new_tokens=[9, 14], eos_id=-1)
    assert [len(tokens) for tokens in out.tokens] == [9, 14]
    assert out.ledger.after_prefill().tolist() == [3 + 9, 3 + 14]  # nothing is sure: one a forward, after some steps


def test_the_decoder_is_greedy_decoding(printed):
    model, params = peaked(family="qwen3")
    options = dict(max_new_tokens=[9, 14, 1], eos_id=-1)
    own = generate(model, params, prompts(1, 3), printed["Greedy"](), **options)
    plain = generate(model, params, prompts(1, 3), decode.Autoregressive(), **options)
    for ours, plain in zip(own.tokens, plain.tokens):
        np.testing.assert_array_equal(ours, plain)
