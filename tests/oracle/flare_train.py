"""Runs the two-stream training cases of a FLARE oracle folder against `dlm_jax.objectives.flare`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.io import hf
from dlm_jax.models import build
from dlm_jax.models.hf_config import from_hf
from dlm_jax.objectives import documents, flare
from tests.oracle.refusion_train import _Checker, as_stored

LOSS_RTOL, GRADIENT_RTOL, GRADIENT_ATOL = 1e-4, 1e-3, 1e-4
LOGIT_ATOL, LOGIT_RTOL = {"rough": 5e-4, "trained": 2e-4}, 1e-4
READINGS = flare.SHIFTS[:-1]
# losses that one forward gives: its variant, whether masks are the case's, and the losses' names
FORWARDS = {
    "noisy": ("flare", {
        "causal_context": ("causal_context", "none"), "ntp_loss": ("ntp_loss", "none"),
        **{f"flare:{shift}": ("flare", shift) for shift in READINGS}}),
    "am_bidir": ("am_bidir", {
        "am_bidir_no_shift": ("am_bidir", "none"), **{f"am_bidir:{shift}": ("am_bidir", shift) for shift in READINGS}}),
    "am_causal": ("am_causal", {
        "am_causal_no_shift": ("am_causal", "none"),
        **{f"am_causal:{shift}": ("am_causal", shift) for shift in READINGS}}),
    "bc": ("block_diffusion", {"block_diffusion": ("block_diffusion", "none")}),
    "ar_sft": ("ar_sft", {"ar_sft": ("ar_sft", "none")}),
}


def packed_batch(array, length: int, most: int) -> dict[str, jax.Array]:
    """Returns a case's row as the packer would yield it, with room for `length` tokens and `most` documents."""
    row = lambda x, size, fill=0: jnp.asarray(np.pad(x, (0, size - len(x)), constant_values=fill))[None]
    of_tokens = lambda field, fill=0: row(array(field).astype(np.int32), length, fill)
    starts = array("cu_seqlens").astype(np.int32)
    return {
        "tokens": of_tokens("tokens"), "loss_mask": of_tokens("response_mask") > 0,
        "documents": of_tokens("doc_ids", -1), "positions": of_tokens("position_ids"), "start": row(starts[:-1], most),
        "length": row(np.diff(starts), most), "example_id": jnp.zeros((1, most), jnp.int32)}


def arrange(batch: dict[str, jax.Array], drawn: jax.Array, objective: flare.Flare) -> flare.Rows:
    """Masks a packed batch as told, (B, T) bool, or wholly where the objective says so."""
    noise = documents.apart({**batch, "loss_mask": drawn | (objective.masking == "all")})["loss_mask"]
    return documents.each(batch, lambda rows: flare.arrange(rows, noise, objective))


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _compute(model, params, batch, drawn, objectives, wanted):
    """Returns what objectives that share a forward make of it.

    Returns:
      Logits of all streams; for each objective the token losses of its terms, the number of predictions of each, and
      the loss; gradients of the sums of the token losses of the objectives number `wanted`.
    """
    rows = [arrange(batch, drawn, objective) for objective in objectives]

    def losses_of(params):
        score = model.scorer(params)
        hidden, _ = score.hidden(*flare.streams(rows[0], objectives[0]))
        found = [flare.token_nll(score, hidden, row, one) for row, one in zip(rows, objectives)]
        sums = [sum(map(jnp.sum, terms.values())) for terms in found]
        targets = [{name: jnp.sum(weight > 0) for name, weight in row.weights.items()} for row in rows]
        return jnp.stack([sums[i] for i in wanted]) if wanted else jnp.zeros(1), (score.head(hidden), found, targets)

    gradient, (logits, found, targets) = jax.jacrev(losses_of, has_aux=True)(params)
    totals = [sum(jnp.sum(terms[name] * weight) for name, weight in row.weights.items())
              for row, terms in zip(rows, found)]
    return logits[0], found, targets, totals, gradient


def _objectives(case: dict, forward: str) -> dict[str, flare.Flare]:
    """Returns the objectives of a forward whose losses the case stores."""
    views = {"views": case["noisy_views"]} if forward in ("noisy", "bc") else {}
    return {name: flare.variant(kind, mask_id=case["mask_id"], block_size=case["block_size"], shift=shift, **views)
            for name, (kind, shift) in FORWARDS[forward][1].items() if name in case["losses"]}


def _forward(check: _Checker, model, params, case: dict, forward: str, batch, drawn, array) -> None:
    """Compares what one forward gives, beginning with its logits."""
    objectives = _objectives(case, forward)
    names = tuple(objectives)
    wanted = tuple(i for i, name in enumerate(names) if name in case["grad_norms"])
    with jax.default_matmul_precision("highest"):
        logits, found, targets, totals, gradient = jax.device_get(
            _compute(model, params, batch, drawn, tuple(objectives.values()), wanted))
    what = lambda name: f"{case['case']} {name}"
    atol = LOGIT_ATOL["rough" if "rough" in case["model"] else "trained"]
    streams = [stream[:case["length"]] for stream in np.split(logits, 1 + objectives[names[0]].views)]
    stored = {"noisy": ("logits_clean", "logits_noisy1", "logits_noisy2"),
              "bc": ("bc_logits_clean", "bc_logits_noisy1", "bc_logits_noisy2"),
              "am_bidir": ("logits_clean", "am_bidir_logits_noisy"),
              "am_causal": ("logits_clean", "am_causal_logits_noisy"), "ar_sft": ("logits_clean",)}[forward]
    for field, got in zip(stored, streams):
        check.close(what(field), got, array(field), LOGIT_RTOL, atol)
    for name, terms, counts, total in zip(names, found, targets, totals):
        want = case["losses"][name]
        check.same(what(f"{name} parts"), sorted(terms), sorted(want["parts"]))
        for part, stored_part in want["parts"].items():
            check.close(what(f"{name} {part}"), np.sum(terms[part]), stored_part["sum"], LOSS_RTOL)
            check.same(what(f"{name} {part} targets"), counts[part], stored_part["targets"])
        check.close(what(f"{name} loss"), total, want["per_response_token"], LOSS_RTOL)
        if name == "flare:noisy_row":
            for part in terms:
                got = terms[part][0, : case["length"]]
                check.close(what(f"nll_{part}"), got, array(f"nll_{part}"), LOGIT_RTOL, atol)
    for place, i in enumerate(wanted):
        name = names[i]
        _gradient(check, what(name), jax.tree.map(lambda x: x[place], gradient), model, case["grad_norms"][name],
                  array if name == "flare:noisy_row" else None)


def _gradient(check: _Checker, what: str, gradient, model, norms: dict, array) -> None:
    got = as_stored(gradient, model.config)
    atol = GRADIENT_ATOL * norms["total"]
    check.close(f"{what} |gradient|", np.sqrt(sum(np.sum(g.astype(np.float64)**2) for g in got.values())),
                norms["total"], GRADIENT_RTOL, atol)
    for tensor, norm in norms["per_tensor"].items():
        check.close(f"{what} |grad {tensor}|", np.linalg.norm(got[tensor]), norm, GRADIENT_RTOL, atol)
    for tensor in norms["per_tensor"] if array else ():
        want = array(f"grad__{tensor}")
        if want is not None:
            check.close(f"{what} grad {tensor}", got[tensor], want, GRADIENT_RTOL, atol)


def run(folder: Path, only: str = "") -> tuple[bool, float, str]:
    """Checks every two-stream training case of a folder.

    Args:
      folder: holds `cases.json` and `cases.npz`; models stand beside the folder above it.
      only: part of the names of the models whose cases are run.

    Returns:
      Whether all agree, the largest absolute error, and a line naming the counts or the first failures.
    """
    folder = Path(folder)
    cases = [case for case in json.loads((folder / "cases.json").read_text())["cases"] if only in case["model"]]
    # rows of equal shapes share what is compiled; a row that ends inside a block is not made longer
    shape = lambda case: (case["block_size"], case["noisy_views"], case["length"] % case["block_size"])
    room = {shape(case): [max(of(other) for other in cases if shape(other) == shape(case))
                          for of in (lambda c: c["length"], lambda c: len(c["documents"]))] for case in cases}
    check = _Checker()
    with np.load(folder / "cases.npz") as arrays:
        for case in cases:
            weights = folder.parents[1] / case["model"]
            model = build.build(from_hf(json.loads((weights / "config.json").read_text())))
            params = hf.load_params(weights, model.config, dtype=np.float32)
            array = lambda field: arrays[name] if (name := f"{case['case']}__{field}") in arrays else None
            batch = packed_batch(array, *room[shape(case)])
            drawn = jnp.pad(jnp.asarray(array("noise_mask1"), bool), (0, batch["tokens"].shape[1] - case["length"]))
            for forward, (_, names) in FORWARDS.items():
                if not case["losses"].keys().isdisjoint(names):
                    _forward(check, model, params, case, forward, batch, drawn[None], array)
    detail = f"{len(cases)} two-stream training cases, {check.checks} checks"
    if check.failures:
        detail += f", {len(check.failures)} failed: " + "; ".join(check.failures[:5])
    return not check.failures, check.worst, detail
