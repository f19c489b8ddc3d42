"""What AsyncLane promises on models: it reduces to other samplers, loses no text, and streams, admits and counts."""

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
from tests.decode.asynclane_test import PROFILES, scenarios
from tests.decode.masked_test import EOS, MASK, MODELS, peaked, prompts
from tests.oracle import scripted_model

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
    forking = generate(*dream, prompts(0, 3), LANES.replace(commit=Threshold(0.0)), max_new_tokens=LIMITS)
    assert forking.ledger.tallies["fork_pairs"].sum() > 0 and forking.record["step"].max() == 1


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


@pytest.mark.parametrize("changes", [
    dict(steps=2), dict(steps=1, lane_capacity=2), dict(steps=3, max_iterations=7), dict(eos_frontier="spawn"), {}],
    ids=["exhausted", "little room", "cut off", "spawning", "plain"])
def test_a_stream_takes_nothing_back(dream, changes):
    rows, decoder = prompts(5, 4), LANES.replace(commit=Threshold(0.6), **changes)
    out = generate(*dream, rows, decoder, max_new_tokens=29)
    told = [{} for _ in rows]
    for event in stream(*dream, rows, decoder, max_new_tokens=29):
        if event.committed:
            assert not told[event.row].keys() & set(event.numbers)
            told[event.row] |= dict(zip(event.numbers, event.tokens))
    for row, tokens in enumerate(out.tokens):
        assert [told[row][i] for i in sorted(told[row])] == tokens.tolist()
        assert sorted(told[row]) == np.flatnonzero(out.committed_at[row] >= 0).tolist()
    if changes == dict(steps=2):  # masks stayed, and what stood behind them in their lane was never told
        assert any((np.diff(sorted(final)) > 1).any() for final in told)


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
    (lambda: AsyncLane(commit=TopN(1), confidence=decode.Random()), "tau_future = 0.9 says nothing to Random"),
    (lambda: Compact(prefix_state="frozen"), "prefix_state = 'frozen'"),
    (lambda: Boundary(numeric_rule="right"), "numeric_rule = 'right'"),
    (lambda: Boundary(delimiters="."), "delimiters = '.'"),
    (lambda: Boundary(delimiters=(-1,)), "delimiters holds -1"),
    (lambda: Boundary(interval=-1), "interval = -1"),
])
def test_bad_fields_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_fitted_decoder_stays_with_its_model_and_its_rooms(dream):
    made = LANES.replace(classes=None).fitted(dream[0].config)
    assert made.fitted(dream[0].config) == made
    larger = dataclasses.replace(dream[0].config, vocab_size=80)
    with pytest.raises(ValueError, match="is fitted already, to its own and to 64 ids, where the model has 80"):
        made.fitted(larger)
    for changes in (dict(boundary=Boundary((3,))), dict(ends=(5,))):
        with pytest.raises(ValueError, match="pass the decoder that it was made from"):
            made.replace(**changes).fitted(dream[0].config)
    for changes in (dict(block_size=9), dict(lookahead=9), dict(lane_capacity=5)):
        with pytest.raises(ValueError, match="are too small for block_size"):
            made.replace(**changes).fitted(dream[0].config)
    plain = LANES.replace(boundary=Boundary()).fitted(dream[0].config)
    assert plain.replace(lane_capacity=64).fitted(dream[0].config).rooms.lanes == 1  # it never forks


def test_tokens_ahead_are_judged_in_the_units_of_the_confidence(dream):
    assert AsyncLane(commit=TopN(1), confidence=decode.Random(), lookahead=0).lookahead == 0
    drafts = lambda confidence, level: generate(
        *dream, prompts(0, 3), LANES.replace(commit=TopN(2), confidence=confidence, tau_future=level),
        max_new_tokens=LIMITS, eos_id=-1).ledger.tallies["drafts"].sum()
    for confidence, none, every in ((decode.Entropy(), 0.0, 100.0), (decode.Margin(), 1.5, 0.0)):
        assert drafts(confidence, none) == 0 < drafts(confidence, every), confidence


def test_tables_lie_on_the_device(dream, monkeypatch):
    sent, real = [], EXECUTABLES.get

    def get(function, model, arguments):
        sent.append(sum(x.nbytes for x in jax.tree.leaves(arguments) if not isinstance(x, jax.Array)))
        return real(function, model, arguments)

    monkeypatch.setattr(EXECUTABLES, "get", get)
    list(stream(*dream, prompts(2, 2), LANES, max_new_tokens=29))
    assert len(sent) > 10 and max(sent) < 4 * 64  # the numbers of the decoder, and no table of 64 ids


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
