"""Runs a `qwen3_*`-format folder of reference numbers: logits, a cache fed in pieces, greedy decoding.

The format: `config.json`, `model.safetensors`, `cases.json`, and `cases.npz` with keys `<case>__<field>`. A case holds
`input_ids` and `logits`, and may hold `position_ids` and `mask` (true = may attend; causal where absent). The case
`cache` holds the logits and final keys and values of the ids of `causal`, fed in pieces of `cache_chunk_sizes`.
`cases.json` lists `greedy` prompts with the ids they continue to.
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
from dlm_jax.decode import Autoregressive
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass

FIELDS = {"input_ids", "position_ids", "mask", "logits"}
CACHED = re.compile(r"layer(\d+)_(keys|values)")


def run(folder: Path) -> tuple[bool, float, str]:
    """Compares every array case with this library.

    Args:
      folder: as in the module's docstring.

    Returns:
      Whether all agree, the largest absolute error, and a sentence: the cases run, or those that failed.
    """
    folder = Path(folder)
    facts = json.loads((folder / "cases.json").read_text())
    cases = read_cases(folder / "cases.npz")
    # untrained models have logits of order 30; the tolerances are those recommended with the numbers
    atol = 2e-4 if facts.get("trained_steps", 1) else 5e-4
    model, params = dlm_jax.load(folder)
    worst, failed = 0.0, []
    with jax.default_matmul_precision("highest"):
        for name, fields in cases.items():
            try:
                got = run_cache(model, params, cases["causal"]["input_ids"], facts["cache_chunk_sizes"], fields) \
                    if "input_ids" not in fields else {"logits": run_forward(model, params, fields)}
            except (ValueError, KeyError) as error:
                failed.append(f"{name}: {error!r}")
                continue
            for field, value in got.items():
                error = np.abs(np.asarray(value) - fields[field])
                worst = max(worst, float(error.max()))
                # a NaN compares false, so it counts as a failure
                if not np.all(error <= atol + 1e-4 * np.abs(fields[field])):
                    failed.append(f"{name} {field}: off by {error.max():.3g}")
    if not cases:
        failed.append("no array cases")
    greedy, ties = facts.get("greedy", []), 0
    for index, case in enumerate(greedy):
        if run_greedy(model, params, case) != case["expected_ids"]:
            # the prompts are not filtered: two logits this close may be told apart by rounding alone
            near = case["min_top1_top2_logit_gap"] < 1e-3
            ties += near
            failed += [] if near else [f"greedy {index}: other ids"]
    detail = f"{len(cases)} array cases, {len(greedy)} greedy prompts" + (f", {ties} near ties differ" if ties else "")
    return not failed, worst, "; ".join(failed) or detail


def read_cases(file: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns case -> field -> array of an npz file with keys `<case>__<field>`."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(file) as arrays:
        for key in arrays:
            case, field = key.split("__", 1)
            cases.setdefault(case, {})[field] = arrays[key]
    return cases


def run_forward(model, params, fields):
    """Returns the logits of one case; ValueError for a field this runner does not know."""
    unknown = fields.keys() - FIELDS
    if unknown:
        raise ValueError(f"fields not covered: {sorted(unknown)}")
    mask = fields.get("mask")
    return dlm_jax.forward(model, params, fields["input_ids"], fields.get("position_ids"),
                           None if mask is None else mask[:, 0])


def run_greedy(model, params, case):
    """Returns prompt and greedy continuation of one case."""
    out = dlm_jax.generate(model, params, [case["prompt"]], Autoregressive(), max_new_tokens=case["max_new_tokens"],
                           eos_id=case["eos_id"])
    return [*case["prompt"], *out.tokens[0].tolist()]


def run_cache(model, params, tokens, pieces, fields):
    """Feeds tokens piece by piece through a cache; returns what `fields` asks for."""
    batch, length = tokens.shape
    if sum(pieces) != length:
        raise ValueError(f"cache_chunk_sizes sum to {sum(pieces)}, not to the {length} tokens")
    rank = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

    @functools.partial(jax.jit, donate_argnums=1)
    def feed(params, cache, piece, index):
        score = model.scorer(params)
        hidden, cache = score.hidden(piece, Pass(index, vis.by_rank(jnp.zeros_like(index), index, rank), index), cache)
        return score.head(hidden), cache

    cache = model.scorer(params).init_cache(batch, length)
    logits, start = [], 0
    for size in pieces:
        piece = jnp.asarray(tokens[:, start: start + size], jnp.int32)
        out, cache = feed(params, cache, piece, rank[:, start: start + size])
        logits.append(out)
        start += size
    got = {}
    for field in fields:
        match = CACHED.fullmatch(field)
        if field == "logits":
            got[field] = jnp.concatenate(logits, axis=1)
        elif match:
            got[field] = getattr(cache.members[0], match[2])[int(match[1])]  # (B, K, S, H)
        else:
            raise ValueError(f"field not covered: {field}")
    return got
