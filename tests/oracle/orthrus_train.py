"""The dual-pass training layouts of an `orthrus_*`-format folder: the cases `dualA` and `dualB`.

`seq_ids` are clean tokens, `block_ids`, `position_ids` and `causal_limit` the blocks over them; recorded are the mask,
the logits of both views, the forward KL of every position, its means and the norms of the mean's gradients. dualA is
the objective's own layout and must come out of its anchors; dualB has a random limit for every block token.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.nn import visibility
from dlm_jax.objectives import orthrus
from tests.oracle.refusion_train import ATOL, GRADIENT_RTOL, LOGIT_RTOL, RTOL, as_stored

_SAMPLE = {"blocks": "block_ids", "positions": "position_ids", "limit": "causal_limit"}


@functools.partial(jax.jit, static_argnums=(0, 3))
def _compute(model, params, rows, objective):
    """Returns the dense mask, both views' logits, every KL, the mean over all offsets, and that over drafts with its
    gradient."""
    score = model.scorer(params)
    hidden, clean = orthrus.views(score, rows, objective)
    mask = visibility.orthrus_dual(rows.documents >= 0, rows.limit, objective.block_size).dense()
    whole = dataclasses.replace(objective, last_offset=True)
    loss = lambda params, objective: objective.rows_loss(model.scorer(params), _taught(rows, objective))[0]
    return (mask, score.head(hidden), score.head(clean), orthrus.compare(score, _taught(rows, whole), whole).kl,
            loss(params, whole), *jax.value_and_grad(loss)(params, objective))


def _taught(rows: orthrus.Rows, objective: orthrus.Orthrus) -> orthrus.Rows:
    """Returns rows whose every offset of the configuration has the same weight."""
    B, J = rows.share.shape
    even = jnp.full((B, J, objective.offsets), 1.0 / (B * J * objective.offsets))
    return dataclasses.replace(rows, weights=even, labels=even.astype(jnp.int32))


def run(model, params, facts: dict, cases: dict[str, dict[str, np.ndarray]], atol: float
        ) -> tuple[list[str], float, str]:
    """Runs both layouts; returns failures, the largest error of a logit or KL and a sentence."""
    failed, worst, checks = [], 0.0, 0
    objective = orthrus.Orthrus(mask_id=facts["mask_token_id"], block_size=facts["block_size"], head_chunk=7)

    def close(what, ours, theirs, rtol, atol=ATOL):
        nonlocal worst, checks
        checks += 1
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        error = np.abs(ours - theirs)
        worst = max(worst, float(error.max()))
        if not np.all(error <= atol + rtol * np.abs(theirs)):
            failed.append(f"{what}: off by {error.max():.3g}")

    for name in ("dualA", "dualB"):
        case, wanted = cases[name], facts[name]
        tokens = jnp.asarray(case["seq_ids"], jnp.int32)
        rows = orthrus.arrange({"tokens": tokens, "length": jnp.full(tokens.shape[0], wanted["ar_len"])},
                               jnp.asarray(wanted["anchors"], jnp.int32), objective)
        if name == "dualB":
            rows = dataclasses.replace(rows, limit=jnp.asarray(case["causal_limit"], jnp.int32))
        mask, student, teacher, kl, over_all, over_drafts, gradient = jax.device_get(
            _compute(model, params, rows, objective))
        exact = {ours: (getattr(rows, ours), case[theirs]) for ours, theirs in _SAMPLE.items()}
        for what, (ours, theirs) in (exact | {"mask": (mask, case["attn_mask"][:, 0])}).items():
            checks += 1
            if not np.array_equal(ours, theirs):
                failed.append(f"{name} {what} differs")
        close(f"{name} AR logits", teacher, case["ar_logits"], LOGIT_RTOL, atol)
        close(f"{name} diffusion logits", student, case["diffusion_logits"], LOGIT_RTOL, atol)
        close(f"{name} KL", kl.reshape(case["kl_per_position"].shape), case["kl_per_position"], RTOL)
        close(f"{name} mean KL of drafts", over_drafts, wanted["forward_kl_mean_offsets_0_to_Km2"], RTOL)
        close(f"{name} mean KL", over_all, wanted["forward_kl_mean_all_offsets"], RTOL)
        stored = as_stored(gradient, model.config)
        for tensor, norm in wanted["diff_param_grad_norms_of_first_kl"].items():
            close(f"{name} |grad {tensor}|", np.linalg.norm(stored[tensor]), norm, GRADIENT_RTOL)
        moved = [tensor for tensor, slope in stored.items() if "self_attn" in tensor and "_diff" not in tensor
                 and np.any(slope)]
        failed += [f"{name}: gradient on the frozen {tensor}" for tensor in moved]
    return failed, worst, f"2 dual-pass layouts ({checks} checks)"
