"""What tests of masked objectives share: a loss spelled out prediction by prediction, and degenerate rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.objectives import noise

DEGENERATE = ("nothing masked", "everything masked", "no response")
PASSES, PREDICTIONS = 16, 64  # padded to, so that references share one compile


def check_degenerate(which, batch, config, value_and_gradient):
    """Asserts that degenerate rows have finite loss and gradient, and a loss only where something is masked.

    Args:
      which: one of `DEGENERATE`.
      batch: rows.
      config: of the objective; padding is ignored.
      value_and_gradient: of supervised rows and their noise.
    """
    if which == "no response":
        batch = batch | {"loss_mask": jnp.zeros_like(batch["loss_mask"])}
    rows = noise.supervise(batch, config.target, "ignore", None)
    fill = lambda x: jnp.full(batch["tokens"].shape, x)
    value, gradient = value_and_gradient(rows, noise.Noise(fill(0.5), fill(float(which == "nothing masked"))))
    assert (value > 0) == (which == "everything masked") and np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


class Spelled:
    """A loss as a list of predictions from whole rows under dense masks, summed in one compiled call."""

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
        logp = jax.nn.log_softmax(model.scorer(params)(tokens, None, masks))
        return -jnp.sum(weight * logp[forward, output, label])

    return jax.value_and_grad(total)(params)
