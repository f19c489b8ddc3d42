"""Objectives: pure functions from a model, a batch and a key to a loss.

Each module has a frozen `Config` and three functions. `prepare(batch, key, config)` makes rows from the whole
batch, with every weight already normalised; `rows_loss(score, rows, config)` returns a loss and metrics that are
sums over rows, so rows may be scored in pieces; `loss(score, batch, key, config)` is the two together. Some have
`check(score, config)`, which refuses a model that the objective cannot train.
"""

from types import ModuleType
from typing import Any

from dlm_jax.objectives import autoregressive, block_diffusion, masked_diffusion, orthrus, refusion

MODULES = {module.Config.name: module for module in (
    autoregressive, block_diffusion, masked_diffusion, orthrus, refusion)}


def of(config: Any) -> ModuleType:
    """Returns the objective module that a `Config` belongs to.

    Args:
      config: a `Config` of one of `MODULES`.

    Raises:
      ValueError: anything else, with the accepted objectives.
    """
    for module in MODULES.values():
        if isinstance(config, module.Config):
            return module
    raise ValueError(f"objective {config!r}: expected the Config of one of {sorted(MODULES)}")
