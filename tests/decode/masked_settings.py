"""Masked-diffusion decoders from the words of the plain reference loop."""

from __future__ import annotations

from typing import Any

from dlm_jax import decode
from dlm_jax.decode import MaskedDiffusion

CACHES = {"none": decode.NoCache, "prefix": decode.Prefix, "dual": decode.Dual, "free": decode.Free,
          "delayed": decode.Delayed, "prompt": decode.Prompt, "block": decode.BlockCausal}
CONFIDENCES = {"probability": decode.Probability(), "margin": decode.Margin(), "entropy": decode.Entropy(),
               "random": decode.Random()}
STOPS = {"none": decode.Never(), "fill": decode.Fill(), "late_fill": decode.LateFill(), "block": decode.AfterBlock()}
PLANNED = {"quota": decode.Quota, "timesteps": decode.Timesteps, "block_timesteps": decode.BlockTimesteps,
           "shares": decode.Shares, "ancestral": decode.Ancestral}


def made(*, block_length: int = 32, rule: str = "threshold", confidence: str = "probability", cache: str = "none",
         early_stop: str = "fill", eos_run: int = 1, first_token: bool = False, multi_block: bool = False,
         block_add_threshold: float = 0.1, decoded_token_threshold: float = 0.95, refresh_every: int | None = None,
         cfg_scale: float | None = None, steps: int = 0, threshold: float = 0.9, factor: float = 1.0,
         tempered: bool = False, commit_temperature: float = 0.0, **more: Any) -> MaskedDiffusion:
    """Returns the decoder that `masked_reference.decode` runs with the same words; block_length 0 is the answer."""
    commit = (decode.Threshold(threshold) if rule == "threshold" else decode.Factor(factor) if rule == "factor" else
              decode.Budget(threshold, steps) if rule == "budget" else PLANNED[rule](steps))
    commit = decode.Noisy(commit, commit_temperature) if commit_temperature else commit
    ahead = decode.Ahead(block_add_threshold, decoded_token_threshold) if multi_block else None
    measure = CONFIDENCES[confidence]
    return MaskedDiffusion(
        schedule=decode.Blocks(block_length, ahead) if block_length else decode.Whole(),
        commit=decode.FirstToken(commit) if first_token else commit,
        confidence=decode.Tempered(measure) if tempered else measure,
        cache=CACHES[cache]() if refresh_every is None else CACHES[cache](refresh_every=refresh_every),
        stop=decode.Run(eos_run) if early_stop == "run" else STOPS[early_stop],
        guidance=None if cfg_scale is None else decode.ClassifierFree(cfg_scale), **more)
