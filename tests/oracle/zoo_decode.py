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
      counts: of the ledger's forwards, name in the case -> kinds that it counts.
    """

    decoder: decode.Decoder
    limit: Callable[[int], int]
    eos: int
    counts: dict[str, tuple[str, ...]]
    answer: Callable[[np.ndarray, int], np.ndarray] = lambda ids, eos: ids


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
        decode.BlockDiffusion(block_size=size, commit=rule, stop=decode.AfterBlock(), closing="always"),
        _aligned(size, p["gen_length"]), (p["stopping_criteria_idx"] or [-1])[0],
        {"nfe": _ALL, **{f"nfe_{kind}": (kind,) for kind in _ALL}})


SETTINGS: dict[tuple[str, str], Callable[[Folder, dict], Setting]] = {
    ("sdar", "generate"): sdar,
}


@functools.lru_cache(maxsize=2)
def decoded(folder: Folder) -> dict[str, tuple[Any, int]]:
    """Returns, for each case run here, the generation that holds it and its first row."""
    model, params = folder.model
    groups: dict[Any, list[tuple[dict, Setting]]] = {}
    for case in folder.cases:
        make = SETTINGS.get((model.config.family, case["kind"]))
        if make is not None and not case.get("official_quirk"):
            setting = make(folder, case)
            groups.setdefault((setting.decoder, setting.eos), []).append((case, setting))
    prompts = lambda cases: [row for case, _ in cases for row in case["prompt_ids"]]
    limits = lambda cases: [setting.limit(len(row)) for case, setting in cases for row in case["prompt_ids"]]
    longest = max((len(row) for cases in groups.values() for row in prompts(cases)), default=1)
    room = max((limit for cases in groups.values() for limit in limits(cases)), default=1)
    found = {}
    for (decoder, eos), cases in groups.items():
        runner, first = Runner(model, params, decoder), 0
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
    make = SETTINGS.get((folder.model[0].config.family, case["kind"]))
    if make is None:
        return Outcome(f"no setting for {case['kind']}")
    setting, (outs, first) = make(folder, case), decoded(folder)[case["id"]]
    wrong, forwards = [], dict.fromkeys(setting.counts, 0)
    for i, prompt in enumerate(case["prompt_ids"]):
        out, row = outs[(first + i) // ROWS], (first + i) % ROWS
        limit = setting.limit(len(prompt))
        got = np.where(out.committed_at[row] >= 0, out.canvas[row], folder.tokens["mask_token_id"])[:limit]
        got, want = setting.answer(got, setting.eos), expected(case, i)
        if len(got) != len(want) or (got != want).any():
            wrong.append(f"row {i}: ids {got.tolist()} are not {want.tolist()}")
        for name, kinds in setting.counts.items():
            forwards[name] = max(forwards[name], sum(int(out.ledger.forwards[kind][row]) for kind in kinds))
    wrong += [f"{name}: {count} forwards are not {case[name]}" for name, count in forwards.items()
              if count != case[name]]
    return Outcome("; ".join(wrong))


def expected(case: dict, row: int) -> np.ndarray:
    """Returns what the authors return behind a prompt."""
    if "expected_return" in case:
        return np.array(case["expected_return"][row])
    return np.array(case["expected_ids"][row][len(case["prompt_ids"][row]) :])


RUNNERS = dict.fromkeys({kind for _, kind in SETTINGS}, run)
