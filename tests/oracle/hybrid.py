"""Runs a folder of reference numbers of a hybrid model: logits, mixers, caches fed in pieces, greedy decoding.

The format: `config.json`, `model.safetensors`, `cases.json`, and `cases.npz` with keys `<case>__<field>`. A case holds
`input_ids` and `logits`; a left-padded one also `attention_mask` and `position_ids`; `short` also what its first
recurrent and first attention mixer read and returned. The case `cacheX` holds the logits of the ids of `short`, fed in
pieces of `cases.json`'s `cacheX_chunk_sizes`, and what layers kept after a piece: keys and values, or state and the
last raw inputs of the convolution. `cases.json` lists `greedy` prompts with the ids they continue to.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.models.config import parts
from dlm_jax.models.layers import MIXERS
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.oracle.qwen3 import read_cases, run_greedy

MIXED = re.compile(r"layer(\d+)_(?:linear_attn|self_attn)_out")
KEPT = re.compile(r"step(\d+)_layer(\d+)_(conv_state|recurrent_state|keys|values)")


def is_hybrid(config: dict, facts: dict) -> bool:
    """Whether a folder holds a model with recurrent layers, fed in pieces and decoded greedily."""
    return "linear_attention" in config.get("layer_types", ()) and {"cacheA_chunk_sizes", "greedy"} <= facts.keys()


def run(folder: Path) -> tuple[bool, float, str]:
    """Compares every array case and every prompt with this library.

    Args:
      folder: as in the module's docstring.

    Returns:
      Whether all agree, the largest absolute error, and a sentence: what was run, or what failed.
    """
    folder = Path(folder)
    facts, cases = json.loads((folder / "cases.json").read_text()), read_cases(folder / "cases.npz")
    atol = 2e-4 if facts["trained_steps"] else 5e-4
    model, params = dlm_jax.load(folder)
    worst, arrays, failed = 0.0, 0, []
    for name, fields in cases.items():
        if "input_ids" in fields:
            got = run_whole(model, params, fields)
        else:
            got = run_pieces(model, params, cases["short"]["input_ids"], facts[f"{name}_chunk_sizes"], fields)
        left = fields.keys() - got.keys() - {"input_ids", "position_ids", "attention_mask"}
        failed += [f"{name}: {field} not covered" for field in left if not field.endswith("_in")]
        for field, value in got.items():
            error = np.abs(np.asarray(value) - fields[field])
            if "attention_mask" in fields:
                error = np.where(fields["attention_mask"][..., None] > 0, error, 0)
            worst, arrays = max(worst, float(error.max())), arrays + 1
            if not np.all(error <= atol + 1e-4 * np.abs(fields[field])):  # a NaN compares false and fails
                failed.append(f"{name}: {field} off by {error.max():.2g}")
    ties = 0
    for index, case in enumerate(facts["greedy"]):
        if run_greedy(model, params, case) != case["expected_ids"]:
            near = case["min_top1_top2_logit_gap"] < 1e-3
            ties += near
            failed += [] if near else [f"greedy {index}: other ids"]
    detail = f"{arrays} arrays, {len(facts['greedy'])} greedy prompts" + (f", {ties} near ties differ" if ties else "")
    return not failed, worst, "; ".join(failed) or detail


def run_whole(model, params, fields):
    """Returns the logits of a case and what mixers make of their inputs."""
    tokens, positions = fields["input_ids"], fields.get("position_ids")
    start = np.zeros(len(tokens), int)
    if "attention_mask" in fields:  # rows here begin with their first token: padding moves to the end
        start = np.argmax(fields["attention_mask"], axis=1)
        roll = (start[:, None] + np.arange(tokens.shape[1])) % tokens.shape[1]
        tokens, positions = (np.take_along_axis(x, roll, axis=1) for x in (tokens, positions))
    logits = dlm_jax.forward(model, params, tokens, positions)
    got = {"logits": np.stack([np.roll(row, first, axis=0) for row, first in zip(np.asarray(logits), start)])}
    for field in fields:
        match = MIXED.fullmatch(field)
        if match:
            got[field] = run_mixer(model, params, int(match[1]), fields[field.removesuffix("out") + "in"])
    return got


def run_mixer(model, params, index, x):
    """Returns what the mixer of one layer makes of (B, T, D) normalised activations."""
    place, period = index % len(model.config.pattern), index // len(model.config.pattern)
    kind, _ = parts(model.config.pattern[place])
    own = jax.tree.map(lambda a: a[period], params["layers"][f"layer_{place}"][kind])
    told = Pass(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]), vis.causal(jnp.ones(x.shape[:2], bool)))
    return MIXERS[kind](model.config).apply({"params": own}, jnp.asarray(x), told, None, 0, None, None)[0]


def run_pieces(model, params, tokens, pieces, fields):
    """Feeds tokens piece by piece through a cache; returns logits and what layers keep after each piece."""
    batch, length = tokens.shape
    rank = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

    @functools.partial(jax.jit)
    def feed(params, cache, piece, index):
        score = model.scorer(params)
        hidden, cache = score.hidden(piece, Pass(index, vis.by_rank(jnp.zeros_like(index), index, rank), index), cache)
        return score.head(hidden), cache

    cache, start, logits, got = model.scorer(params).init_cache(batch, length), 0, [], {}
    for step, size in enumerate(pieces):
        stop = start + size
        out, cache = feed(params, cache, jnp.asarray(tokens[:, start:stop], jnp.int32), rank[:, start:stop])
        logits.append(out)
        for field in fields:
            match = KEPT.fullmatch(field)
            if match and int(match[1]) == step:
                got[field] = kept(model, cache, int(match[2]), match[3], stop, fields[field])
        start = stop
    return got | {"logits": jnp.concatenate(logits, axis=1)}


def kept(model, cache, index, what, length, wanted):
    """Returns what a layer keeps, in the reference's layout."""
    period = len(model.config.pattern)
    member, index = cache.members[index % period], index // period
    if what in ("keys", "values"):
        return getattr(member, what)[index, :, :, :length]
    state, tail = member.layer(index).settled()
    if what == "recurrent_state":
        return state
    flat = np.concatenate([np.asarray(x).reshape(*x.shape[:2], -1) for x in tail], axis=-1)
    # the reference keeps one input more than a convolution of so many taps can read again
    return np.concatenate([wanted[..., :1], np.swapaxes(flat, 1, 2)], axis=-1)
