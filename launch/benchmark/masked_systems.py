"""The models and the systems of the masked-diffusion benchmark: a decoder, and the eager loop that does the same."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax import decode
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig

SIZES = {  # about as many parameters, most of them in the layers
    "1m": dict(vocab_size=2048, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2,
               head_dim=32),
    "50m": dict(vocab_size=24576, hidden_size=512, intermediate_size=1536, num_layers=12, num_heads=8, num_kv_heads=4,
                head_dim=64),
    "tiny": dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1,
                 head_dim=16),
}
SPREAD = 0.1  # of fresh weights: wide enough that confidences differ by more than rounding


def random_model(size: str) -> tuple[Any, Any]:
    """Returns a random bidirectional model of a named size."""
    shape = SIZES[size]
    model = build.build(TransformerConfig(
        family="a2d-qwen3", **shape, tie_word_embeddings=True, initializer_range=SPREAD,
        mask_token_id=shape["vocab_size"] - 1))
    return model, jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(0))


def random_guide(config: Any) -> tuple[Any, Any]:
    """Returns a random causal model of half the width and a quarter of the layers, of the same vocabulary."""
    half = lambda x: max(1, x // 2)
    guide = build.build(config.replace(
        family="qwen3", logit_shift=None, hidden_size=half(config.hidden_size), num_heads=config.num_kv_heads,
        num_kv_heads=config.num_kv_heads, intermediate_size=half(config.intermediate_size),
        num_layers=max(1, config.num_layers // 4), tie_word_embeddings=False))  # tied, it would repeat what it reads
    return guide, jax.jit(build.init_params, static_argnums=0)(guide, jax.random.key(1))


def share_threshold(model: Any, params: Any, prompt: list[int], block_length: int, share: float) -> float:
    """Returns the confidence that `share` of a first block's drafts reach."""
    mask = model.config.mask_token_id
    logits = dlm_jax.forward(model, params, [prompt + [mask] * block_length])[0]
    behind = len(prompt) - model.config.shift
    sure = jnp.max(jax.nn.softmax(logits[behind:behind + block_length]).at[:, mask].set(0.0), axis=-1)
    return float(np.quantile(np.asarray(sure), 1.0 - share))


def systems(options: argparse.Namespace, threshold: float) -> dict[str, tuple[Any, dict[str, Any] | None]]:
    """Returns each system's decoder, and the arguments of the eager loop that does the same, or None.

    Args:
      options: the command line.
      threshold: of the rows that commit by confidence.
    """
    by_steps = dict(steps=options.steps, block_length=options.block)
    sure = dict(threshold=threshold, block_length=options.block)
    cached = lambda name, cache: (decode.fast_dllm(**by_steps, threshold=None, cache=cache), by_steps | {"cache": name})
    guided = lambda **parts: (decode.Guided(cache=decode.Free(block_length=options.block), **parts), None)
    return {
        "vanilla": (decode.llada(**by_steps), by_steps),
        "prefix cache": cached("prefix", decode.Prefix()),
        "dual cache": cached("dual", decode.Dual()),
        "FreeCache": (decode.free_cache(**by_steps, early_stop=False), by_steps | {"cache": "free"}),
        "threshold": (decode.fast_dllm(**sure, cache=decode.NoCache()), sure),
        "threshold, dual cache": (decode.fast_dllm(**sure), sure | {"cache": "dual"}),
        "block diffusion": (decode.block_diffusion(**by_steps, stop=decode.Never()), by_steps | {"cache": "block"}),
        "guided, none agreed": guided(),
        "guided, all agreed": guided(accept=decode.guided.TopK(1 << 30)),
    }
