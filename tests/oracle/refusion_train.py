"""Runs the training cases of a ReFusion oracle folder against `dlm_jax.objectives.refusion`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dlm_jax.io import hf, names
from dlm_jax.models import build
from dlm_jax.models.hf_config import from_hf
from dlm_jax.nn import visibility
from dlm_jax.objectives import losses, refusion

RTOL, GRADIENT_RTOL, ATOL, LOGIT_ATOL, LOGIT_RTOL = 1e-5, 1e-3, 1e-5, 2e-4, 1e-4


def as_stored(tree: dict, config) -> dict[str, np.ndarray]:
    """Returns the tensors of a parameter-shaped tree under their checkpoint names and in its layout."""
    found = {}
    for parameter in names.parameters(config):
        whole = tree
        for key in parameter.path:
            whole = whole[key]
        for name, index in zip(parameter.names, np.ndindex(*parameter.lead)):
            part = parameter.to_stored(np.asarray(whole)[index])
            if parameter.piece is None:
                found[name] = part
            else:
                parameter.piece.put(found.setdefault(name, np.zeros(parameter.stored_shape, part.dtype)), part)
    return found


def explicit(case: dict) -> refusion.Corruption:
    """Builds the corruption that a case spells out."""
    samples = case["samples"]
    most = max(1, *(len(s["slot_masked"]) for s in samples))
    masked, rank = np.zeros((len(samples), most), bool), np.zeros((len(samples), most), np.int32)
    for row, sample in enumerate(samples):
        masked[row, : len(sample["slot_masked"])] = sample["slot_masked"]
        rank[row, sample["clean_slot_order"]] = np.arange(len(sample["clean_slot_order"]))
    return refusion.Corruption(
        slot_size=jnp.asarray([s["slot_size"] for s in samples], jnp.int32),
        p_mask=jnp.asarray([s["p_mask"] for s in samples], jnp.float32),
        slot_masked=jnp.asarray(masked),
        slot_rank=jnp.asarray(rank),
    )


class _Checker:
    """Collects the largest error and the first failure."""

    def __init__(self):
        self.worst, self.failures, self.checks = 0.0, [], 0

    def same(self, what: str, got, want) -> None:
        self.checks += 1
        if not np.array_equal(np.asarray(got), np.asarray(want)):
            self.failures.append(f"{what} differs")

    def close(self, what: str, got, want, rtol: float, atol: float = ATOL) -> None:
        self.checks += 1
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = float(np.max(np.abs(got - want), initial=0.0)) if got.shape == want.shape else np.inf
        self.worst = max(self.worst, error)
        if got.shape != want.shape or not np.all(np.abs(got - want) <= atol + rtol * np.abs(want)):
            self.failures.append(f"{what}: largest error {error:.3g}")


@functools.partial(jax.jit, static_argnums=0)
def _compute(model, params, batch, corruption, mask_id):
    """Returns inputs, logits, token losses, the released terms, the paper's weights and the released gradient."""
    inputs = refusion.arrange(batch, corruption, mask_id)
    rows = losses.Rows(inputs.tokens, inputs.positions, inputs.valid, inputs.labels, {})

    def total(params):
        nll = losses.rows_nll(model.scorer(params), rows, chunk=512)
        term = refusion.reduce(nll, inputs, corruption, "released")
        return term["ar"] + term["mdm"], (nll, term)

    (value, (nll, term)), gradient = jax.value_and_grad(total, has_aux=True)(params)
    logits = model.scorer(params)(rows.tokens, rows.positions, visibility.causal(rows.valid))
    paper = {"weights": refusion.weights(inputs, corruption), "terms": refusion.reduce(nll, inputs, corruption)}
    return inputs, logits, nll, term | {"total": value}, paper, gradient


def _case(check: _Checker, folder: Path, model, params, case: dict, array) -> None:
    name = case["name"]
    batch = {
        "tokens": jnp.asarray(array("raw_input_ids"), jnp.int32),
        "prompt_length": jnp.asarray(array("prompt_lengths"), jnp.int32),
        "length": jnp.asarray(array("attention_mask").sum(-1), jnp.int32),
    }
    corruption = explicit(case)
    with jax.default_matmul_precision("highest"):
        inputs, logits, nll, term, paper, gradient = jax.device_get(
            _compute(model, params, batch, corruption, case["mask_id"]))
    for ours, theirs in {
        "tokens": "model_input_ids", "positions": "position_ids", "labels": "labels", "mdm_mask": "mdm_mask",
        "ar_mask": "ar_loss_mask", "response_length": "answer_lengths",
    }.items():
        check.same(f"{name} {theirs}", getattr(inputs, ours), array(theirs))
    valid = np.asarray(inputs.valid)
    check.close(f"{name} logits", np.asarray(logits)[valid], array("logits")[valid], LOGIT_RTOL, LOGIT_ATOL)
    check.close(f"{name} token_nll", nll, array("token_nll"), RTOL)

    for what, got, want in (
        ("AR", term["ar"], case["official_ar_loss"]), ("MDM", term["mdm"], case["official_mdm_loss"]),
        ("total", term["total"], case["official_total_loss"]),
    ):
        if want is None:
            check.same(f"{name} official {what} loss is NaN", np.isnan(got), True)
        else:
            check.close(f"{name} official {what} loss", got, want, RTOL)

    for term_name, field in (("ar", "paper_l_arm"), ("mdm", "paper_l_mdm")):
        # the paper's loss is a mean over samples, the case lists the samples
        mine = np.sum(nll * paper["weights"][term_name], axis=1) * len(case["samples"])
        want = [s[field] or 0.0 for s in case["samples"]]
        check.close(f"{name} {field}", mine, want, RTOL)
        check.close(f"{name} {field} mean", paper["terms"][term_name], np.mean(want), RTOL)

    gradient = as_stored(gradient, model.config)
    for tensor, norm in (case.get("grad_norms") or {}).items():
        check.close(f"{name} |grad {tensor}|", np.linalg.norm(gradient[tensor]), norm, GRADIENT_RTOL)
    if case.get("grads_file"):
        for tensor, want in load_file(folder / case["grads_file"]).items():
            check.close(f"{name} grad {tensor}", gradient[tensor], want, GRADIENT_RTOL)


def run(folder: Path) -> tuple[bool, float, str]:
    """Checks every training case of a folder.

    Args:
      folder: holds `cases.json` and `cases.npz`, beside or below `config.json` and `model.safetensors`; or the
        folder above it.

    Returns:
      Whether all agree, the largest absolute error, and a line naming the counts or the first failures.
    """
    folder = Path(folder)
    folder = folder / "train" if (folder / "train").is_dir() else folder
    weights = folder if (folder / "config.json").exists() else folder.parent
    model = build.build(from_hf(json.loads((weights / "config.json").read_text())))
    params = hf.load_params(weights, model.config, dtype=np.float32)
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    check = _Checker()
    with np.load(folder / "cases.npz") as arrays:
        for case in cases:
            _case(check, folder, model, params, case, lambda field: arrays[f"c{case['index']}__{field}"])
    detail = f"{len(cases)} training cases, {check.checks} checks"
    if check.failures:
        detail += f", {len(check.failures)} failed: " + "; ".join(check.failures[:5])
    return not check.failures, check.worst, detail
