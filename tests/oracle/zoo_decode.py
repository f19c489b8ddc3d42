"""Runs the authors' decoding by the library's one block decoder: ids, and the number of forwards of each kind.

`SETTINGS` says for each (family, kind) how a case's parameters are written here and what it counts. Cases of one
setting are decoded as one ragged batch. Prompts are rows of their own, also where the authors ran them as a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dlm_jax import decode
from dlm_jax.decode import Runner
from tests.oracle.masked import Folder, Outcome
from tests.oracle.zoo_views import with_adapter

ROWS = 8  # decoded at once


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a case is run here.

    Attributes:
      decoder: the decoder.
      limit: of a prompt's length, tokens to generate.
      eos: id, -1 for none.
      answer: of what came back (ids with masks where nothing is, and the limit), what the authors return behind the
        prompt.
      compared: of what the authors return, how much; rows of a batch and drafts go on behind their end.
      offered: of a prompt's length, whether the row is compared.
      adapter: whether the folder's adapter is attached.
      traced: whether a token that a forward commits stays, so that what every forward was fed can be told.
      counts: of the ledger's forwards, name in the case -> kinds that it counts.
    """

    decoder: decode.Decoder
    limit: Callable[[int], int]
    eos: int
    counts: dict[str, tuple[str, ...]]
    answer: Callable[[np.ndarray, int], np.ndarray] = lambda ids, eos: ids
    compared: Callable[[np.ndarray, int], np.ndarray] = lambda ids, eos: ids
    offered: Callable[[int], bool] = lambda prompt: True
    adapter: bool = False
    traced: bool = True


_ALL = ("prefill", "denoise", "commit")


def _aligned(size: int, length: int) -> Callable[[int], int]:
    return lambda prompt: -(-(prompt + length) // size) * size - prompt


def sdar(folder: Folder, case: dict) -> Setting:
    """SDAR's generate.py."""
    p = case["params"]
    size, steps = p["block_length"], p["denoising_steps"]
    rule = {"low_confidence_dynamic": lambda: decode.Enough(p["confidence_threshold"], decode.Even(steps)),
            "low_confidence_static": lambda: decode.Even(steps),
            "sequential": lambda: decode.InOrder(decode.Even(steps))}[p["remasking_strategy"]]()
    return Setting(
        decode.BlockDiffusion(block_size=size, commit=rule, stop=decode.AfterBlock(), closing="always",
                              confidence=decode.Tempered(decode.Probability(), p["temperature"]), top_k=p["top_k"],
                              top_p=p["top_p"]),
        _aligned(size, p["gen_length"]), (p["stopping_criteria_idx"] or [-1])[0],
        {"nfe": _ALL, **{f"nfe_{kind}": (kind,) for kind in _ALL}})


def jetengine(folder: Folder, case: dict) -> Setting | str:
    """JetEngine's scheduler; a mask is no answer here."""
    p = case["params"]
    size, steps = p["block_length"], p["denoising_steps"]
    order = decode.InOrder(decode.Even(steps))
    rule = {"low_confidence_dynamic": lambda: decode.Enough(p["dynamic_threshold"], order),
            "low_confidence_static": lambda: decode.Even(steps), "sequential": lambda: order,
            "entropy_bounded": lambda: decode.EntropyBound(p["eb_threshold"])}[p["remasking_strategy"]]()
    measure = decode.Entropy() if p["remasking_strategy"] == "entropy_bounded" else decode.Probability()
    if p["repetition_penalty"] != 1.0:
        return "with a penalty on repeated tokens, which is not offered"
    if case["left_masked"] and p["remasking_strategy"] != "entropy_bounded":
        return "in which a mask is predicted for an answer"
    return Setting(
        decode.BlockDiffusion(block_size=size, commit=rule, stop=decode.AfterBlock(), closing="always", passes=steps,
                              confidence=decode.Tempered(measure, p["temperature"])),
        _aligned(size, p["max_tokens"]), (p["stop_words"] or [-1])[0],
        {"nfe": _ALL, **{f"nfe_{kind}": (kind,) for kind in _ALL}},
        lambda ids, eos: ids[: len(case["completion_ids"][0])])  # blocks behind the one with a stop word are not there


def through(ids: np.ndarray, eos: int) -> np.ndarray:
    """Returns the ids up to the first end, which is kept."""
    ends = np.flatnonzero(ids == eos)
    return ids[: ends[0] + 1] if ends.size else ids


def fast_dllm_v2(folder: Folder, case: dict) -> Setting | str:
    """Fast-dLLM v2's generate; the seed of a block that is not decoded is kept as one more token."""
    p = case["params"]
    size, sub = p["block_size"], p["small_block_size"]
    if case["kind"] == "generate" and len(case["prompt_ids"][0]) == size:
        return "whose prompt of just one block is never read"
    return Setting(
        decode.BlockDiffusion(block_size=size, sub_block=sub, commit=decode.Threshold(p["threshold"]),
                              inner=p["use_block_cache"]),
        lambda prompt: (prompt // size + p["max_new_tokens"] // size) * size - prompt + 1, p["stop_token"],
        {"nfe": _ALL}, through)


def fast_dllm_v2_batch(folder: Folder, case: dict) -> Setting | str:
    """Fast-dLLM v2's batch_sample, up to each row's stop.

    Not compared: forwards, as rows wait for each other; rows whose prompts reach beyond the block that the shortest
    ends in, where seeds overwrite a token of the prompt; anything where rows share the decision which part is run.
    """
    one, p = fast_dllm_v2(folder, case), case["params"]
    size, longest = p["block_size"], max(map(len, case["prompt_ids"]))
    end = (longest // size + p["max_new_tokens"] // size) * size + 1
    return "whose rows share what is run" if p["use_block_cache"] else dataclasses.replace(
        one, limit=lambda prompt: end - prompt, counts={}, compared=through,
        offered=lambda prompt: prompt <= (min(map(len, case["prompt_ids"])) // size + 1) * size)


def llada2(folder: Folder, case: dict) -> Setting:
    """LLaDA2.0's generate."""
    p = case["params"]
    steps = min(p["steps"], p["gen_length"] // p["minimal_topk"])
    return Setting(
        decode.BlockDiffusion(block_size=p["block_length"], commit=decode.Enough(p["threshold"], decode.Even(steps)),
                              stop=decode.Settled() if p["eos_early_stop"] else decode.AfterBlock()),
        _aligned(p["block_length"], p["gen_length"]), p["eos_id"], {"nfe": ("denoise",)},
        lambda ids, eos: through(ids[: p["gen_length"]], eos), functools.partial(_answer, case))


def llada21(folder: Folder, case: dict) -> Setting:
    """LLaDA2.1's generate, which edits."""
    p = case["params"]
    return Setting(
        decode.BlockDiffusion(
            block_size=p["block_length"], commit=decode.Enough(p["threshold"], decode.TopN(p["num_to_transfer"])),
            editing=decode.Editing(p["editing_threshold"], p["max_post_steps"]),
            stop=decode.AfterBlock() if p["eos_early_stop"] else decode.Never()),
        _aligned(p["block_length"], p["gen_length"]), p["eos_id"], {"nfe": ("denoise",)},
        lambda ids, eos: through(ids[: p["gen_length"]], eos), functools.partial(_answer, case), traced=False)


def _answer(case: dict, ids: np.ndarray, eos: int) -> np.ndarray:
    """Returns the answer of what LLaDA2 returns, which sometimes has the prompt before it."""
    prompt = np.array(case["prompt_ids"][0])
    return ids[len(prompt) :] if len(ids) > len(prompt) and (ids[: len(prompt)] == prompt).all() else ids


def nemotron(folder: Folder, case: dict) -> Setting:
    """Nemotron's generate: one token a forward without a threshold; rows that end wait for their neighbours."""
    p, several = case["params"], len(case["prompt_ids"]) > 1
    waits = several and any(p["eos_token_id"] in expected(case, row) for row in range(len(case["prompt_ids"])))
    told = None if p["causal_context"] else decode.Conventions(prompt="full", commit="block-bidirectional")
    rule = decode.TopN(1) if p["threshold"] is None else decode.Threshold(p["threshold"])
    budget = p.get("max_thinking_tokens")
    thinking = None if budget is None else decode.Thinking(budget, p["end_think_token_id"])
    return Setting(
        decode.BlockDiffusion(block_size=p["block_length"], commit=rule, closing="always", conventions=told,
                              thinking=thinking),
        lambda prompt: p["max_new_tokens"], p["eos_token_id"],
        {} if waits else {"nfe": ("denoise", "commit")}, through, through)


def nemotron_ar(folder: Folder, case: dict) -> Setting:
    """Nemotron's ar_generate."""
    p = case["params"]
    return Setting(decode.Autoregressive(), lambda prompt: p["max_new_tokens"], p["eos_token_id"],
                   {"forward_calls": ("prefill", "decode")}, through)


def nemotron_speculative(folder: Folder, case: dict) -> Setting:
    """Nemotron's linear_spec_generate, which keeps what the last round said beyond the length that was asked for."""
    p = case["params"]
    return Setting(
        decode.SelfSpeculation(block_size=p["block_length"], threshold=p["threshold"]),
        lambda prompt: p["max_new_tokens"], p["eos_token_id"], {"nfe": ("prefill", "draft", "verify")}, through,
        lambda ids, eos: through(ids[: p["max_new_tokens"]], eos), adapter=bool(case.get("lora")), traced=False)


def llada(folder: Folder, case: dict) -> Setting:
    """LLaDA's generate, by the decoder of answers that are seen whole."""
    p = case["params"]
    return Setting(
        decode.llada(steps=p["steps"], remasking=p["remasking"], cfg_scale=p["cfg_scale"],
                     temperature=p["temperature"], schedule=decode.Blocks(p["block_length"]), stop=decode.Never()),
        lambda prompt: p["gen_length"], -1, {"nfe": ("denoise",)})


def stable_diffcoder(folder: Folder, case: dict) -> Setting:
    """Stable-DiffCoder's generate_block, whose last block is cut and what follows an EOS in its block is EOS."""
    p = case["params"]
    rule = decode.Quota(p["steps"]) if p["threshold"] is None else decode.Threshold(p["threshold"])

    def answer(ids, eos):
        kept = through(ids, eos)
        size, first = p["block_length"], len(case["prompt_ids"][0]) % p["block_length"]
        end = min(-(-(len(kept) + first) // size) * size - first, len(ids))
        return ids if len(kept) == len(ids) else np.concatenate([kept, np.full(end - len(kept), eos)])

    return Setting(
        decode.BlockDiffusion(block_size=p["block_length"], commit=rule, stop=decode.AfterBlock(), cut=True,
                              closing="length"),
        lambda prompt: p["gen_length"], -1 if p["eos_id"] is None else p["eos_id"], {"nfe": ("denoise", "commit")},
        answer)


def wedlm(folder: Folder, case: dict) -> Setting:
    """WeDLM's generate_wedlm."""
    p = case["params"]
    rule = decode.Threshold(p["confidence_threshold"]) if p["confidence_threshold"] else decode.TopN(1)
    return Setting(
        decode.BlockDiffusion(block_size=p["block_size"], commit=rule, stop=decode.Never(), cut=True,
                              confidence=decode.Tempered(decode.Probability(), p["temperature"])),
        lambda prompt: p["max_new_tokens"], -1, {"nfe": ("denoise",)})


SETTINGS: dict[tuple[str, str], Callable[[Folder, dict], Setting | str]] = {
    ("sdar", "generate"): sdar, ("sdar", "jetengine"): jetengine, ("Fast_dLLM_Qwen", "generate"): fast_dllm_v2,
    ("Fast_dLLM_Qwen", "batch_sample"): fast_dllm_v2_batch,
    ("sdar_moe", "generate"): sdar, ("sdar_moe", "jetengine"): jetengine,
    ("llada2_moe", "generate_2.0"): llada2, ("llada2_moe", "generate_2.1"): llada21,
    ("nemotron_labs_diffusion", "generate"): nemotron, ("nemotron_labs_diffusion", "ar_generate"): nemotron_ar,
    ("nemotron_labs_diffusion", "linear_spec_generate"): nemotron_speculative,
    ("llada_moe", "generate"): llada, ("stable-diffcoder", "generate_block"): stable_diffcoder,
    ("wedlm-qwen3", "generate_wedlm"): wedlm, ("wedlm-qwen2", "generate_wedlm"): wedlm}


def setting_of(folder: Folder, case: dict) -> Setting | str | None:
    """Returns how a case is run here, or why it is not; None where nothing is known of its kind."""
    make = SETTINGS.get((folder.model[0].config.family, case["kind"]))
    if make is not None and any(folder.tokens["mask_token_id"] in row for row in case["prompt_ids"]):
        return "whose prompt holds a mask"
    return None if make is None else make(folder, case)


@functools.lru_cache(maxsize=2)
def decoded(folder: Folder) -> dict[str, tuple[Any, int]]:
    """Returns, for each case run here, the generation that holds it and its first row."""
    model, params = folder.model
    groups: dict[Any, list[tuple[dict, Setting]]] = {}
    for case in folder.cases:
        setting = None if case.get("official_quirk") else setting_of(folder, case)
        if isinstance(setting, Setting):
            groups.setdefault((setting.decoder, setting.eos, setting.adapter), []).append((case, setting))
    prompts = lambda cases: [row for case, _ in cases for row in case["prompt_ids"]]
    limits = lambda cases: [setting.limit(len(row)) for case, setting in cases for row in case["prompt_ids"]]
    longest = max((len(row) for cases in groups.values() for row in prompts(cases)), default=1)
    room = max((limit for cases in groups.values() for limit in limits(cases)), default=1)
    found = {}
    for (decoder, eos, adapter), cases in groups.items():
        runner, first = Runner(model, with_adapter(folder)[1] if adapter else params, decoder), 0
        rows, most = prompts(cases), limits(cases)
        outs = []
        for start in range(0, len(rows), ROWS):  # one shape for every setting
            request = runner.request(
                rows[start : start + ROWS], max_new_tokens=most[start : start + ROWS], eos_id=eos,
                mask_id=folder.tokens["mask_token_id"], batch=ROWS, prompt_capacity=longest, capacity=room)
            outs.append(runner.read(runner.run(runner.start(request)), range(len(rows[start : start + ROWS])), room))
        for case, _ in cases:
            found[case["id"]] = outs, first
            first += len(case["prompt_ids"])
    return found


def run(folder: Folder, case: dict) -> Outcome:
    """Compares ids and forwards of one case."""
    setting = setting_of(folder, case)
    if setting is None:
        return Outcome(f"no setting for {case['kind']}")
    if isinstance(setting, str):
        return Outcome(excused=f"{setting}, not run")
    outs, first = decoded(folder)[case["id"]]
    wrong, forwards = [], dict.fromkeys(setting.counts, 0)
    for i, prompt in enumerate(case["prompt_ids"]):
        if not setting.offered(len(prompt)):
            continue
        out, row = outs[(first + i) // ROWS], (first + i) % ROWS
        limit = setting.limit(len(prompt))
        got = np.where(out.committed_at[row] >= 0, out.canvas[row], folder.tokens["mask_token_id"])[:limit]
        got, want = setting.answer(got, setting.eos), setting.compared(expected(case, i), setting.eos)
        if len(got) != len(want) or (got != want).any():
            wrong.append(f"row {i}: ids {got.tolist()} are not {want.tolist()}")
        if setting.traced and len(case["prompt_ids"]) == 1 and not wrong:
            wrong += fed(folder, case, prompt, out.canvas[row], out.committed_at[row], limit,
                         int(out.ledger.after_prefill()[row]))
        if "trajectory" in case and not wrong:
            wrong += appeared(case, prompt, out.committed_at[row])
        for name, kinds in setting.counts.items():
            forwards[name] = max(forwards[name], sum(int(out.ledger.forwards[kind][row]) for kind in kinds))
    wrong += [f"{name}: {count} forwards are not {case[name]}" for name, count in forwards.items()
              if count != case[name]]
    return Outcome("; ".join(wrong))


def appeared(case: dict, prompt: list[int], at: np.ndarray) -> list[str]:
    """Compares the denoise passes that committed each token; a pass commits each block before."""
    size = case["params"]["block_length"]
    number = np.arange(len(case["trajectory"]))
    ours, there = at[number] - (number + len(prompt) % size) // size, np.array(case["trajectory"])
    wrong = np.flatnonzero((at[number] >= 0) & (ours != there))
    return [f"token {wrong[0]} appeared at {ours[wrong[0]]}, not {there[wrong[0]]}"] if wrong.size else []


def fed(folder: Folder, case: dict, prompt: list[int], ids: np.ndarray, at: np.ndarray, limit: int,
        forwards: int) -> list[str]:
    """Compares what every forward was fed with what stood there here before it.

    Args:
      folder, case: with the ids fed to each forward, padded with -1.
      prompt: token ids.
      ids, at: answer, and the forward after prefill that committed each token.
      limit: tokens of the answer.
      forwards: after the prefill.

    Returns:
      What is wrong.
    """
    trace = folder.array(case, "trace")
    if trace is None or not case.get("trace_robust"):
        return []
    places, mask = folder.array(case, "trace_positions"), folder.tokens["mask_token_id"]
    for call, row in enumerate(trace):
        row = row[row >= 0]
        start = case["past_lengths"][call] if "past_lengths" in case else 0
        start += (case.get("replace_positions") or {call: 0})[call] or 0
        at_call = start + np.arange(len(row)) if places is None else places[call][: len(row)]
        for place, token in zip(at_call, row):
            number = place - len(prompt)
            if number >= limit:
                continue
            known = number < 0 or 0 <= at[number] < call + 1 - (len(trace) - forwards)
            here = prompt[place] if number < 0 else ids[number] if known else mask
            if here != token:
                return [f"forward {call} was fed {token} at {place}, here stood {here}"]
    return []


def expected(case: dict, row: int) -> np.ndarray:
    """Returns what the authors return behind a prompt."""
    if "expected_return" in case:
        return np.array(case["expected_return"][row])
    return np.array(case["expected_ids"][row][len(case["prompt_ids"][row]) :])


RUNNERS = dict.fromkeys({kind for _, kind in SETTINGS}, run)
