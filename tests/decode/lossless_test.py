"""check_lossless: silent where answers agree, and able to tell a rounding from an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import Autoregressive, Orthrus, api, check_lossless, generate, lossless, orthrus
from tests.decode import dual_models


def half(network):
    model, params = network
    return model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def twins(network):
    """Every second id gets almost the head row of the one before it, so that the two are hard to tell apart."""
    model, params = network
    table = params["lm_head"].astype(jnp.float32)
    noise = 1 + 2e-3 * jax.random.normal(jax.random.key(0), table[::2].shape)
    return model, {**params, "lm_head": table.at[1::2].set(table[::2] * noise).astype(params["lm_head"].dtype)}


def test_exact_answers_are_reported_as_such():
    model, params = dual_models.untrained()
    report = check_lossless(model, params, dual_models.prompts(1, 9), Orthrus(block_size=4), max_new_tokens=12,
                            batch_size=4)
    assert report.identical and report.lossless and report.first is None and report.rows == 9
    assert report.tokens > 9 and str(report).startswith("lossless: 9 prompts")


def test_half_precision_differs_in_near_ties_only():
    model, params = twins(half(dual_models.untrained()))
    report = check_lossless(model, params, dual_models.prompts(2, 64), Orthrus(block_size=8), max_new_tokens=20)
    assert report.lossless, str(report)
    assert report.differences, "the twins were told apart: this test shows nothing"
    for difference in report.differences:
        assert abs(difference.expected - difference.found) == 1, "other than twins"
        assert 0 <= difference.gap <= 2 * difference.error
    assert "near tie" in str(report)


@pytest.mark.parametrize("network", [dual_models.untrained, lambda: half(dual_models.untrained())], ids=["f32", "bf16"])
def test_a_wrong_token_is_a_divergence(network):
    model, params = network()
    prompt = [3, 4, 5]
    out = generate(model, params, [prompt], Orthrus(block_size=4), max_new_tokens=12, eos_id=-1)
    for index in (1, 6, 11):
        wrong = out.tokens[0].copy()
        wrong[index] = (wrong[index] + 7) % 30
        found = lossless.explain(model, params, prompt, wrong, out.tokens[0], index, out.committed_at[0], 4)
        assert not found.near_tie and found.gap > 0 and "DIVERGENCE" in str(found)
        assert int(found.logits.argmax()) == found.expected == out.tokens[0][index]
        # the replayed verification is the one that took place: it chooses what was chosen
        assert int(found.block_logits.argmax()) == out.tokens[0][index]
        assert all(p.sum() == pytest.approx(1, abs=1e-5) for p in found.probabilities)


def test_a_broken_verification_is_no_near_tie(monkeypatch):
    """Verification that sees the whole block: its logits are far off, however close the tokens."""
    right = orthrus.forward
    wrong = lambda view, causal, *rest: right(view, False, *rest)
    model, params = dual_models.untrained(1)
    model = dataclasses.replace(model, remat=True)  # a module of its own: what is traced here is met by no other test
    api.EXECUTABLES.clear()
    monkeypatch.setattr(orthrus, "forward", wrong)
    report = check_lossless(model, params, dual_models.prompts(3, 12), Orthrus(block_size=8), max_new_tokens=16)
    api.EXECUTABLES.clear()
    assert not report.lossless and not report.first.near_tie and str(report).startswith("NOT lossless")
    assert report.first.block_error > 100 * report.first.error


def test_an_answer_that_ends_early_is_a_difference():
    assert lossless.first_difference(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert lossless.first_difference(np.array([1, 2, 3]), np.array([1, 5, 3])) == 1
    assert lossless.first_difference(np.array([1, 2]), np.array([1, 2])) is None


@pytest.mark.parametrize("decoder", [Orthrus(temperature=0.5), Autoregressive()])
def test_other_decoders_are_refused(decoder):
    model, params = dual_models.untrained()
    with pytest.raises(ValueError, match=r"expected Orthrus\(temperature=0\)"):
        check_lossless(model, params, [[2]], decoder, max_new_tokens=4)
