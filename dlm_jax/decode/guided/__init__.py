"""FlashDLM's guided diffusion: a diffusion model drafts, a small causal model decides how much stays."""

from dlm_jax.decode.guided.acceptance import UNMAPPED, Acceptance, Exact, Proposal, Relative, Relaxed, Sure, TopK
from dlm_jax.decode.guided.caches import Aggressive, BlockBoundary, Sliding
from dlm_jax.decode.guided.commits import Agreed, GuideRule, Speculative
from dlm_jax.decode.guided.decoder import Guided
from dlm_jax.decode.guided.model import join
from dlm_jax.decode.guided.presets import flash_dlm, flash_dlm_relaxed, flash_dlm_released, flash_dlm_released_relaxed

__all__ = [
    "UNMAPPED", "Acceptance", "Aggressive", "Agreed", "BlockBoundary", "Exact", "GuideRule", "Guided", "Proposal",
    "Relative", "Relaxed", "Sliding", "Speculative", "Sure", "TopK", "flash_dlm", "flash_dlm_relaxed",
    "flash_dlm_released", "flash_dlm_released_relaxed", "join"]
