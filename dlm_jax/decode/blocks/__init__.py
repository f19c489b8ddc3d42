"""Block diffusion by a model's own conventions: one decoder, and the released samplers as points of it."""

from dlm_jax.decode.blocks.decoder import BlockDiffusion
from dlm_jax.decode.blocks.editing import Editing, Thinking
from dlm_jax.decode.blocks.speculation import SelfSpeculation

__all__ = ["BlockDiffusion", "Editing", "SelfSpeculation", "Thinking"]
