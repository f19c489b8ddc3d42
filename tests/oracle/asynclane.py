"""Runs AsyncLane's cases: scripted scenarios and tiny models, event for event.

Cases whose programs are the same share them: block, lookahead and lanes get the largest room that any of them needs,
and every other number is traced.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax
from dlm_jax import decode
from dlm_jax.decode import AsyncLane, Runner
from dlm_jax.decode import request as requests
from dlm_jax.decode.asynclane import Boundary, Compact, diagnostics
from dlm_jax.decode.asynclane.lanes import ENDS, OPEN, REFINE, ROLES, WAITING
from dlm_jax.decode.asynclane.state import AHEAD, CHOSEN, FORCED, Rooms
from dlm_jax.decode.ledger import PREFILL, REFRESH
from dlm_jax.decode.runner import Rows
from tests.oracle import scripted_model

ROWS, PROMPT = 8, 16  # shapes of every batch
_SHARED = ("max_new_tokens", "block_size", "lookahead", "lane_capacity")  # in hp, but not of the program
_PROGRAM = ("commit", "cache", "mode", "prefix_state", "continuation_length", "eos_frontier", "refine_lookahead",
            "reuse_prefill")


def files(folder: Path) -> list[Path]:
    """Returns the files of a folder that hold cases of this format."""
    return [path for path in sorted(folder.glob("*.json")) if _is_cases(path)]


def _is_cases(path: Path) -> bool:
    if b'"hp"' not in path.read_bytes()[:1 << 22]:
        return False
    facts = json.loads(path.read_text())
    cases = facts.get("cases") if isinstance(facts, dict) else None
    return isinstance(cases, list) and bool(cases) and {"hp", "rule", "eos", "expected"} <= cases[0].keys()


def run(folder: Path) -> tuple[bool, float, str]:
    """Runs every case of a folder; see `tests.oracle.masked.run`."""
    ran, problems = collections.Counter(), []
    for path in files(folder):
        facts = json.loads(path.read_text())
        for case, problem in outcomes(folder, facts):
            ran[case.get("family", case.get("checkpoint"))] += 1
            if problem:
                problems.append(f"{case['id']}: {problem}"[:400])
    detail = f"{ran.total()} cases ({', '.join(f'{count} {name}' for name, count in sorted(ran.items()))})"
    if problems:
        detail = f"{len(problems)} of {detail} failed: " + "; ".join(problems[:3])
    return not problems and ran.total() > 0, 0.0, detail


def outcomes(folder: Path, facts: dict) -> Iterator[tuple[dict, str]]:
    """Yields every case with what disagrees, nothing where all agrees."""
    programs = collections.defaultdict(list)
    for case in facts["cases"]:
        hp = case["hp"]
        large = max(hp["block_size"], hp["lookahead"]) > 32
        programs[json.dumps([case.get("checkpoint"), case.get("model", {}).get("shift"), large,
                             [hp[name] for name in _PROGRAM]])].append(case)
    of = lambda name, cases: max(case["hp"][name] for case in cases)
    for cases in programs.values():
        rooms = Rooms.of(*(of(name, cases) for name in _SHARED[1:]))
        capacity = requests.bucket(of("max_new_tokens", cases))
        batches = collections.defaultdict(list)
        for case in cases:
            numbers = {name: number for name, number in case["hp"].items() if name != "max_new_tokens"}
            batches[json.dumps([numbers, case["rule"], case["eos"]])].append(case)
        for batch in batches.values():
            for first in range(0, len(batch), ROWS):
                part = batch[first : first + ROWS]
                yield from zip(part, compared(folder, facts["meta"], part, rooms, capacity), strict=True)


def decoder_of(case: dict, rules: dict) -> AsyncLane:
    """Returns the decoder with a case's settings."""
    hp, rule = case["hp"], rules[case["rule"]]
    cache = decode.NoCache() if hp["cache"] == "none" else Compact(
        hp["margin"], hp["refresh_interval"], hp["reuse_refresh_logits"], hp["reuse_prefill"], hp["prefix_state"])
    same = ("block_size", "steps", "rho_min", "t_min", "lookahead", "tau_future", "lane_capacity", "mode",
            "continuation_length", "eos_frontier", "refine_lookahead", "max_iterations")
    return AsyncLane(
        boundary=Boundary(**rule), cache=cache, ends=tuple(case["eos"][1:]),
        commit=decode.TopN(hp["top_n"]) if hp["commit"] == "top_n" else decode.Threshold(hp["threshold"]),
        **{name: hp[name] for name in same})


@functools.lru_cache(maxsize=4)
def _checkpoint(path: Path) -> tuple:
    return dlm_jax.load(path)


def compared(folder: Path, meta: dict, cases: list[dict], rooms: Rooms, capacity: int) -> list[str]:
    """Decodes cases of one setting as a batch; returns what disagrees in each."""
    first = cases[0]
    prompt = max(PROMPT, *(len(case["prompt"]) for case in cases))
    if "checkpoint" in first:
        model, params = _checkpoint((folder / ".." / first["checkpoint"]).resolve())
        rules, mask = meta["rules"][first["checkpoint"]], first["mask"]
    else:
        vocab = meta["vocab"]
        rules, mask = meta["rules"], vocab["mask"]
        model = scripted_model.Scripted(scripted_model.Config(
            vocab["size"], vocab["ordinary"], mask, tuple(vocab["eos"]), int(first["model"]["shift"])))
        params = scripted_model.scripts([case["model"] for case in cases], meta["profiles"], ROWS,
                                        requests.bucket(prompt) + capacity)
    decoder = decoder_of(first, rules).fitted(model.config).replace(rooms=rooms)
    runner = Runner(model, params, decoder)
    request = requests.make(
        [case["prompt"] for case in cases], max_new_tokens=[case["hp"]["max_new_tokens"] for case in cases],
        capacity=capacity, eos_id=first["eos"][0] if first["eos"] else None, mask_id=mask, batch=ROWS,
        prompt_capacity=prompt)
    rows = runner.start(request)
    seen = [_seen(rows)]
    while not rows.done.all():
        rows = runner.step(rows)
        seen.append(_seen(rows))
    out = runner.read(rows, range(len(cases)))
    return ["; ".join(_differences(case, [jax.tree.map(lambda x, row=row: x[row], s) for s in seen], out, row, meta))
            for row, case in enumerate(cases)]


def _seen(rows: Rows) -> dict[str, Any]:
    state = rows.state
    told = jax.numpy.where(state.canvas.committed_at >= 0, state.canvas.tokens, -1)
    return jax.tree.map(np.asarray, {
        "told": told,
        "tokens": state.tokens, "origin": state.origin, "writer": state.writer, "lanes": dict(vars(state.lanes)),
        "refused": state.refused, "positions": state.counts.positions, "forwards": state.counts.forwards,
        "iteration": state.iteration})


def events_of(seen: list[dict], coupled: bool) -> list[dict]:
    """Returns the events of a row, from its state after every step."""
    found = []
    if seen[-1]["forwards"][PREFILL]:
        found.append({"t": 0, "kind": "prefill", "length": int(seen[-1]["positions"][PREFILL])})
    for before, now in zip(seen, seen[1:]):
        if now["iteration"] == before["iteration"]:
            break
        lanes = now["lanes"]
        evaluated = np.flatnonzero(lanes["step"] > before["lanes"]["step"]).tolist()
        fresh = (before["origin"] < 0) & (now["origin"] >= 0)
        by = lambda lane, how: np.flatnonzero(fresh & (now["writer"] == lane) & (now["origin"] == how)).tolist()
        pair = lambda places: [places, now["tokens"][places].tolist()]
        event = {"t": int(now["iteration"]),
                 "lanes": [[i, *pair(by(i, CHOSEN)), *pair(by(i, AHEAD))] for i in evaluated],
                 "then": [step for i in evaluated for step in _then(i, before, now, pair(by(i, FORCED)), coupled)]}
        if now["forwards"][REFRESH] > before["forwards"][REFRESH]:  # of no token, where nothing is written yet
            event["refresh"] = int(now["positions"][REFRESH] - before["positions"][REFRESH])
        found.append(event)
    return found


def _then(i: int, before: dict, now: dict, forced: list, coupled: bool) -> Iterator[list]:
    lanes = now["lanes"]
    end, made = ENDS[lanes["end"][i]], before["lanes"]["state"]
    if ROLES[lanes["role"][i]] == ROLES[REFINE]:
        if end != ENDS[OPEN]:
            yield ["finish", i, end]
            if coupled and made[i + 1] == WAITING:
                yield ["wake", i + 1]
        return
    if now["refused"]:
        yield ["refused", i, int(now["refused"])]
    if end == ENDS[OPEN]:
        return
    begin, stop = lanes["start"][i], lanes["start"][i] + lanes["length"][i]
    full = "complete" if (now["origin"][begin:stop] >= 0).all() else "exhausted"
    children = np.flatnonzero((lanes["parent"] == i) & (lanes["state"] != 0)).tolist()
    place = [int(lanes[name][children[-1]]) for name in ("start", "length")] if children else []
    valid = int(lanes["valid"][i])
    yield {"fork": lambda: ["fork", i, int(lanes["length"][children[0]]), *children, *place],
           "commit": lambda: ["commit", i, valid, *forced, *children, *place],
           "spawn": lambda: ["spawn", i, valid, full, *children, *place],
           "stop": lambda: ["stop", i, valid, full]}[end]()


def counts_of(ledger: Any, row: int, cached: bool) -> dict[str, int]:
    """Returns a row's counts by the names of the format."""
    of = {name: int(x[row]) for name, x in ledger.tallies.items()}
    forwards = {kind: int(x[row]) for kind, x in ledger.forwards.items()}
    calls = int(diagnostics.model_calls(ledger)[row])
    return of | {"prefill": forwards["prefill"], "refresh": forwards["refresh"], "nfe": calls, "calls": calls,
                 "lane_forwards": of["lane_forwards"] if cached else 0, "merged_calls": sum(forwards.values()),
                 "query_positions": sum(int(x[row]) for x in ledger.positions.values())}


def _differences(case: dict, seen: list[dict], out: Any, row: int, meta: dict) -> Iterator[str]:
    want, hp = case["expected"], case["hp"]
    length = hp["max_new_tokens"]
    canvas = np.where(seen[-1]["origin"] >= 0, seen[-1]["tokens"], _mask(case, meta))[:length].tolist()
    ids = out.tokens[row].tolist()
    ended = bool(ids) and ids[-1] in case["eos"]
    got = {"ids": ids[:-1] if ended else ids, "ended_with_eos": ended, "canvas": canvas,
           "events": events_of(seen, hp["mode"] == "coupled"),
           "lanes": [[lane.number, lane.role, lane.start, lane.length, lane.parent, lane.group, lane.step, lane.first,
                      lane.last, lane.end, lane.valid] for lane in diagnostics.history(out.record, row)]}
    for name, value in got.items():
        if value != want[name]:
            yield f"{name}: {_first_difference(value, want[name])}"
    counts = counts_of(out.ledger, row, hp["cache"] == "lane") | {"tokens": len(got["ids"])}
    if any((before["told"] != now["told"])[before["told"] >= 0].any() for before, now in zip(seen, seen[1:])):
        yield "told, and taken back"
    if seen[-1]["told"][seen[-1]["told"] >= 0].tolist() != ids:
        yield "what was told is not the answer"
    wrong = {name: (counts[name], number) for name, number in want["counts"].items() if counts[name] != number}
    if wrong:
        yield f"counts {wrong}"
    found = diagnostics.diagnose({name: x[row : row + 1] for name, x in out.record.items()})
    for name, number in want["diagnostics"].items():
        mine = getattr(found, name)
        mine = list(mine) if name == "splits" else mine
        if np.shape(mine) != np.shape(number) or not np.allclose(mine, number, rtol=0, atol=1e-5):
            yield f"{name} {mine} is not {number}"


def _mask(case: dict, meta: dict) -> int:
    return case["mask"] if "mask" in case else meta["vocab"]["mask"]


def _first_difference(got: Any, want: Any) -> str:
    if isinstance(got, list) and isinstance(want, list):
        for i, (mine, theirs) in enumerate(zip(got, want)):
            if mine != theirs:
                return f"[{i}] {mine} is not {theirs}"
        return f"{len(got)} are not {len(want)}"
    return f"{got} is not {want}"
