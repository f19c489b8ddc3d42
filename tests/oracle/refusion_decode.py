"""Runs the decoding cases of a `refusion_*`-format folder through `dlm_jax.stream`.

The format: `config.json`, `model.safetensors` and `cases.json` with a list `cases`; a case names the prompt, the
released code's hyperparameters, and the ids, positions, commit order, TPF and model calls that code produced.
"""

from __future__ import annotations

import json
from pathlib import Path

import dlm_jax
from dlm_jax.decode import ReFusion


def run(folder: Path) -> tuple[bool, float, str]:
    """Compares every decoding case, ids, positions and call counts exactly, TPF to 1e-9.

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
    return not failed and bool(cases), worst, "; ".join(failed[:3]) or f"{len(cases)} decoding cases"


def decode(model, params, case: dict) -> dict:
    """Returns the fields of a case as this library produces them, under the case's own names."""
    k, start = case["slot_size"], len(case["prompt"])
    length = -(-case["gen_length"] // k) * k
    block = length // case["serial_num_blocks"]  # what does not divide is never generated
    decoder = ReFusion(slot_size=k, block_length=block, slot_threshold=case["slot_threshold"],
                       token_threshold=case["token_threshold"], temperature=case["temperature"], reference_compat=True)
    ids, places, shares = [], [], []
    calls = {"denoise": 0, "verify": 0, "draft": 0}
    planned = last = 0
    for event in dlm_jax.stream(model, params, case["prompt"], decoder, max_new_tokens=block * case["serial_num_blocks"],
                                eos_id=case["eos_id"], mask_id=case["mask_id"]):
        last = event.forward
        if event.kind == "denoise":
            planned, drafts = event.forward, len(event.tokens)
        if event.committed:
            ids += event.tokens
            places += [start + p for p in event.positions]
            after = event.forward - planned
            slots = len({p // k for p in event.positions})
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
