"""The arithmetic that a step needs, whatever the compiled program does: what floors are made of."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig, parts
from dlm_jax.models.layers import VIEWS

_QUERIES = 512  # whose row of the mask is held at a time


def products(jaxpr: Any) -> float:
    """Returns the flops of a traced function's matrix products, over its scans and the dearest of its branches.

    Loops of unknown length count once; of those that run once at most and stand side by side, the dearest does.

    Args:
      jaxpr: of `jax.make_jaxpr`, or one inside.
    """
    total, branches = 0.0, [0.0]
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, inner = eqn.primitive.name, [
            x for value in eqn.params.values() for x in (value if isinstance(value, (tuple, list)) else (value,))
            if hasattr(getattr(x, "jaxpr", x), "eqns")]
        if name in ("dot_general", "ragged_dot_general"):
            contracted = eqn.params["dimension_numbers"][0][0] if name == "dot_general" else (
                eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0])
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
        elif name == "cond":
            total += max(map(products, inner))
        elif name == "while":
            test = eqn.params["cond_jaxpr"].jaxpr
            cost = products(eqn.params["body_jaxpr"])
            branches += [cost] if not test.eqns else []
            total += cost if test.eqns else 0.0
        else:
            times = {"scan": eqn.params.get("length", 1)}.get(name, 1)
            if name == "pallas_call":
                times = math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
            total += times * sum(map(products, inner))
    return total + max(branches)


@dataclasses.dataclass
class Witness:
    """A `scoring.Scorer` that computes nothing and remembers what it was asked.

    Attributes:
      config: of the model it stands for.
      name: of the view it is.
      asked: gets (view, tokens, rule of visibility) of every forward; None remembers nothing.
    """

    config: TransformerConfig
    name: str = "ar"
    asked: list | None = None
    dtype = jnp.float32

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def shift(self) -> int:
        return self.config.shift

    @property
    def bidirectional(self) -> bool:
        return self.config.bidirectional

    @property
    def block_size(self) -> int | None:
        return self.config.block_size

    @property
    def recurrent(self) -> bool:
        return self.config.recurrent

    def view(self, name: str) -> Witness:
        return dataclasses.replace(self, name=name)  # `asked` is shared

    def hidden(self, tokens, told, cache=None, wanted=None):
        if self.asked is not None:
            self.asked.append((self.name, tokens.size, told.visibility))
        return jnp.zeros((*tokens.shape, 1)), cache

    def head(self, hidden):
        # a product by one column, by which `training` counts the predictions
        return jnp.broadcast_to(hidden @ jnp.ones((1, 1)), (*hidden.shape[:-1], 1))

    def init_cache(self, batch: int, capacity: int, window: int = 0):
        return None


def a_token(config: TransformerConfig) -> dict[str, float]:
    """Returns the flops of all layers' products with weights and states, for one token in each view; none of the head.

    Args:
      config: of the model.
    """
    found = dict.fromkeys(VIEWS, 0.0)
    flat = traverse_util.flatten_dict(build.abstract_params(build.build(config))["layers"])
    for path, leaf in flat.items():
        if not path[-1].endswith(("proj", "router", "gate", "up", "down")):
            continue
        active = config.moe.active / config.moe.experts if config.moe and "moe" in path and leaf.shape[1:2] == (
            config.moe.experts,) else 1.0
        for view, name in VIEWS.items():
            if name in path or not {*VIEWS.values()} & {*path}:
                found[view] += 2.0 * active * leaf.size
    if config.gated_delta:  # a state is read to be corrected, written, and read
        s, layers = config.gated_delta, sum(parts(kind)[0] == "gated_delta" for kind in config.pattern)
        state = 6.0 * s.value_heads * s.key_dim * s.value_dim * layers * config.num_periods
        found = {view: flops + state for view, flops in found.items()}
    return found


def forwards(config: TransformerConfig, objective: Any, batch: dict[str, np.ndarray]) -> list[tuple]:
    """Returns (view, tokens, rule of visibility) of every forward of a loss; arguments as of `training`."""
    objective.rows_loss(Witness(config, asked=(asked := [])), objective.prepare(batch, jax.random.key(0)))
    return asked


def _pairs(rule: Any) -> int:
    """Returns how many pairs of query and key a concrete rule shows."""
    length = rule.query_length
    pieces = [(start, min(_QUERIES, length - start)) for start in range(0, length, _QUERIES)]
    return sum(int(jnp.sum(rule.queries(*piece).dense())) for piece in pieces)


def training(config: TransformerConfig, objective: Any, batch: dict[str, np.ndarray]) -> float:
    """Returns the flops that one step needs, nothing computed twice and only what is visible read.

    The backward pass takes twice the forward's products: those of activations, and of parameters where they are
    trained. What an objective's own view does not train is run forward alone.

    Args:
      config: of the model.
      objective: its loss, with the ids it needs.
      batch: of as many rows as are to be counted; concrete.
    """
    rows = objective.prepare(batch, jax.random.key(0))
    predictions = products(jax.make_jaxpr(lambda rows: objective.rows_loss(Witness(config), rows)[0])(rows)) / 2
    attention = sum(parts(kind)[0] == "attention" for kind in config.pattern) * config.num_periods
    trained, weights, total = objective.trains, a_token(config), 0.0
    for view, tokens, rule in forwards(config, objective, batch):
        of_pairs = 4.0 * config.num_heads * config.head_dim * attention * _pairs(rule)
        total += (1 if trained and view != trained else 3) * (weights[view] * tokens + of_pairs)
    head = 2.0 * config.hidden_size * config.vocab_size * predictions
    return total + (2 if trained else 3) * head
