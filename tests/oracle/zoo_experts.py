"""Mixtures of experts beside their logits: what sparse layers read, choose and make, and the same model fused.

A `logits` case may hold `moe_layers_in` and `moe_layers_out` [sparse layers, B, T, D], `router_logits`, and
`topk_experts` and `topk_weights`, in any order of a token's experts. A folder may hold `model_fused.safetensors`, with
`config_fused.json` or the same config.json.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.models.config import parts
from dlm_jax.models.moe import MoE
from tests.oracle import zoo_views
from tests.oracle.masked import Folder, Outcome, close


def logits(folder: Folder, case: dict) -> Outcome:
    """Compares outputs, what experts make of the reference's inputs, and the tensors of the fused layout."""
    outcome = zoo_views.logits(folder, case)
    if outcome.problem or folder.array(case, "moe_layers_in") is None:
        return outcome
    problem, worst = "; ".join(fused(folder)), outcome.error
    for name, found in _experts(folder, case):
        worst = max(worst, found.error)
        problem = problem or f"{name}: {found.problem}" * bool(found.problem)
    return Outcome(problem, worst)


def _experts(folder: Folder, case: dict):
    """Yields the comparisons of every sparse layer."""
    model, params = folder.model
    c = model.config
    sparse = [i for i, kind in enumerate(c.pattern * c.num_periods) if parts(kind)[1] == "moe"]
    read, made, routed, chosen, weighed = (folder.array(case, name) for name in (
        "moe_layers_in", "moe_layers_out", "router_logits", "topk_experts", "topk_weights"))
    if c.family == "llada_moe":  # whose shared expert is the layer's
        c = c.replace(moe=dataclasses.replace(c.moe, shared_width=0))
    like = functools.partial(close, rtol=zoo_views.RTOL, atol=zoo_views.atol(folder))
    for place, index in enumerate(sparse):
        own, x = of_layer(model, params, index)["moe"], jnp.asarray(read[place])
        out, seen = MoE(c).apply({"params": own}, x, capture_intermediates=lambda _, name: name == "route",
                                 mutable="intermediates")
        yield f"layer {index}", like(out, made[place])
        yield f"layer {index} router", like(x.reshape(-1, x.shape[-1]) @ own["router"], routed[place])
        if chosen is not None:
            weights, experts = (np.asarray(a) for a in seen["intermediates"]["route"][0])
            experts, weights = _by_expert(experts, weights)
            others, wanted = _by_expert(chosen[place], weighed[place])
            yield f"layer {index} choice", close(experts, others, 0.0)
            yield f"layer {index} weights", like(weights, wanted)


def _by_expert(experts: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(experts, axis=1)
    return np.take_along_axis(experts, order, axis=1), np.take_along_axis(weights, order, axis=1)


def of_layer(model, params, index: int):
    """Returns the parameters of one layer."""
    size = len(model.config.pattern)
    stack = params["layers"] if size == 1 else params["layers"][f"layer_{index % size}"]
    return jax.tree.map(lambda a: a[index // size], stack)


@functools.lru_cache(maxsize=2)
def fused(folder: Folder) -> list[str]:
    """Returns what of the fused layout is another model; nothing where there is none."""
    if not (folder.path / "model_fused.safetensors").is_file():
        return []
    with tempfile.TemporaryDirectory() as scratch:
        config = folder.path / "config_fused.json"
        shutil.copy(config if config.is_file() else folder.path / "config.json", Path(scratch) / "config.json")
        shutil.copy(folder.path / "model_fused.safetensors", Path(scratch) / "model.safetensors")
        other, theirs = dlm_jax.load(scratch)
        model, params = folder.model
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params, theirs)
    found = [f"fused {jax.tree_util.keystr(path)} differs"
             for path, equal in jax.tree_util.tree_leaves_with_path(same) if not equal]
    layouts = model.config.moe.layout, other.config.moe.layout
    return found + [f"layouts {layouts}"] * (layouts[0] == layouts[1])


RUNNERS = {"logits": logits}
