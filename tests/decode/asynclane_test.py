"""AsyncLane against a plain reference on random scenarios."""

import numpy as np
import pytest

from tests.decode.asynclane_reference import Reference
from tests.oracle import asynclane as oracle

VOCAB = {"size": 32, "mask": 31, "eos": [30, 29], "ordinary": 29}
_EMPTY = dict(delimiters=[], numeric_delimiters=[], numeric_rule="off", digit_end=[], digit_start=[], open=[], close=[],
              quote=[], no_fork_after=[], interval=0)
_DIGITS = dict(digit_end=[5, 6, 7], digit_start=[6, 7, 8], numeric_delimiters=[1, 3])
RULES = {
    "plain": _EMPTY | dict(delimiters=[1, 2]),
    "math": _EMPTY | _DIGITS | dict(delimiters=[1, 2], numeric_rule="left"),
    "both": _EMPTY | _DIGITS | dict(delimiters=[1, 2, 3], numeric_rule="both"),
    "code": _EMPTY | dict(delimiters=[4, 14], open=[10, 10, 11], close=[12, 13], quote=[14], no_fork_after=[15, 16]),
    "interval": _EMPTY | dict(interval=3),
    "none": _EMPTY,
}
PROFILES = {
    "dense": [1, 2, 4, 17, 18, 19, 20, 1] * 32,
    "text": ([1, 2, 3, 5, 6, 7, 8, *range(17, 29), 1, 5, 2] * 12)[:256],
    "code": ([4, 10, 11, 12, 13, 14, 15, 16, 4, 17, 18, 19, 4, 12] * 19)[:256],
    "ending": ([1, 2, 4, *range(17, 28), 30, *range(17, 28), *range(17, 28), 29] * 8)[:256],
}
DEFAULTS = dict(
    max_new_tokens=32, block_size=8, steps=0, commit="threshold", threshold=0.75, top_n=1, rho_min=0.25, t_min=1,
    lookahead=8, tau_future=0.75, margin=8, refresh_interval=0, reuse_refresh_logits=True, lane_capacity=4,
    cache="lane", mode="asynclane", max_iterations=0, prefix_state="fork", continuation_length="block",
    eos_frontier="stop", refine_lookahead=True, reuse_prefill=False)
META = {"vocab": VOCAB, "profiles": PROFILES, "rules": RULES}
FACTS = dict(asynclane={}, coupled=dict(mode="coupled"), commit_and_advance=dict(mode="commit_and_advance"),
             blockwise=dict(mode="blockwise"), shared=dict(cache="none"), shifted={},
             top_n=dict(commit="top_n", top_n=2),
             options=dict(prefix_state="live", continuation_length="remainder", eos_frontier="spawn",
                          refine_lookahead=False, reuse_prefill=True))
SETTINGS = dict(asynclane=28, coupled=3, commit_and_advance=4, blockwise=1, shared=3, shifted=4, options=4,
                top_n=2)


def settings(rng, kind: dict) -> dict:
    """Numbers of a decoder, drawn anew: small lanes, little room, budgets that run out."""
    pick = lambda *values: values[rng.integers(len(values))]
    return DEFAULTS | dict(
        block_size=int(rng.integers(4, 13)), steps=pick(0, 0, 0, 0, 3), threshold=pick(0.5, 0.75, 0.875, 0.984375, 2.0),
        rho_min=pick(0.0, 0.0, 0.125, 0.3, 0.75), t_min=pick(1, 1, 1, 2), lookahead=int(rng.integers(0, 13)),
        tau_future=pick(0.25, 0.5, 0.75, 0.875, 2.0), margin=pick(0, 3, 8, 40), refresh_interval=pick(0, 1, 2, 3, 5),
        reuse_refresh_logits=bool(rng.integers(2)), lane_capacity=pick(1, 2, 3, 4, 4, 4),
        max_iterations=pick(0, 0, 0, 0, 0, 6)) | kind


def scenario(rng, name: str, hp: dict, rule: str, eos: list[int], shift: bool) -> dict:
    """One row: its prompt, its script with delimiters and ends where they hurt, and what the reference makes of it."""
    prompt = rng.integers(1, 28, rng.integers(1, 8)).tolist() if not name.endswith("_7") else []
    length = int(rng.integers(12, 33)) if rng.integers(8) else int(rng.integers(1, 12))
    places = rng.choice(length, min(length, int(rng.integers(0, 9))), replace=False)
    token = [[int(len(prompt) + p), int(rng.choice([1, 2, 4, 1, 2, 4, 14, 10, 30, 30]))] for p in sorted(places)]
    # delimiters are seen early, ends of the answer late, when the tokens behind them may have been handed over
    level = [[p, int(rng.integers(4, 9) if token == 30 else rng.integers(48, 64))] for p, token in token]
    profile = str(rng.choice(list(PROFILES), p=[0.4, 0.2, 0.2, 0.2]))
    model = {"seed": int(rng.integers(1 << 32)), "profile": profile, "token": token, "level": level, "context": True,
             "shift": shift}
    case = {"id": name, "family": "random", "prompt": prompt, "eos": eos, "rule": rule,
            "hp": hp | {"max_new_tokens": length}, "model": model}
    return case | {"expected": Reference(case, RULES, VOCAB, PROFILES).expected}


def scenarios(kind: str) -> list[dict]:
    rng, found = np.random.default_rng(sorted(FACTS).index(kind)), []
    for number in range(SETTINGS[kind]):
        hp, rule = settings(rng, FACTS[kind]), str(rng.choice(list(RULES), p=[0.4, 0.15, 0.1, 0.15, 0.15, 0.05]))
        eos = [[30], [30, 29]][int(rng.integers(4) == 0)]
        found += [scenario(rng, f"{kind}_{number}_{row}", hp, rule, eos, kind in ("shifted", "shared"))
                  for row in range(oracle.ROWS)]
    return found


@pytest.mark.parametrize("kind", sorted(FACTS))
def test_random_scenarios_agree_event_for_event(kind):
    cases = scenarios(kind)
    wrong = [f"{case['id']}: {problem}" for case, problem in oracle.outcomes(None, {"meta": META, "cases": cases})
             if problem]
    assert not wrong, wrong[:3]


def test_scenarios_are_many_and_meet_what_is_rare():
    assert sum(SETTINGS.values()) * oracle.ROWS >= 300
    cases = [case["expected"] for kind in ("asynclane", "coupled", "options") for case in scenarios(kind)]
    of = lambda name: sum(case["counts"][name] for case in cases)
    for name in ("fork_pairs", "forks_refused", "eos_suppressed", "reuse", "drafts"):
        assert of(name) > 10, name
    assert of("groups") > of("iterations") + 30 and max(case["counts"]["max_active"] for case in cases) == 4
    ends = [lane[9] for case in cases for lane in case["lanes"]]
    assert {"fork", "spawn", "stop", "complete", "exhausted", "open"} == set(ends)
    assert {split for case in cases for split in case["diagnostics"]["splits"]} >= set(range(1, 9))
    assert all(case["counts"]["nfe"] == case["counts"]["calls"] for case in cases)  # Eq. 13, and calls one by one
    assert any(case["diagnostics"]["average_lead"] > 1 for case in cases)
    assert any(event.get("refresh") == 0 for case in cases for event in case["events"]), "no refresh of nothing"
    assert any(case["ended_with_eos"] for case in cases) and any(not case["ids"] for case in cases)
