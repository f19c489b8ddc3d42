"""Tiny models made in a minute: something to decode where no checkpoint is at hand.

They tell three sentences about two things. Most tokens follow from the others, some are copied from the question, and
one is a sum: what is sure at once, and what only later, differs from token to token, as it does in a large model.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax

from dlm_jax.data import sources
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.data.pipeline import Pipeline
from dlm_jax.models import build, convert
from dlm_jax.models.config import TransformerConfig
from dlm_jax.objectives import Autoregressive, Objective
from dlm_jax.train import sharding
from dlm_jax.train.config import TrainConfig
from dlm_jax.train.state import merge
from dlm_jax.train.step import init_state, make_step
from dlm_jax.types import Params

LENGTH, BATCH = 56, 32  # tokens of a training row, rows a step
MASK, END = map(tokenizers.SPECIAL.index, (tokenizers.MASK, tokenizers.END))  # ids of every tokenizer made here
_NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Leo")
_THINGS = ("pens", "cups", "eggs", "coins", "books", "shells")
_SHIFTS = {"masked_diffusion": 1, "block_diffusion": 0}  # of the denoisers that these objectives train


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model small enough to train in a minute.

    Attributes:
      model: the module.
      params: its parameters.
      tokenizer: of stories.
    """

    model: Any
    params: Params
    tokenizer: Any

    def prompt(self, question: str) -> list[int]:
        """Returns the ids of a question."""
        return tokenizers.encode_prompt(self.tokenizer, [{"role": "user", "content": question}])


def stories(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns rows {"question", "answer"}, the same for the same seed; they may repeat.

    Args:
      count: number of rows.
      seed: of the choices.
    """
    draw = random.Random(f"stories/{seed}")

    def story() -> dict[str, str]:
        name, (one, other), a, b = draw.choice(_NAMES), draw.sample(_THINGS, 2), draw.randint(1, 9), draw.randint(1, 9)
        return {"question": f"{name} has {a} {one} and buys {b} {other}.",
                "answer": f"{name} has {a} {one}. {name} buys {b} {other}. Now {name} has {a + b} things."}

    return [story() for _ in range(count)]


def made(steps: int, *, seed: int = 0, width: int = 64, layers: int = 2) -> Tiny:
    """Returns an autoregressive model of stories, from nothing.

    Args:
      steps: of training.
      seed: of parameters and rows.
      width: of the model, a multiple of 4 heads.
      layers: number of them.
    """
    rows = [sources.parse_row(row) for row in stories(500, seed)]
    tokenizer = tokenizers.train(tokenizers.texts_of(rows), 384)
    model = build.build(TransformerConfig(
        family="qwen3", vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_layers=layers,
        num_heads=4, num_kv_heads=2, head_dim=width // 4, rope_theta=1e4, tie_word_embeddings=True,
        initializer_range=0.05, max_position_embeddings=1024, eos_token_id=END, pad_token_id=tokenizer.pad_token_id,
        mask_token_id=MASK))
    return taught(Tiny(model, build.init_params(model, jax.random.key(seed)), tokenizer), Autoregressive(), steps,
                  seed=seed)


def taught(start: Tiny, objective: Objective, steps: int, *, learning_rate: float = 4e-3, seed: int = 0) -> Tiny:
    """Returns a model trained further, made bidirectional or dual first where the objective asks for it.

    Args:
      start: where to begin; left as it is.
      objective: what to minimise; its ids are `MASK` and `END`.
      steps: of training.
      learning_rate: peak, unitless.
      seed: of rows and corruption.
    """
    model, params = start.model, start.params
    if objective.name in _SHIFTS and not model.config.bidirectional:
        model = model.clone(config=convert.denoiser(model.config, _SHIFTS[objective.name]))
    elif objective.trains == "diffusion" and not model.config.dual:
        model, params = convert.init_from_ar(model, params)
    model = model.clone(config=model.config.replace(**objective.settles()))
    config = TrainConfig(objective=objective, steps=steps, batch_size=BATCH, learning_rate=learning_rate,
                         warmup_steps=min(20, steps), beta2=0.98, weight_decay=0.05, seed=seed)
    rows = [sources.parse_row(row) for row in stories(4000, seed)]
    batches = Pipeline(rows, start.tokenizer, batch_size=BATCH, length=LENGTH, seed=seed)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    state, step = init_state(model, params, config, mesh), make_step(model, config, mesh)
    for _ in range(steps):
        state, _ = step(state, jax.device_put(next(batches), sharding.rows(mesh)))
    return Tiny(model, merge(state.trainable, state.frozen), start.tokenizer)
