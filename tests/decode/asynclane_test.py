"""AsyncLane against a plain reference on random scenarios, and what it promises on models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dlm_jax import decode
from dlm_jax.decode import AsyncLane, MaskedDiffusion, NoCache, Runner, Threshold, TopN, generate, stream
from dlm_jax.decode.asynclane import Boundary, Compact, diagnose, history, model_calls
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.decode.masked.commit import CommitRule
from dlm_jax.decode.runner import python_loop
from dlm_jax.models import build
from tests.decode.asynclane_reference import Reference
from tests.decode.masked_test import EOS, MASK, MODELS, peaked, prompts
from tests.oracle import asynclane as oracle
from tests.oracle import scripted_model

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
    assert any(case["diagnostics"]["average_lead"] > 1 for case in cases)
    assert any(event.get("refresh") == 0 for case in cases for event in case["events"]), "no refresh of nothing"
    assert any(case["ended_with_eos"] for case in cases) and any(not case["ids"] for case in cases)


# --- on models


BOUNDARY = Boundary(delimiters=tuple(range(2, 14)))
LANES = AsyncLane(boundary=BOUNDARY, block_size=8, lookahead=8, commit=Threshold(0.3), tau_future=0.5, rho_min=0.25,
                  cache=Compact(margin=8, refresh_interval=3), lane_capacity=4)
LIMITS = [20, 19, 13]


@pytest.fixture(scope="module", params=list(MODELS))
def network(request):
    return peaked(**MODELS[request.param])


@pytest.fixture(scope="module")
def dream():
    return peaked(**MODELS["dream"])


def same(one, other):
    for mine, theirs in zip(one.tokens, other.tokens, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(one.committed_at, other.committed_at)


# a plan's steps are those of a lane; the block-wise sampler has three of them on its 24 entries
@pytest.mark.parametrize("changes", [dict(commit=Threshold(0.3)), dict(commit=TopN(3), temperature=0.8),
                                     dict(commit=decode.Quota(steps=4))], ids=["threshold", "sampled", "planned"])
def test_without_forks_it_is_the_blockwise_sampler(network, changes):
    options = dict(max_new_tokens=LIMITS, eos_id=-1, seed=3)
    whole = {"commit": decode.Quota(steps=12)} if isinstance(changes["commit"], decode.Quota) else {}
    options |= {"max_new_tokens": 24} if whole else {}
    lane = generate(*network, prompts(0, 3), decode.asynclane.blockwise(block_size=8, **changes), **options)
    block = generate(*network, prompts(0, 3), MaskedDiffusion(
        schedule=decode.Blocks(8), stop=decode.Never(), **changes | whole), **options)
    same(lane, block)
    np.testing.assert_array_equal(lane.ledger.after_prefill(), block.ledger.after_prefill())


@struct.dataclass
class Waits(CommitRule):
    """Chooses nothing, ever."""

    def choose(self, drafts, clock):
        return jnp.zeros_like(drafts.eligible)


def test_a_rule_that_waits_loses_no_text(dream):
    out = generate(*dream, prompts(0, 2), LANES.replace(commit=Waits(), mode="blockwise", tau_future=2.0, steps=5),
                   max_new_tokens=24, eos_id=-1)
    assert [len(tokens) for tokens in out.tokens] == [24, 24]
    assert (out.ledger.tallies["iterations"] == 15).all()


def test_no_boundary_no_room_and_no_mode_are_one(dream):
    options = dict(max_new_tokens=LIMITS)
    runs = [generate(*dream, prompts(0, 3), decoder, **options) for decoder in (
        LANES.replace(mode="blockwise"), LANES.replace(boundary=Boundary()), LANES.replace(lane_capacity=1))]
    for other in runs[1:]:
        same(runs[0], other)
        for name in ("start", "length", "step", "end", "valid", "first", "last"):
            np.testing.assert_array_equal(runs[0].record[name], other.record[name])
    assert runs[2].ledger.tallies["forks_refused"].sum() > 0  # counted, and no text lost


def test_a_refresh_in_every_iteration_is_no_cache(network):
    shared = generate(*network, prompts(0, 3), LANES.replace(cache=NoCache()), max_new_tokens=LIMITS)
    fresh = generate(*network, prompts(0, 3), LANES.replace(cache=Compact(
        margin=64, refresh_interval=1, reuse_prefill=True)), max_new_tokens=LIMITS)
    for mine, theirs in zip(shared.tokens, fresh.tokens, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert fresh.ledger.forwards["denoise"].sum() == 0
    np.testing.assert_array_equal(model_calls(fresh.ledger), model_calls(shared.ledger))


def test_thresholds_at_both_ends(dream):
    all_at_once = LANES.replace(commit=Threshold(0.0), mode="blockwise", tau_future=2.0)
    out = generate(*dream, prompts(0, 3), all_at_once, max_new_tokens=LIMITS, eos_id=-1)
    np.testing.assert_array_equal(out.ledger.tallies["iterations"], -(-np.array(LIMITS) // 8))
    one = LANES.replace(commit=Threshold(2.0), mode="blockwise", tau_future=2.0)
    out = generate(*dream, prompts(0, 3), one, max_new_tokens=LIMITS, eos_id=-1)
    np.testing.assert_array_equal(out.ledger.tallies["iterations"], LIMITS)


def test_text_is_whole_and_counted(network):
    out = generate(*network, prompts(1, 6), LANES, max_new_tokens=29)
    for row, tokens in enumerate(out.tokens):
        assert MASK not in tokens.tolist() and (out.committed_at[row, : len(tokens)] >= 0).all()
        assert MASK not in out.canvas[row, out.committed_at[row] >= 0].tolist()
        assert len(tokens) == 29 or tokens[-1] == EOS
    assert diagnose(out.record).fork_pairs == out.ledger.tallies["fork_pairs"].sum() > 0
    merged = sum(out.ledger.forwards.values())
    assert (model_calls(out.ledger) >= merged).all() and out.ledger.tallies["reuse"].sum() > 0
    assert (out.ledger.forwards["refresh"] == (out.ledger.tallies["iterations"] - 1) // 3).all()


def test_rows_do_not_depend_on_their_neighbours(network):
    rows = prompts(2, 5)
    together = generate(*network, rows, LANES, max_new_tokens=[29, 8, 17, 24, 3])
    for i, limit in ((0, 29), (3, 24)):
        alone = generate(*network, [rows[i]], LANES, max_new_tokens=limit)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        assert history(alone.record, 0) == history(together.record, i)


def test_sampled_rows_do_not_depend_on_their_neighbours(dream):
    rows, decoder = prompts(2, 5), LANES.replace(sampler=decode.Sampler(temperature=0.9))
    together = generate(*dream, rows, decoder, max_new_tokens=29, seed=4)
    runner = Runner(*dream, decoder)
    request = runner.request([rows[3]], max_new_tokens=29, seed=4, first_row=3)
    alone = runner.read(runner.run(runner.start(request)), [0])
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[3])
    assert together.ledger.tallies["fork_pairs"].sum() > 0


def test_one_program_for_all_numbers_of_a_bucket(dream):
    generate(*dream, prompts(2, 2), LANES, max_new_tokens=29)
    before = EXECUTABLES.compiled
    for changes in (dict(block_size=5, lookahead=3), dict(commit=Threshold(0.7), rho_min=0.9, t_min=2),
                    dict(cache=Compact(margin=3, refresh_interval=2, reuse_refresh_logits=False)),
                    dict(boundary=Boundary(interval=3), lane_capacity=3, steps=4, ends=(5,))):
        generate(*dream, prompts(3, 2), LANES.replace(**changes), max_new_tokens=[20, 27])
    assert EXECUTABLES.compiled == before


def test_loops_agree():
    cases = scenarios("asynclane")[:4]
    config = scripted_model.Config(32, 29, 31, (30, 29), 0, eos_token_id=30)
    model = scripted_model.Scripted(config)
    params = jax.tree.map(jnp.asarray, scripted_model.scripts([case["model"] for case in cases], PROFILES, 4, 64))
    decoder = LANES.replace(boundary=Boundary(delimiters=(1, 2)), block_size=6, lookahead=4)
    runner = Runner(model, params, decoder)
    request = runner.request([case["prompt"] for case in cases], max_new_tokens=16)
    whole = runner.run(runner.start(request))
    plain = python_loop(model.scorer(params), runner.decoder, request)
    jax.tree.map(np.testing.assert_array_equal, whole.state, plain)


def test_rows_come_and_go(dream):
    runner = Runner(*dream, LANES)
    rows = runner.start(runner.request(prompts(2, 2), max_new_tokens=[29, 3]))
    while not rows.done[1]:
        rows = runner.step(rows)
    newcomer = prompts(4, 1)[0]
    rows = runner.run(runner.admit(rows, 1, newcomer, max_new_tokens=21))
    out = runner.read(rows, [0, 1])
    alone = lambda prompt, length: generate(*dream, [prompt], LANES, max_new_tokens=length).tokens[0]
    np.testing.assert_array_equal(out.tokens[0], alone(prompts(2, 2)[0], 29))
    np.testing.assert_array_equal(out.tokens[1], alone(newcomer, 21))


def test_a_stream_tells_the_lanes(dream):
    rows = prompts(1, 2)
    out = generate(*dream, rows, LANES, max_new_tokens=29)
    events = list(stream(*dream, rows, LANES, max_new_tokens=29))
    for row in range(2):
        found = history(out.record, row)
        told = {}
        for event in (e for e in events if e.row == row and e.committed):
            assert len(event.lanes) == len(event.tokens)
            told |= dict(zip(event.numbers, zip(event.tokens, event.lanes)))
        seen = np.flatnonzero(out.committed_at[row] >= 0)
        assert {i: told[i][0] for i in seen.tolist()} == dict(zip(seen.tolist(), out.canvas[row, seen].tolist()))
        assert len(told) == len(seen) >= len(out.tokens[row])
        for number, (_, lane) in told.items():  # a lane writes its own tokens, and drafts ahead of them
            assert found[lane].start <= number < found[lane].start + found[lane].length + 8
    assert len({lane for event in events for lane in event.lanes}) > 3
    assert any(not event.committed and event.kind == "denoise" for event in events)


@pytest.mark.parametrize("cache", [decode.Prompt(), decode.Dual(), decode.Free(refresh_every=4)])
def test_other_cache_policies_serve_lanes(dream, cache):
    out = generate(*dream, prompts(1, 3), LANES.replace(cache=cache), max_new_tokens=21)
    assert all(len(tokens) == 21 or tokens[-1] == EOS for tokens in out.tokens)
    assert out.ledger.tallies["fork_pairs"].sum() > 0
    whole = generate(*dream, prompts(1, 3), LANES.replace(cache=NoCache()), max_new_tokens=21)
    assert sum(out.ledger.positions.values()).sum() < sum(whole.ledger.positions.values()).sum()
    np.testing.assert_array_equal(model_calls(out.ledger), out.ledger.after_prefill() + out.ledger.forwards["prefill"])


@pytest.mark.parametrize("make, message", [
    (lambda: AsyncLane(mode="fast"), "mode = 'fast'"),
    (lambda: AsyncLane(block_size=0), "block_size = 0"),
    (lambda: AsyncLane(rho_min=1.5), "rho_min = 1.5"),
    (lambda: AsyncLane(boundary="prose"), "boundary = 'prose'"),
    (lambda: AsyncLane(cache="lane"), "cache = 'lane'"),
    (lambda: AsyncLane(cache=decode.BlockCausal()), "hides later tokens"),
    (lambda: AsyncLane(commit=decode.Factor(), confidence=decode.Entropy()), "Factor bounds probabilities"),
    (lambda: Compact(prefix_state="frozen"), "prefix_state = 'frozen'"),
    (lambda: Boundary(numeric_rule="right"), "numeric_rule = 'right'"),
    (lambda: Boundary(delimiters="."), "delimiters = '.'"),
    (lambda: Boundary(delimiters=(-1,)), "delimiters holds -1"),
    (lambda: Boundary(interval=-1), "interval = -1"),
])
def test_bad_fields_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_models_and_requests_are_refused(dream, tiny):
    model, params = dream
    with pytest.raises(ValueError, match="boundary.delimiters holds token id 64"):
        Runner(model, params, LANES.replace(boundary=Boundary(delimiters=(64,))))
    with pytest.raises(ValueError, match="is the name of a rule"):
        Runner(model, params, LANES.replace(boundary="math"))
    with pytest.raises(ValueError, match="needs a bidirectional model"):
        Runner(*tiny, LANES)
    untrained = dataclasses.replace(model, config=dataclasses.replace(model.config, mask_token_id=None))
    with pytest.raises(ValueError, match="drafts from a mask token"):
        generate(untrained, params, prompts(0, 1), LANES, max_new_tokens=8)
    with pytest.raises(ValueError, match="holds the mask token"):
        generate(model, params, [[2, MASK]], LANES, max_new_tokens=8)
    with pytest.raises(ValueError, match="the mask must be a token of its own"):
        Runner(model, params, LANES.replace(ends=(MASK,)))
    with pytest.raises(ValueError, match="plans 48 forwards for a lane, which may take 8: give steps=48"):
        Runner(model, params, LANES.replace(commit=decode.FirstToken(decode.Quota(steps=48))))


# --- with a guide


def judge():
    model = peaked(family="qwen3")[0]
    return model, build.init_params(model, jax.random.key(9))


def test_a_guide_commits_what_it_would_have_said(dream):
    guide = judge()
    joined = decode.join(*dream, *guide)
    rows, limit = prompts(1, 3), 21
    rule, most = decode.asynclane.GuideAgrees(decode.guided.TopK(20)), 20
    decoder = LANES.replace(commit=rule, mode="blockwise", lookahead=0)
    out = generate(*joined, rows, decoder, max_new_tokens=limit, eos_id=-1)
    score, agreed = guide[0].scorer(guide[1]), 0
    for row, tokens in enumerate(out.tokens):
        text = np.array([*rows[row], *tokens])
        said = np.argsort(-np.asarray(score(text[None]))[0], axis=-1)[len(rows[row]) - 1 : -1, :most]
        at = out.committed_at[row, :limit]
        assert (np.diff(at) >= 0).all()  # a lane that follows its guide writes from left to right
        follows = np.flatnonzero(np.diff(at) == 0) + 1
        for together in (follows - 1, follows):
            assert (tokens[together, None] == said[together]).any(axis=-1).all()
        agreed += len(follows)
    assert agreed > 3 and (out.ledger.forwards["guide"] == out.ledger.tallies["iterations"] + 1).all()


def test_lanes_fork_under_a_guide(dream):
    joined = decode.join(*dream, *judge())
    decoder = LANES.replace(commit=decode.asynclane.GuideAgrees(decode.guided.TopK(4)))
    rows = prompts(1, 3)
    out = generate(*joined, rows, decoder, max_new_tokens=21)
    assert out.ledger.tallies["fork_pairs"].sum() > 0
    assert all(len(tokens) == 21 or tokens[-1] == EOS for tokens in out.tokens)
    alone = generate(*joined, rows[1:2], decoder, max_new_tokens=21)
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[1])


def test_a_guide_must_be_there_and_be_asked_what_lanes_keep(dream):
    with pytest.raises(ValueError, match="needs a guide beside the drafter"):
        Runner(*dream, LANES.replace(commit=decode.asynclane.GuideAgrees()))
    with pytest.raises(ValueError, match="asks for all of the drafter's logits"):
        decode.asynclane.GuideAgrees(decode.guided.Sure())
    for nobody_asks in (lambda rule: LANES.replace(commit=decode.FirstToken(rule)),
                        lambda rule: MaskedDiffusion(commit=rule)):
        with pytest.raises(ValueError, match="whose guide AsyncLane alone asks"):
            nobody_asks(decode.asynclane.GuideAgrees())
