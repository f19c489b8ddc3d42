"""The released samplers as points of `MaskedDiffusion`: their schedules, roundings and defaults under their own names.

The library's own defaults differ where a sampler gains nothing by its habit: these keep every habit, so that greedy
ids and numbers of forwards are those of the released code. Sampled runs draw from other random numbers, never the
mask, and where both are set top_k truncates before top_p; the released Dream truncates the other way round.
"""

from __future__ import annotations

from dlm_jax.decode.masked import MaskedDiffusion

_REMASKING = {"low_confidence": "probability", "random": "random"}
_ALGORITHMS = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy", "origin": "random"}


def _named(name: str, value: str, table: dict[str, str]) -> str:
    if value not in table:
        raise ValueError(f"{name} = {value!r}: accepted are {sorted(table)}")
    return table[value]


def llada(*, steps: int = 128, block_length: int = 128, remasking: str = "low_confidence",
          **changes) -> MaskedDiffusion:
    """Returns LLaDA's `generate`: blocks from left to right, equal shares of the steps.

    Args:
      steps: forwards for the whole answer.
      block_length: tokens of a block.
      remasking: "low_confidence" or "random".
      changes: other fields of `MaskedDiffusion`, `cfg_scale` and `temperature` for instance.
    """
    return MaskedDiffusion(**{"steps": steps, "block_length": block_length, "rule": "quota", "early_stop": "none",
                              "confidence": _named("remasking", remasking, _REMASKING), **changes})


def dream(*, steps: int = 512, alg: str = "origin", alg_temp: float | None = 0.0, **changes) -> MaskedDiffusion:
    """Returns Dream's `diffusion_generate`: the whole answer at once, as many tokens as time has passed.

    Args:
      steps: forwards.
      alg: "maskgit_plus", "topk_margin", "entropy" or "origin" (a coin for each token).
      alg_temp: of the order in which tokens are taken; 0 or None takes the surest.
      changes: other fields of `MaskedDiffusion`, `temperature` and `top_p` for instance.
    """
    return MaskedDiffusion(**{"steps": steps, "block_length": 0, "early_stop": "none", "tempered": True,
                              "rule": "ancestral" if alg == "origin" else "timesteps",
                              "confidence": _named("alg", alg, _ALGORITHMS), "commit_temperature": alg_temp or 0.0,
                              **changes})


def fast_dllm(*, block_length: int = 32, cache: str = "dual", threshold: float | None = 0.9,
              factor: float | None = None, steps: int = 0, **changes) -> MaskedDiffusion:
    """Returns Fast-dLLM for LLaDA.

    Args:
      block_length: tokens of a block.
      cache: "none", "prefix" or "dual".
      threshold: commit all drafts this probable, or None.
      factor: commit by the factor rule (then threshold must be None), or None.
      steps: forwards for the whole answer; counts where neither is given.
      changes: other fields of `MaskedDiffusion`.
    """
    if threshold is not None and factor is not None:
        raise ValueError(f"threshold = {threshold} and factor = {factor}: give one, and None for the other")
    if steps and (threshold is not None or factor is not None):
        raise ValueError(f"steps = {steps} counts only where threshold and factor are None")
    rule = {"rule": "threshold", "threshold": threshold} if threshold is not None else {
        "rule": "factor", "factor": factor} if factor is not None else {"rule": "quota", "steps": steps}
    return MaskedDiffusion(**{"block_length": block_length, "cache": cache, "early_stop": "none", **rule, **changes})


def fast_dllm_dream(*, block_length: int = 32, cache: str = "dual", threshold: float | None = 0.9, steps: int = 0,
                    **changes) -> MaskedDiffusion:
    """Returns Fast-dLLM for Dream, whose forward that opens a block commits the block's first token alone.

    Without a cache there are no blocks, and the threshold only postpones tokens that `steps` would commit.

    Args:
      block_length: tokens of a block, used with a cache.
      cache: "none", "prefix" or "dual".
      threshold: commit all drafts this probable; None takes the surest by entropy as time passes.
      steps: forwards for the whole answer; 0 takes one a token.
      changes: other fields of `MaskedDiffusion`.
    """
    if cache == "none" and threshold is None:
        raise ValueError("threshold = None without a cache is Dream's own sampling: see dream()")
    if steps and cache != "none" and threshold is not None:
        raise ValueError(f"steps = {steps} with cache = {cache!r} counts only where threshold is None")
    if cache == "none":
        kind = {"block_length": 0, "rule": "budget", "threshold": threshold, "steps": steps}
    elif threshold is not None:
        kind = {"first_token": True, "rule": "threshold", "threshold": threshold}
    else:
        kind = {"first_token": True, "rule": "block_timesteps", "confidence": "entropy", "steps": steps}
    return MaskedDiffusion(**{"block_length": block_length, "cache": cache, "early_stop": "none", "tempered": True,
                              **kind, **changes})


def free_cache(*, steps: int, block_length: int, early_stop: bool = True, **changes) -> MaskedDiffusion:
    """Returns FlashDLM's FreeCache for LLaDA: equal shares, finished blocks frozen.

    Args:
      steps: forwards for the whole answer.
      block_length: tokens of a block.
      early_stop: whether all after the first EOS becomes EOS.
      changes: other fields of `MaskedDiffusion`.
    """
    return llada(**{"steps": steps, "block_length": block_length, "cache": "free",
                    "early_stop": "fill" if early_stop else "none", **changes})


def free_cache_dream(*, steps: int, block_length: int, alg: str = "entropy", early_stop_consecutive: int | None = 1,
                     **changes) -> MaskedDiffusion:
    """Returns FlashDLM's FreeCache for Dream: tokens as time passes, within blocks.

    Args:
      steps: forwards for the whole answer.
      block_length: tokens of a block.
      alg: see `dream`; the time of "origin" is that of the block.
      early_stop_consecutive: EOS in a row that end the answer; None never ends it.
      changes: other fields of `MaskedDiffusion`.
    """
    stop = {"early_stop": "run", "eos_run": early_stop_consecutive} if early_stop_consecutive else {}
    return dream(**{"steps": steps, "alg": alg, "block_length": block_length, "cache": "free", **stop, **changes})


def d3llm(*, block_length: int = 32, threshold: float = 0.5, multi_block: bool = True, early_stop: bool = True,
          **changes) -> MaskedDiffusion:
    """Returns d3LLM's decoding: commits by entropy, and blocks that open before their predecessors are finished.

    Args:
      block_length: tokens of a block.
      threshold: entropy in nats up to which drafts are committed.
      multi_block: whether several blocks may be open.
      early_stop: whether all after the first EOS becomes EOS.
      changes: other fields of `MaskedDiffusion`, `block_add_threshold` and `decoded_token_threshold` for instance.
    """
    return MaskedDiffusion(**{
        "block_length": block_length, "rule": "threshold", "confidence": "entropy", "threshold": threshold,
        "multi_block": multi_block, "early_stop": "late_fill" if early_stop else "none", **changes})


def block_diffusion(*, block_length: int = 32, steps: int = 0, **changes) -> MaskedDiffusion:
    """Returns BD3-LM's sampling with a linear schedule: finished blocks cached, later ones unseen.

    Args:
      block_length: tokens of a block, those the model was trained on.
      steps: forwards for the whole answer; 0 takes one a token.
      changes: other fields of `MaskedDiffusion`, `cfg_scale` for instance.
    """
    return MaskedDiffusion(**{"block_length": block_length, "steps": steps, "rule": "shares", "cache": "block",
                              "early_stop": "block", **changes})
