"""Small dual models for tests of lossless decoding: one trained a little, so that its drafts are often right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.models.layers import VIEWS
from dlm_jax.objectives import Autoregressive, Orthrus
from dlm_jax.train.state import merge, partition

V, MASK, EOS, LENGTH = 32, 31, 1, 24


def config(**changes) -> TransformerConfig:
    fields = dict(
        family="orthrus", vocab_size=V, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, rope_theta=1e4, max_position_embeddings=512, initializer_range=0.1,
        eos_token_id=EOS, mask_token_id=MASK)
    return TransformerConfig(**{**fields, **changes})


def batch(number: int, rows: int = 32) -> dict[str, np.ndarray]:
    """Rows that count by 1, 2 or 3 from a random start to 29, with a wrong token now and then, and end in EOS."""
    draw = np.random.default_rng(number)
    tokens = np.zeros((rows, LENGTH), np.int32)
    length = np.zeros(rows, np.int32)
    for row in range(rows):
        run = np.arange(draw.integers(2, 16), 30, draw.integers(1, 4))[: LENGTH - 1]
        run = np.where(draw.random(len(run)) < 0.06, draw.integers(2, 30, len(run)), run)
        length[row] = len(run) + 1
        tokens[row, : len(run)], tokens[row, len(run)] = run, EOS
    inside = np.arange(LENGTH) < length[:, None]
    return {"tokens": tokens, "length": length, "prompt_length": np.ones(rows, np.int32),
            "loss_mask": inside & (np.arange(LENGTH) > 0),
            "example_id": np.arange(rows, dtype=np.int32) + rows * number}


def fitted(model, params, objective, trainable, steps, rate):
    chosen, frozen = partition(params, trainable)
    optimizer = optax.adam(rate)

    @jax.jit
    def step(chosen, state, batch, number):
        key = jax.random.key(number)
        loss = lambda chosen: objective.loss(model.scorer(merge(chosen, frozen)), batch, key)[0]
        updates, state = optimizer.update(jax.grad(loss)(chosen), state, chosen)
        return optax.apply_updates(chosen, updates), state

    state = optimizer.init(chosen)
    for number in range(steps):
        chosen, state = step(chosen, state, batch(number), np.uint32(number))
    return merge(chosen, frozen)


@functools.cache
def trained():
    """(model, params): an AR view that counts, and a diffusion view that has learnt to run ahead of it."""
    model = build.build(config())
    params = jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(0))
    params = fitted(model, params, Autoregressive(), "^(?!.*attention_diffusion)", 300, 5e-3)
    params["layers"]["attention_diffusion"] = jax.tree.map(jnp.copy, params["layers"]["attention"])
    objective = Orthrus(mask_id=MASK, block_size=8, blocks=6)
    return model, fitted(model, params, objective, VIEWS[objective.trains], 300, 5e-3)


@functools.cache
def untrained(seed: int = 0):
    """(model, params) of random weights large enough for peaked distributions."""
    model = build.build(config(initializer_range=0.35))
    return model, jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(seed))


def prompts(seed: int, count: int) -> list[list[int]]:
    """Ragged prompts: half of them begin to count, half are noise."""
    draw = np.random.default_rng(seed)
    counting = lambda: np.arange(draw.integers(2, 16), 30, draw.integers(1, 4))[: draw.integers(1, 9)]
    noise = lambda: draw.integers(2, 30, draw.integers(1, 14))
    return [(counting() if i % 2 else noise()).tolist() for i in range(count)]
