"""Decoders: frozen dataclasses of their papers' hyperparameters, run by `generate` and `stream`."""

from dlm_jax.decode.api import Event, Generation, generate, stream
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.guided import Guided
from dlm_jax.decode.guided_model import join
from dlm_jax.decode.ledger import Ledger
from dlm_jax.decode.lossless import check_lossless
from dlm_jax.decode.masked import MaskedDiffusion
from dlm_jax.decode.masked_presets import (
    block_diffusion, d3llm, dream, fast_dllm, fast_dllm_dream, free_cache, free_cache_dream, llada)
from dlm_jax.decode.orthrus import Orthrus
from dlm_jax.decode.refusion import ReFusion

DECODERS = {  # by the names launchers accept
    "autoregressive": Autoregressive, "guided": Guided, "masked": MaskedDiffusion, "orthrus": Orthrus,
    "refusion": ReFusion}

__all__ = ["DECODERS", "Autoregressive", "Event", "Generation", "Guided", "Ledger", "MaskedDiffusion", "Orthrus",
           "ReFusion", "block_diffusion", "check_lossless", "d3llm", "dream", "fast_dllm", "fast_dllm_dream",
           "free_cache", "free_cache_dream", "generate", "join", "llada", "stream"]
