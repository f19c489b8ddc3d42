"""A loss spelled out as a list of predictions from whole rows under dense masks, summed in one compiled call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.models import build

PASSES, PREDICTIONS = 16, 64  # padded to, so that references share one compile


class Spelled:
    """Collects forward passes, and predictions read off their outputs."""

    def __init__(self, length: int):
        self.length, self.passes, self.predictions = length, [], []

    def forward(self, tokens, mask) -> int:
        """Adds a row of at most `length` tokens under a (T, T) mask; returns its number."""
        room = self.length - len(tokens)
        self.passes.append((np.pad(np.asarray(tokens), (0, room)), np.pad(np.asarray(mask, bool), (0, room))))
        return len(self.passes) - 1

    def predict(self, forward: int, output: int, label: int, weight: float) -> None:
        """Adds -weight log p(label) at one output of a pass."""
        self.predictions.append((forward, output, label, weight))

    def value_and_gradient(self, model, params):
        """Returns the sum of all predictions' losses and its gradient."""
        assert 0 < len(self.passes) <= PASSES and 0 < len(self.predictions) <= PREDICTIONS
        passes = self.passes + [self.passes[0]] * (PASSES - len(self.passes))
        tokens, masks = (jnp.asarray(np.stack(x)) for x in zip(*passes))
        where = self.predictions + [(0, 0, 0, 0.0)] * (PREDICTIONS - len(self.predictions))
        return _sum(model, params, tokens.astype(jnp.int32), masks, [jnp.asarray(x) for x in zip(*where)])


@functools.partial(jax.jit, static_argnums=0)
def _sum(model, params, tokens, masks, where):
    forward, output, label, weight = where

    def total(params):
        logp = jax.nn.log_softmax(build.scorer(model, params)(tokens, None, masks))
        return -jnp.sum(weight * logp[forward, output, label])

    return jax.value_and_grad(total)(params)
