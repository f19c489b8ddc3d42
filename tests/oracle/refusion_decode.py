"""Runs the decoding cases of a `refusion_*`-format folder through `dlm_jax.stream`.

The format: `config.json`, `model.safetensors` and `cases.json` with a list `cases`; a case names the prompt, the
released code's hyperparameters, and the ids, positions, commit order, TPF and model calls that code produced.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import dlm_jax
from dlm_jax.decode import ReFusion


def run(folder: Path) -> tuple[bool, float, str]:
    """Compares every decoding case, ids, positions and call counts exactly, TPF to 1e-9.

    Every case is streamed alone; the three settings with most prompts also run as ragged batches.

    Args:
      folder: as in the module's docstring.

    Returns:
      Whether all agree, the largest TPF error, and a sentence.
    """
    folder = Path(folder)
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    model, params = dlm_jax.load(folder)
    worst, failed = 0.0, []
    for index, case in enumerate(cases):
        got = decode(model, params, case)
        worst = max(worst, abs(got["expected_tpf"] - case["expected_tpf"]))
        wrong = [name for name, value in got.items() if name != "expected_tpf" and value != case[name]]
        wrong += ["expected_tpf"] if abs(got["expected_tpf"] - case["expected_tpf"]) > 1e-9 else []
        if wrong:
            failed.append(f"case {index}: " + ", ".join(f"{w} {got[w]} is not {case[w]}" for w in wrong)[:300])
    together = batches(cases)[:3]
    for group in together:
        failed += [f"batch of {len(group)}: {wrong}" for wrong in check_batch(model, params, group)]
    detail = f"{len(cases)} decoding cases, {sum(map(len, together))} of them once more in ragged batches"
    return not failed and bool(cases), worst, "; ".join(failed[:3]) or detail


def batches(cases: list[dict]) -> list[list[dict]]:
    """Groups cases that differ by their prompt alone, the largest groups first."""
    groups: dict[tuple, list[dict]] = {}
    for case in cases:
        key = tuple(case[name] for name in (
            "slot_size", "serial_num_blocks", "gen_length", "slot_threshold", "token_threshold", "eos_id", "mask_id"))
        groups.setdefault(key, []).append(case)
    return sorted(groups.values(), key=len, reverse=True)


def settings(case: dict) -> tuple[ReFusion, dict]:
    """Returns the decoder and the limits of a case."""
    k = case["slot_size"]
    block = -(-case["gen_length"] // k) * k // case["serial_num_blocks"]  # what does not divide is never generated
    decoder = ReFusion(slot_size=k, block_length=block, slot_threshold=case["slot_threshold"],
                       token_threshold=case["token_threshold"], temperature=case["temperature"], reference_compat=True)
    return decoder, dict(max_new_tokens=block * case["serial_num_blocks"], eos_id=case["eos_id"],
                         mask_id=case["mask_id"])


def check_batch(model, params, cases: list[dict]) -> list[str]:
    """Decodes cases of one setting as a ragged batch; returns what disagrees with them, ids or the ledger."""
    decoder, limits = settings(cases[0])
    out = dlm_jax.generate(model, params, [case["prompt"] for case in cases], decoder, **limits)
    wrong = []
    for row, case in enumerate(cases):
        start, at = len(case["prompt"]), np.flatnonzero(out.committed_at[row] >= 0)
        got = {
            "expected_ids": case["prompt"] + out.canvas[row, at].tolist(),
            "expected_positions": list(range(start)) + (start + at).tolist(),
            "calls_total": int(out.ledger.after_prefill()[row]),
            "calls_mdm": int(out.ledger.forwards["denoise"][row]),
            "calls_refine_draft": int(out.ledger.forwards["draft"][row]),
        }
        verified = int(out.ledger.forwards["verify"][row])
        wrong += [f"row {row}: {name}" for name, value in got.items() if value != case[name]]
        if verified != case["calls_global_verify"] + case["calls_refine_verify"]:
            wrong.append(f"row {row}: {verified} verifications")
    return wrong


def decode(model, params, case: dict) -> dict:
    """Returns the fields of a case as this library produces them, under the case's own names."""
    k, start = case["slot_size"], len(case["prompt"])
    decoder, limits = settings(case)
    ids, places, shares = [], [], []
    calls = {"denoise": 0, "verify": 0, "draft": 0}
    planned = last = 0
    for event in dlm_jax.stream(model, params, case["prompt"], decoder, **limits):
        last = event.forward
        if event.kind == "denoise":
            planned, drafts = event.forward, len(event.tokens)
        if event.committed:
            ids += event.tokens
            places += [start + p for p in event.numbers]
            after = event.forward - planned
            slots = len({p // k for p in event.numbers})
            # the released TPF: slots over the calls of their own round, cut and discarded tokens counted too
            shares.append(k * slots / 2 if after == 1 else drafts / (after + 1))
            calls["denoise"] += 1
            calls["draft"] += (after - 1) // 2
            calls["verify"] += (after - 1) // 2
    order = sorted(range(len(ids)), key=places.__getitem__)
    return {
        "expected_ids": case["prompt"] + [ids[i] for i in order],
        "expected_positions": list(range(start)) + [places[i] for i in order],
        "commit_order_ids": ids,
        "commit_order_positions": places,
        "calls_total": last,
        "calls_mdm": calls["denoise"],
        "calls_global_verify": calls["denoise"],
        "calls_refine_draft": calls["draft"],
        "calls_refine_verify": calls["verify"],
        "expected_tpf": sum(shares) / len(shares),
    }
