"""Runs decoding cases of the masked-diffusion format: LLaDA, Dream, Fast-dLLM, FreeCache, d3LLM and block diffusion.

Ids and the number of forwards are exact, and so is which tokens were masked before every forward where the case says
that its trace is robust. Cases of a folder that differ by their prompts alone are decoded as one ragged batch.

Compared less, by rule: what follows a block that the released loop left with masks (ours finishes it); the number of
forwards of `impl: jun2025`, which runs a forward on a finished block (ours may be lower); what a row decodes after the
block with its EOS because a neighbour is not finished; the order of commits whose confidences differ by rounding alone:
the released code takes equal ones in the order of a selection algorithm. There the released order must come about, in
one of a hundred tries, from noise of 1e-7 on the confidences.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import dlm_jax
from dlm_jax import decode
from dlm_jax.decode import MaskedDiffusion
from tests.oracle.masked import Folder, Outcome

UNFINISHED = "blocks that the released code leaves with masks, compared up to there"
FEWER = "with fewer forwards than impl jun2025"
TIES = "in which equal confidences are committed in another order"
ENDED = "with rows that end before their neighbours, compared up to there"


def decoder_of(case: dict) -> MaskedDiffusion:
    """Returns the decoder with a case's settings."""
    p, kind = case["params"], case["kind"]
    length, block = _length(p), p.get("block_length", p.get("block_size")) or 0
    heat = {"temperature": p.get("temperature", 0.0)}
    if kind == "bd3_sample":
        steps = p["steps_per_block"] * -(-length // block)
        return decode.block_diffusion(steps=steps, cfg_scale=p["cfg_scale"], block_length=block, **heat)
    if "block_add_threshold" in p:
        numbers = {ours: p[theirs] for ours, theirs in (
            ("add", "block_add_threshold"), ("sure", "decoded_token_threshold")) if p[theirs] is not None}
        return decode.d3llm(threshold=p["threshold"], early_stop=p["early_stop"], block_length=block,
                            ahead=decode.Ahead(**numbers) if kind == "multi_block" else None, **heat)
    if kind in ("no_cache", "prefix", "dual"):
        cache = {"no_cache": decode.NoCache(), "prefix": decode.Prefix(), "dual": decode.Dual()}[kind]
        if "alg" in p:  # Dream
            return decode.fast_dllm_dream(
                cache=cache, threshold=p["threshold"], steps=0 if cache.keeps and p["threshold"] else p["steps"],
                block_length=block or 32, **heat)
        counted = p["threshold"] is None and p["factor"] is None  # the other rules take no steps
        return decode.fast_dllm(cache=cache, threshold=p["threshold"], factor=p["factor"],
                                steps=p["steps"] if counted else 0, block_length=block, **heat)
    more = {"schedule": decode.Blocks(block) if block else decode.Whole(),
            "cache": decode.Free() if kind in ("block_cached", "freecache_block") else decode.NoCache(), **heat}
    if "alg" in p:
        if p.get("early_stop"):
            more["stop"] = decode.Run(p.get("early_stop_consecutive") or 1)
        more |= {"top_p": p.get("top_p") or 1.0, "top_k": p.get("top_k") or 0, "eps": p["eps"]}
        return decode.dream(steps=p["steps"], alg=p["alg"], alg_temp=p["alg_temp"], **more)
    return decode.llada(steps=p["steps"], remasking=p["remasking"], cfg_scale=p["cfg_scale"],
                        **more | {"stop": decode.Fill() if p.get("early_stop") else decode.Never()})


def _length(params: dict) -> int:
    return params["gen_length"] if "gen_length" in params else params["max_new_tokens"]


def prompts_of(case: dict) -> list[list[int]]:
    """Returns the prompts without padding."""
    if "attention_mask" in case:
        return [[t for t, real in zip(*row, strict=True) if real] for row in zip(case["prompt_ids"],
                                                                                 case["attention_mask"], strict=True)]
    return case["prompts"] if "prompts" in case else case["prompt_ids"]


@functools.lru_cache(maxsize=2)
def decoded(folder: Folder) -> dict[str, tuple[Any, int, Any]]:
    """Returns, for each case run here, the generation that holds it, its first row, and how to decode once more."""
    groups: dict[Any, list[dict]] = {}
    for case in folder.cases:
        if case["kind"] in RUNNERS and not case.get("official_quirk"):
            eos = case["params"].get("eos_token_id", case["params"].get("eos_id", folder.tokens["eos_token_id"]))
            key = (decoder_of(case), _length(case["params"]), eos, case["params"]["mask_id"])
            groups.setdefault(key, []).append(case)
    found = {}
    for (decoder, length, eos, mask), cases in groups.items():
        rows = [row for case in cases for row in prompts_of(case)]
        again = functools.partial(
            dlm_jax.generate, *folder.model, rows, max_new_tokens=length, eos_id=eos, mask_id=mask)
        out, row = again(decoder), 0
        for case in cases:
            found[case["id"]] = out, row, functools.partial(_with_noise, again, decoder)
            row += len(prompts_of(case))
    return found


def _with_noise(again: Any, decoder: MaskedDiffusion, seed: int) -> Any:
    return again(decoder.replace(commit=decode.Noisy(decoder.commit, 1e-7)), seed=seed)


def run(folder: Folder, case: dict) -> Outcome:
    """Compares ids, forwards and masks of one case."""
    out, first, again = decoded(folder)[case["id"]]
    rows, length, wrong = prompts_of(case), _length(case["params"]), []
    excused = ""
    expected = case["expected_ids"]
    block = case["params"].get("block_size", 0)
    start = -(-max(map(len, rows)) // block) * block if case["kind"] == "bd3_sample" else len(expected[0]) - length
    trace = folder.array(case, "trace")
    ours, until = [], length
    for row, ids in enumerate(expected, first):
        want = np.array(ids[start:])
        forwards = int(out.ledger.after_prefill()[row] + out.ledger.forwards["prefill"][row])
        ours.append(forwards)
        got, at = out.canvas[row], out.committed_at[row]
        until = len(want)
        if case["kind"] == "bd3_sample" and np.sum(at >= 0) < until:
            until, excused = int(np.sum(at >= 0)), ENDED
        left = unfinished(case, folder, want, start)
        if left is not None:
            until, excused = left, UNFINISHED
        if (at[:until] < 0).any() or (got[:until] == case["params"]["mask_id"]).any():
            wrong.append(f"row {row - first} is not finished")
        if (got[:until] != want[:until]).any():
            wrong.append(f"row {row - first}: ids {got[:until].tolist()} are not {want[:until].tolist()}")
        if left is None and trace is not None and case.get("trace_robust") and len(trace) == forwards:
            masks = (trace if trace.ndim == 2 else trace[:, row - first])[:, start:] == case["params"]["mask_id"]
            alike = lambda at, masks=masks: np.array_equal(masks, at > np.arange(len(masks))[:, None])
            if not alike(at):
                if any(alike(again(seed).committed_at[row]) for seed in range(100)):
                    excused = TIES
                else:
                    wrong.append(f"row {row - first}: other tokens were masked on the way")
    passes = 2 if case["kind"] == "bd3_sample" and case["params"]["cfg_scale"] else 1
    forwards = passes * max(ours)
    if case.get("impl") == "jun2025" and forwards < case["nfe"] and not wrong:
        excused = excused or FEWER
    elif excused != UNFINISHED and forwards != case["nfe"]:
        wrong.append(f"{forwards} forwards are not {case['nfe']}")
    return Outcome("; ".join(wrong), 0.0, excused)


def unfinished(case: dict, folder: Folder, want: np.ndarray, start: int) -> int | None:
    """Returns the first token of the first block that the released loop left with masks, None where it left none."""
    block = case["params"].get("block_length") or 1
    masks = [want == case["params"]["mask_id"]]
    trace = folder.array(case, "trace")
    if case["kind"] == "dual" and trace is not None:
        # a full pass opens a block; masks before it were left behind, though later passes may fill them
        passes = [t for t, size in enumerate(case["forward_lengths"]) if size == trace.shape[1]]
        for number, t in enumerate(passes):
            masks.append((trace[t, start:] == case["params"]["mask_id"]) & (np.arange(len(want)) < number * block))
    left = np.flatnonzero(np.any(masks, axis=0))
    return int(left[0]) // block * block if left.size else None


RUNNERS = dict.fromkeys(
    ("generate", "generate_batch_leftpad", "diffusion_generate", "diffusion_generate_batch_leftpad", "no_cache",
     "prefix", "dual", "baseline", "block_cached", "freecache_block", "multi_block", "bd3_sample"), run)
