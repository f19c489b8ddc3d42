"""AsyncLane whose drafts a causal guide judges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.decode import MaskedDiffusion, Runner, generate
from dlm_jax.decode.asynclane import guide
from dlm_jax.decode.asynclane.state import FORCED
from dlm_jax.decode.executables import Executables
from dlm_jax.models import build
from tests.decode.asynclane_models_test import LANES, same
from tests.decode.masked_test import EOS, MODELS, peaked, prompts


@pytest.fixture(scope="module")
def dream():
    return peaked(**MODELS["dream"])


def judge():
    model = peaked(family="qwen3")[0]
    return model, build.init_params(model, jax.random.key(9))


def test_a_guide_commits_what_it_would_have_said(dream):
    reader = judge()
    joined = decode.join(*dream, *reader)
    rows, limit = prompts(1, 3), 21
    rule, most = decode.asynclane.GuideAgrees(decode.guided.TopK(20)), 20
    decoder = LANES.replace(commit=rule, mode="blockwise", lookahead=0)
    out = generate(*joined, rows, decoder, max_new_tokens=limit, eos_id=-1)
    score, agreed = reader[0].scorer(reader[1]), 0
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


@pytest.mark.parametrize("cache", [LANES.cache, decode.Free(refresh_every=4)], ids=["compact", "free"])
def test_lanes_fork_under_a_guide(dream, cache):
    joined = decode.join(*dream, *judge())
    decoder = LANES.replace(commit=decode.asynclane.GuideAgrees(decode.guided.TopK(4)), cache=cache)
    rows = prompts(1, 3)
    out = generate(*joined, rows, decoder, max_new_tokens=21)
    assert out.ledger.tallies["fork_pairs"].sum() > 0
    assert all(len(tokens) == 21 or tokens[-1] == EOS for tokens in out.tokens)
    alone = generate(*joined, rows[1:2], decoder, max_new_tokens=21)
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[1])


@pytest.mark.parametrize("mode", ["asynclane", "commit_and_advance"])
def test_a_guide_that_reads_everything_anew_says_the_same(dream, mode, monkeypatch):
    joined = decode.join(*dream, *judge())
    decoder = LANES.replace(commit=decode.asynclane.GuideAgrees(decode.guided.TopK(12)), mode=mode, rho_min=0.0,
                            sampler=decode.Sampler(temperature=1.0))
    found, caches = [], []
    for unread in (guide._unread, lambda state, seats, tokens: jnp.zeros_like(state.count)):
        monkeypatch.setattr(guide, "_unread", unread)
        runner = Runner(*joined, decoder, Executables())
        rows = runner.run(runner.start(runner.request(prompts(1, 8), max_new_tokens=29)))
        found.append(runner.read(rows, range(8)))
        caches.append([np.asarray(x) for x in jax.tree.leaves(rows.state.guide_cache)])
    same(*found)
    for mine, theirs in zip(*caches):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)  # 8 where a committed prefix is not read again
    assert (mode == "asynclane") == (not (rows.state.origin == FORCED).any())
    assert found[0].ledger.positions["guide"].sum() < 0.8 * found[1].ledger.positions["guide"].sum()
    assert found[0].ledger.tallies["splits" if mode == "commit_and_advance" else "fork_pairs"].sum() > 8


def test_a_guide_must_be_there_and_be_asked_what_lanes_keep(dream):
    with pytest.raises(ValueError, match="needs a guide beside the drafter"):
        Runner(*dream, LANES.replace(commit=decode.asynclane.GuideAgrees()))
    with pytest.raises(ValueError, match="asks for all of the drafter's logits"):
        decode.asynclane.GuideAgrees(decode.guided.Sure())
    for nobody_asks in (lambda rule: LANES.replace(commit=decode.FirstToken(rule)),
                        lambda rule: MaskedDiffusion(commit=rule)):
        with pytest.raises(ValueError, match="whose guide AsyncLane alone asks"):
            nobody_asks(decode.asynclane.GuideAgrees())
