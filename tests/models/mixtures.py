"""Tiny mixtures of experts, one of every family."""

import functools

from dlm_jax.models import build
from dlm_jax.models.config import MoE
from tests.conftest import random_params, tiny_config

KINDS = {
    "sdar_moe": dict(num_layers=3, pattern=("attention", "attention+moe", "attention+moe"),
                     moe=MoE(experts=6, active=3, width=10, normalise=False)),
    "rnd1": dict(num_layers=2, pattern=("attention+moe",), moe=MoE(experts=5, active=2, width=10)),
    "llada_moe": dict(
        num_layers=2, pattern=("attention", "attention+moe"), qk_norm=False, clip_qkv=1.5, partial_rotary_factor=0.5,
        moe=MoE(experts=6, active=3, width=10, shared_width=14, normalise=False, bias="weight")),
    "llada2_moe": dict(
        num_layers=3, pattern=("attention", "attention+moe", "attention+moe"), qkv_bias=True, o_bias=True,
        partial_rotary_factor=0.5, moe=MoE(
            experts=8, active=3, width=10, shared_width=20, scores="sigmoid", bias="selection", groups=4,
            active_groups=2, scale=2.5))}


def mixture_config(family, **changes):
    return tiny_config(family, **{**KINDS[family], **changes})


@functools.cache
def mixture(family):
    """Returns (model, params) with random parameters."""
    model = build.build(mixture_config(family))
    return model, random_params(model)
