"""Masked diffusion: schedule x commit rule x confidence x cache policy x stop x sampler, each open to its users."""

from dlm_jax.decode.masked.caches import (
    BlockCausal, CachePolicy, Delayed, Dual, Free, NoCache, Prefix, Prompt)
from dlm_jax.decode.masked.commit import (
    Ancestral, BlockTimesteps, Budget, CommitRule, Factor, FirstToken, Noisy, Quota, Shares, Threshold, Timesteps, TopN)
from dlm_jax.decode.masked.confidence import (
    Confidence, Entropy, Margin, Probability, Random, Tempered, TopMargin)
from dlm_jax.decode.masked.decoder import ClassifierFree, MaskedDiffusion
from dlm_jax.decode.masked.enough import Enough, EntropyBound, Even, InOrder
from dlm_jax.decode.masked.drafts import Clock, Drafts, Now
from dlm_jax.decode.masked.presets import (
    block_diffusion, d3llm, dream, fast_dllm, fast_dllm_dream, free_cache, free_cache_dream, llada)
from dlm_jax.decode.masked.schedules import Ahead, Blocks, Schedule, Whole
from dlm_jax.decode.masked.stops import AfterBlock, Board, Fill, LateFill, Never, Run, Settled, Stop

__all__ = [
    "AfterBlock", "Ahead", "Ancestral", "BlockCausal", "BlockTimesteps", "Blocks", "Board", "Budget", "CachePolicy",
    "ClassifierFree", "Clock", "CommitRule", "Confidence", "Delayed", "Drafts", "Dual", "Enough", "Entropy",
    "EntropyBound", "Even", "Factor", "Fill", "FirstToken", "Free", "InOrder", "LateFill", "Margin",
    "MaskedDiffusion", "Never", "NoCache", "Noisy", "Now", "Prefix", "Probability", "Prompt", "Quota", "Random",
    "Run", "Schedule", "Settled", "Shares", "Stop", "Tempered", "Threshold", "Timesteps", "TopMargin", "TopN",
    "Whole", "block_diffusion", "d3llm", "dream", "fast_dllm", "fast_dllm_dream", "free_cache", "free_cache_dream",
    "llada"]
