"""check_lossless: silent where answers agree, and able to tell a rounding from an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import ARTrust, Autoregressive, Orthrus, check_lossless, generate, lossless, orthrus
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.models import build
from tests.conftest import random_params
from tests.decode import dual_models
from tests.models import hybrids


def half(network):
    model, params = network
    return model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


DECODERS = pytest.mark.parametrize("decoder", [Orthrus(block_size=4), ARTrust(horizon=4)], ids=["orthrus", "ar_trust"])


@DECODERS
def test_exact_answers_are_reported_as_such(decoder):
    model, params = dual_models.untrained()
    report = check_lossless(model, params, dual_models.prompts(1, 9), decoder, max_new_tokens=12, batch_size=4)
    assert report.identical and report.lossless and report.first is None and report.rows == 9
    assert report.tokens > 9 and str(report).startswith("lossless: 9 prompts")


@pytest.mark.parametrize("seed, decoder", [
    (0, Orthrus(block_size=8)), (0, ARTrust(horizon=8)),
    pytest.param(1, Orthrus(block_size=8), marks=pytest.mark.slow)])
def test_half_precision_differs_in_near_ties_only(seed, decoder):
    model, params = half(dual_models.untrained(seed))
    report = check_lossless(model, params, dual_models.prompts(2, 256), decoder, max_new_tokens=20)
    assert report.lossless, str(report)
    assert report.differences, "nothing rounded otherwise: this test shows nothing"
    assert "near tie" in str(report)


def hybrid():
    model = build.build(hybrids.hybrid_config(vocab_size=32, num_layers=2, pattern=("gated_delta", "attention"),
                                              mask_token_id=31))
    return model, random_params(model, scale=0.35)


NETWORKS = {"f32": dual_models.untrained, "bf16": lambda: half(dual_models.untrained()), "hybrid": hybrid}


@pytest.mark.parametrize("network, decoder", [
    ("f32", Orthrus(block_size=4)), ("bf16", Orthrus(block_size=4)), ("bf16", ARTrust(horizon=4)),
    ("hybrid", ARTrust(horizon=4))])
def test_a_wrong_token_is_a_divergence(network, decoder):
    model, params = NETWORKS[network]()
    prompt = [3, 4, 5]
    out = generate(model, params, [prompt], decoder, max_new_tokens=12, eos_id=-1)
    for index in (1, 6, 11):
        wrong = out.tokens[0].copy()
        wrong[index] = (wrong[index] + 7) % 30
        right, at = out.tokens[0], out.committed_at[0]
        ahead = lossless.Parted(0, index, prompt, wrong, right, at)
        behind = lossless.Parted(1, index, prompt, right, wrong, at)  # plain decoding may be what is wrong
        early = lossless.Parted(2, index, prompt, right[:index], right, np.where(np.arange(12) < index, at, -1))
        found, swapped, ended = lossless.explain(model, params, [ahead, behind, early], decoder, 31)
        assert found.gap > 0 > swapped.gap and ended.gap == np.inf and (found.row, swapped.row, ended.row) == (0, 1, 2)
        for difference in (found, swapped, ended):
            assert not difference.near_tie and "DIVERGENCE" in str(difference)
            assert all(p.sum() == pytest.approx(1, abs=1e-5) for p in difference.probabilities)
            # both forwards are those that decided: they choose what was right
            assert int(difference.logits.argmax()) == int(difference.block_logits.argmax()) == right[index]


def test_a_broken_verification_is_no_near_tie(monkeypatch):
    """Verification that sees the whole block: its logits are far off, however close the tokens."""
    right = orthrus.forward
    wrong = lambda view, causal, *rest: right(view, False, *rest)
    model, params = dual_models.untrained(1)
    model = dataclasses.replace(model, remat=True)  # a module of its own: what is traced here is met by no other test
    EXECUTABLES.clear()
    monkeypatch.setattr(orthrus, "forward", wrong)
    report = check_lossless(model, params, dual_models.prompts(3, 12), Orthrus(block_size=8), max_new_tokens=16)
    EXECUTABLES.clear()
    assert not report.lossless and not report.first.near_tie and str(report).startswith("NOT lossless")
    assert report.first.block_error > 100 * report.first.error


@pytest.mark.parametrize("gap, error, block_error, tie", [
    (1.0, 0.25, 0.25, True), (1.01, 0.25, 0.25, False), (-1.0, 0.25, 0.25, True), (-1.01, 0.25, 0.25, False),
    (0.0, 0.125, 0.5, True), (0.0, 0.125, 0.51, False), (0.0, 1.0, 0.0, True), (np.inf, 1.0, 1.0, False)])
def test_a_tie_is_a_gap_that_twice_the_errors_close(gap, error, block_error, tie):
    """Two tokens' logits may each be off by either forward's error; a verification may be 4 times as far off."""
    nothing = np.zeros(2, np.float32)
    assert lossless.Difference(0, 0, 1, 2, nothing, nothing, gap, error, block_error).near_tie == tie


def test_an_answer_that_ends_early_is_a_difference():
    assert lossless.first_difference(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert lossless.first_difference(np.array([1, 2, 3]), np.array([1, 5, 3])) == 1
    assert lossless.first_difference(np.array([1, 2]), np.array([1, 2])) is None


@pytest.mark.parametrize("decoder", [Orthrus(temperature=0.5), Autoregressive(), ARTrust(temperature=0.5)])
def test_other_decoders_are_refused(decoder):
    model, params = dual_models.untrained()
    with pytest.raises(ValueError, match=r"expected Orthrus\(temperature=0\) or ARTrust"):
        check_lossless(model, params, [[2]], decoder, max_new_tokens=4)
