"""The released samplers as points of `MaskedDiffusion`: their schedules, roundings and defaults under their own names.

The library's own defaults differ where a sampler gains nothing by its habit: these keep every habit, so that greedy
ids and numbers of forwards are those of the released code. Sampled runs draw from other random numbers, never the
mask, and where both are set top_k truncates before top_p; the released Dream truncates the other way round.

Every preset takes further fields of `MaskedDiffusion` (`sampler`, `temperature`, ...), which replace its own.
"""

from __future__ import annotations

from typing import Any

from dlm_jax.decode.masked.caches import BlockCausal, CachePolicy, Dual, Free
from dlm_jax.decode.masked.commit import (
    Ancestral, BlockTimesteps, Budget, CommitRule, Factor, FirstToken, Noisy, Quota, Shares, Threshold, Timesteps)
from dlm_jax.decode.masked.confidence import Confidence, Entropy, Probability, Random, Tempered, TopMargin
from dlm_jax.decode.masked.decoder import ClassifierFree, MaskedDiffusion
from dlm_jax.decode.masked.schedules import Ahead, Blocks, Whole
from dlm_jax.decode.masked.stops import AfterBlock, Fill, LateFill, Never, Run

_REMASKING = {"low_confidence": Probability(), "random": Random()}
_ALGORITHMS = {"maskgit_plus": Probability(), "topk_margin": TopMargin(), "entropy": Entropy(), "origin": Random()}


def _named(name: str, value: str, table: dict[str, Confidence]) -> Confidence:
    if value not in table:
        raise ValueError(f"{name} = {value!r}: accepted are {sorted(table)}")
    return table[value]


def llada(*, steps: int = 128, block_length: int = 128, remasking: str = "low_confidence", cfg_scale: float = 0.0,
          **changes: Any) -> MaskedDiffusion:
    """Returns LLaDA's `generate`: blocks from left to right, equal shares of the steps.

    Args:
      steps: forwards for the whole answer.
      block_length: tokens of a block.
      remasking: "low_confidence" or "random".
      cfg_scale: of classifier-free guidance; 0 is none.
      changes: other fields of `MaskedDiffusion`.
    """
    return MaskedDiffusion(**{
        "schedule": Blocks(block_length), "commit": Quota(steps), "stop": Never(),
        "confidence": _named("remasking", remasking, _REMASKING), "guidance": _guidance(cfg_scale), **changes})


def _guidance(scale: float) -> ClassifierFree | None:
    return ClassifierFree(scale) if scale else None


def dream(*, steps: int = 512, alg: str = "origin", alg_temp: float | None = 0.0, eps: float = 1e-3, **changes: Any
          ) -> MaskedDiffusion:
    """Returns Dream's `diffusion_generate`: the whole answer at once, as many tokens as time has passed.

    Args:
      steps: forwards.
      alg: "maskgit_plus", "topk_margin", "entropy" or "origin" (a coin for each token).
      alg_temp: of the order in which tokens are taken; 0 or None takes the surest.
      eps: last time.
      changes: other fields of `MaskedDiffusion`.
    """
    confidence = _named("alg", alg, _ALGORITHMS)
    rule: CommitRule = Ancestral(steps, eps) if alg == "origin" else Timesteps(steps, eps)
    return MaskedDiffusion(**{
        "schedule": Whole(), "stop": Never(), "commit": Noisy(rule, alg_temp) if alg_temp else rule,
        "confidence": Tempered(confidence), **changes})


def fast_dllm(*, block_length: int = 32, cache: CachePolicy = Dual(), threshold: float | None = 0.9,
              factor: float | None = None, steps: int = 0, **changes: Any) -> MaskedDiffusion:
    """Returns Fast-dLLM for LLaDA.

    Args:
      block_length: tokens of a block.
      cache: NoCache(), Prefix() or Dual().
      threshold: commit all drafts this probable, or None.
      factor: commit by the factor rule (then threshold must be None), or None.
      steps: forwards for the whole answer; counts where neither is given.
      changes: other fields of `MaskedDiffusion`.
    """
    if threshold is not None and factor is not None:
        raise ValueError(f"threshold = {threshold} and factor = {factor}: give one, and None for the other")
    if steps and (threshold is not None or factor is not None):
        raise ValueError(f"steps = {steps} counts only where threshold and factor are None")
    rule = Threshold(threshold) if threshold is not None else Factor(factor) if factor is not None else Quota(steps)
    return MaskedDiffusion(**{
        "schedule": Blocks(block_length), "cache": cache, "stop": Never(), "commit": rule, **changes})


def fast_dllm_dream(*, block_length: int = 32, cache: CachePolicy = Dual(), threshold: float | None = 0.9,
                    steps: int = 0, **changes: Any) -> MaskedDiffusion:
    """Returns Fast-dLLM for Dream, whose forward that opens a block commits the block's first token alone.

    Without a cache there are no blocks, and the threshold only postpones tokens that `steps` would commit.

    Args:
      block_length: tokens of a block, used with a cache.
      cache: NoCache(), Prefix() or Dual().
      threshold: commit all drafts this probable; None takes the surest by entropy as time passes.
      steps: forwards for the whole answer; 0 takes one a token.
      changes: other fields of `MaskedDiffusion`.
    """
    if not cache.keeps and threshold is None:
        raise ValueError("threshold = None without a cache is Dream's own sampling: see dream()")
    if steps and cache.keeps and threshold is not None:
        raise ValueError(f"steps = {steps} with cache = {cache!r} counts only where threshold is None")
    confidence: Confidence = Probability()
    if not cache.keeps:
        rule: CommitRule = Budget(threshold, steps)
    elif threshold is not None:
        rule = FirstToken(Threshold(threshold))
    else:
        rule, confidence = FirstToken(BlockTimesteps(steps)), Entropy()
    return MaskedDiffusion(**{
        "schedule": Blocks(block_length) if cache.keeps else Whole(), "cache": cache, "stop": Never(), "commit": rule,
        "confidence": Tempered(confidence), **changes})


def free_cache(*, steps: int, block_length: int, early_stop: bool = True, **changes: Any) -> MaskedDiffusion:
    """Returns FlashDLM's FreeCache for LLaDA: equal shares, finished blocks frozen.

    Args:
      steps: forwards for the whole answer.
      block_length: tokens of a block.
      early_stop: whether all after the first EOS becomes EOS.
      changes: other fields of `MaskedDiffusion`; `cache=Free(block_length=256)` freezes larger blocks (Table 11).
    """
    return llada(**{"steps": steps, "block_length": block_length, "cache": Free(),
                    "stop": Fill() if early_stop else Never(), **changes})


def free_cache_dream(*, steps: int, block_length: int, alg: str = "entropy", early_stop_consecutive: int | None = 1,
                     **changes: Any) -> MaskedDiffusion:
    """Returns FlashDLM's FreeCache for Dream: tokens as time passes, within blocks.

    Args:
      steps: forwards for the whole answer.
      block_length: tokens of a block.
      alg: see `dream`; the time of "origin" is that of the block.
      early_stop_consecutive: EOS in a row that end the answer; None never ends it.
      changes: other fields of `MaskedDiffusion`.
    """
    return dream(**{"steps": steps, "alg": alg, "schedule": Blocks(block_length), "cache": Free(),
                    "stop": Run(early_stop_consecutive) if early_stop_consecutive else Never(), **changes})


def d3llm(*, block_length: int = 32, threshold: float = 0.5, ahead: Ahead | None = Ahead(), early_stop: bool = True,
          **changes: Any) -> MaskedDiffusion:
    """Returns d3LLM's decoding: commits by entropy, and blocks that open before their predecessors are finished.

    Args:
      block_length: tokens of a block.
      threshold: entropy in nats up to which drafts are committed.
      ahead: when blocks open early; None opens one at a time.
      early_stop: whether all after the first EOS becomes EOS.
      changes: other fields of `MaskedDiffusion`.
    """
    return MaskedDiffusion(**{
        "schedule": Blocks(block_length, ahead), "commit": Threshold(threshold), "confidence": Entropy(),
        "stop": LateFill() if early_stop else Never(), **changes})


def block_diffusion(*, block_length: int = 32, steps: int = 0, cfg_scale: float = 0.0, **changes: Any
                    ) -> MaskedDiffusion:
    """Returns BD3-LM's sampling with a linear schedule: finished blocks cached, later ones unseen.

    Args:
      block_length: tokens of a block, those the model was trained on.
      steps: forwards for the whole answer; 0 takes one a token.
      cfg_scale: of classifier-free guidance; 0 is none.
      changes: other fields of `MaskedDiffusion`.
    """
    return MaskedDiffusion(**{
        "schedule": Blocks(block_length), "commit": Shares(steps), "cache": BlockCausal(), "stop": AfterBlock(),
        "guidance": _guidance(cfg_scale), **changes})
