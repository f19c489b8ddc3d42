"""AdamW with warm-up, clipping and no decay on norms, biases and decay rates."""

from __future__ import annotations

import optax
from flax import traverse_util

from dlm_jax.train.config import TrainConfig
from dlm_jax.types import Params


def schedule(config: TrainConfig) -> optax.Schedule:
    """Returns the learning rate as a function of the steps done before.

    Args:
      config: peak, warm-up, shape and length.
    """
    # the first update already uses a part of the peak: with 0 it would do nothing
    warmup = optax.linear_schedule(
        config.learning_rate / max(config.warmup_steps, 1), config.learning_rate, max(config.warmup_steps - 1, 1))
    if config.schedule == "constant":
        after = optax.constant_schedule(config.learning_rate)
    else:
        after = optax.cosine_decay_schedule(config.learning_rate, max(config.steps - config.warmup_steps, 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps]) if config.warmup_steps else after


def decayed(params: Params) -> Params:
    """Returns which parameters weight decay applies to: all but norms, biases and decay rates.

    Args:
      params: nested dict of arrays.

    Returns:
      A nested dict of bool.
    """
    flat = traverse_util.flatten_dict(params)
    keep = {path: not path[-1].endswith(("norm", "bias", "scale", "a_log")) for path in flat}
    return traverse_util.unflatten_dict(keep)


def make(config: TrainConfig) -> optax.GradientTransformation:
    """Returns the optimiser.

    Args:
      config: its hyperparameters.
    """
    adamw = optax.adamw(
        schedule(config), b1=config.beta1, b2=config.beta2, eps=config.epsilon,
        weight_decay=config.weight_decay, mask=decayed)
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
