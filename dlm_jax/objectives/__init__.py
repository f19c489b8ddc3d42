"""Objectives: frozen objects that turn a batch and a key into rows, and a model and rows into a loss.

`OBJECTIVES` has them by name; `Objective` says what one is, and is what your own derives from.
"""

from dlm_jax.objectives.autoregressive import Autoregressive
from dlm_jax.objectives.base import Objective
from dlm_jax.objectives.block_diffusion import BlockDiffusion
from dlm_jax.objectives.flare import Flare
from dlm_jax.objectives.masked_diffusion import MaskedDiffusion
from dlm_jax.objectives.orthrus import Orthrus
from dlm_jax.objectives.refusion import ReFusion

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Autoregressive, BlockDiffusion, Flare, MaskedDiffusion, Orthrus, ReFusion)}
