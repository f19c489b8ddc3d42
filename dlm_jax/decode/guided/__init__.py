"""FlashDLM's guided diffusion: a diffusion model drafts, a small causal model decides how much stays."""

from dlm_jax.decode.guided.decoder import Guided
from dlm_jax.decode.guided.model import join

__all__ = ["Guided", "join"]
