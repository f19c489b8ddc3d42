"""Orthrus: greedy answers are the AR view's own, sampled ones are distributed as its own, and nothing is wasted."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp
from dlm_jax.decode import Autoregressive, Orthrus, Sampler, check_lossless, generate, stream
from dlm_jax.decode import parts, sampling, speculative
from dlm_jax.decode import request as requests
from dlm_jax.decode.canvas import DRAFTED
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config
from tests.decode import dual_models, joint
from tests.decode.dual_models import EOS
from tests.decode.joint import SMALL

NETWORKS = {"trained": dual_models.trained, "untrained": dual_models.untrained}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("block_size, batch_size", [
    (8, 5), (3, 5), pytest.param(2, 5, marks=SLOW), pytest.param(32, 5, marks=SLOW), (8, 1),
    *(pytest.param(K, 1, marks=SLOW) for K in (2, 3, 32))])
def test_greedy_answers_are_the_autoregressive_ones(network, block_size, batch_size):
    model, params = NETWORKS[network]()
    rows = dual_models.prompts(7, 200)
    options = dict(max_new_tokens=[5 + i % 20 for i in range(200)], batch_size=batch_size)
    plain = generate(model, params, rows, Autoregressive(), **options)
    ours = generate(model, params, rows, Orthrus(block_size=block_size), **options)
    for row, (a, b) in enumerate(zip(ours.tokens, plain.tokens)):
        np.testing.assert_array_equal(a, b, err_msg=f"prompt {row}")
    drafted = [o[: len(t)] for o, t in zip(ours.origin, ours.tokens)]
    share = sum((o == DRAFTED).sum() for o in drafted) / sum(map(len, drafted))
    # a draft is kept at all, and a trained view earns its keep; both ways of ending a row occurred
    assert share > (0.4 if network == "trained" and block_size > 2 else 0.0)
    if network == "trained" and block_size > 2:
        assert sum(t[-1] == EOS and o[len(t) - 1] == DRAFTED for t, o in zip(ours.tokens, ours.origin)) > 5
        assert sum(t[-1] != EOS for t in ours.tokens) > 5
        if block_size == 8:
            assert ours.ledger.tokens_per_forward() > 1.2 * plain.ledger.tokens_per_forward()


def test_the_ledger_counts_both_views():
    model, params = dual_models.trained()
    rows = dual_models.prompts(3, 6)
    out = generate(model, params, rows, Orthrus(block_size=4), max_new_tokens=11)
    forwards = sum(1 + 2 * out.ledger.forwards["verify"])  # the prefill yields a token, so it counts
    assert out.ledger.tokens_per_forward() == pytest.approx(sum(map(len, out.tokens)) / forwards)
    np.testing.assert_array_equal(out.ledger.forwards["draft"], out.ledger.forwards["verify"])
    for row, tokens in enumerate(out.tokens):
        at = out.committed_at[row, : len(tokens)]
        # every verification commits at least its own token, and a round ends on an even forward
        assert set(at.tolist()) == {0, *range(2, int(at.max()) + 1, 2)}
        # a block covers the newest token and what the request leaves room for
        starts = [int(np.argmax(at == forward)) for forward in sorted(set(at.tolist()) - {0})]
        assert out.ledger.positions["draft"][row] == sum(min(4, 11 - start + 1) for start in starts)


def test_the_cache_is_the_autoregressive_one():
    model, params = dual_models.untrained()
    request = requests.make([[5, 6, 7]], max_new_tokens=9, capacity=16, eos_id=EOS, mask_id=31)
    sizes = [jax.tree.map(jnp.shape, decoder.init(model.scorer(params), request).cache)
             for decoder in (Autoregressive(), Orthrus(block_size=8))]
    assert sizes[0] == sizes[1], "drafts stand where their verification will"


def test_drafts_are_streamed_before_their_verification():
    model, params = dual_models.trained()
    events = list(stream(model, params, [2, 3, 4], Orthrus(block_size=4), max_new_tokens=8))
    kinds = [(event.kind, event.committed) for event in events]
    assert kinds[0] == ("prefill", True)
    assert kinds[1:] == [("draft", False), ("verify", True)] * (len(kinds) // 2)
    filled = 1
    for number, (draft, verify) in enumerate(zip(events[1::2], events[2::2])):
        # whatever an earlier round drafted there, a round shows its whole block
        assert draft.numbers == list(range(filled, min(filled + 3, 8)))
        assert verify.numbers == list(range(filled, filled + len(verify.numbers)))
        assert (draft.forward, verify.forward) == (2 * number + 1, 2 * number + 2)
        filled += len(verify.numbers)


def test_unrolled_layers_and_a_block_longer_than_the_answer():
    model, params = dual_models.trained()
    rows = dual_models.prompts(11, 4)
    plain = generate(model, params, rows, Autoregressive(), max_new_tokens=[1, 2, 3, 6])
    for network in ((model, params), build.unroll(model, params)):
        ours = generate(*network, rows, Orthrus(block_size=16), max_new_tokens=[1, 2, 3, 6])
        for a, b in zip(ours.tokens, plain.tokens):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("given, trained, used", [(None, 5, 5), (3, 5, 3), (None, None, 32), (None, 96, 96)])
def test_the_block_is_the_decoders_else_the_models(given, trained, used):
    model, params = dual_models.untrained()
    model = model.clone(config=model.config.replace(block_size=trained))
    decoder, score = Orthrus(block_size=given), model.scorer(params)
    decoder.check_model(model.config)
    assert decoder.size(model.config) == decoder.size(score) == used
    for capacity in (4, 64):  # no wider than the answer
        request = requests.make([[5, 6]], max_new_tokens=4, capacity=capacity, eos_id=EOS, mask_id=31)
        for start in (decoder, parts.traced(decoder)):
            state = jax.eval_shape(lambda: start.init(score, request))
            assert state.drafts.shape[1] == min(used, capacity) - 1
            assert jax.tree.map(jnp.shape, jax.eval_shape(lambda s: start.step(score, request, s), state)) == (
                jax.tree.map(jnp.shape, state))


def test_the_models_block_decodes_as_the_same_one_named():
    model, params = dual_models.trained()
    trained, rows = model.clone(config=model.config.replace(block_size=4)), dual_models.prompts(5, 6)
    ours = generate(trained, params, rows, Orthrus(), max_new_tokens=12)
    named = generate(model, params, rows, Orthrus(block_size=4), max_new_tokens=12)
    np.testing.assert_array_equal(ours.committed_at, named.committed_at)
    assert check_lossless(trained, params, rows, max_new_tokens=12).identical


@pytest.mark.parametrize("fields, message", [
    (dict(block_size=1), "block_size = 1"),
    (dict(block_size=4.0), "block_size = 4.0.*an int"),
    (dict(block_size=0), "block_size = 0"),
    (dict(temperature=-1.0), "temperature = -1.0"),
])
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Orthrus(**fields)


@pytest.mark.parametrize("family, message", [
    ("qwen3", "qwen3 model has one.*to-orthrus"), ("llada", "needs a causal model")])
def test_models_that_cannot_draft_are_refused(family, message):
    model = build.build(tiny_config(family, mask_token_id=96))
    with pytest.raises(ValueError, match=message):
        generate(model, {}, [[3, 4]], Orthrus(), max_new_tokens=4)


def test_a_model_of_blocks_without_drafts_is_refused_unless_another_size_is_named():
    config = tiny_config("orthrus", mask_token_id=96, block_size=1)
    with pytest.raises(ValueError, match="block_size = 1 in the model's config.*name one"):
        generate(build.build(config), {}, [[3, 4]], Orthrus(), max_new_tokens=4)
    Orthrus(block_size=2).check_model(config)


def test_a_vocabulary_without_a_mask_is_refused():
    model = build.build(tiny_config("orthrus"))
    with pytest.raises(ValueError, match="names none: pass mask_id"):
        generate(model, {}, [[3, 4]], Orthrus(), max_new_tokens=4)


# ---- sampling --------------------------------------------------------------------------------------------------

def small():
    """A dual model over 6 ids, whose views disagree."""
    model = build.build(tiny_config("orthrus", vocab_size=SMALL, hidden_size=16, intermediate_size=24, num_layers=1,
                                    num_heads=2, num_kv_heads=1, head_dim=8, bos_token_id=None, pad_token_id=None,
                                    eos_token_id=None, mask_token_id=SMALL - 1))
    return model, random_params(model, seed=3, scale=0.35)


def draw(decoder):
    return joint.draw(*small(), decoder)


CONTROLS = [dict(temperature=1.0, top_k=0, top_p=1.0), dict(temperature=0.7, top_k=5, top_p=0.9)]


@pytest.mark.parametrize("controls", CONTROLS)
@pytest.mark.parametrize("decoder", [
    Autoregressive, lambda **c: Orthrus(block_size=2, **c), lambda **c: Orthrus(block_size=3, **c)],
    ids=["ar", "orthrus2", "orthrus3"])
def test_samples_are_distributed_as_the_model_says(decoder, controls):
    exact = joint.exact(*small(), **controls)
    assert exact.sum() == pytest.approx(1, abs=1e-5)
    assert joint.p_value(draw(decoder(**controls)), exact) > 0.01


def _corrected_from_p(drafts, draft_logits, logits, keys):
    survives, _ = RIGHT(drafts, draft_logits, logits, keys)
    return survives, sampling.draw(logits, jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 2)))(keys))


def _likelier_only(drafts, draft_logits, logits, keys):
    of = lambda x: jnp.take_along_axis(jax.nn.log_softmax(x), drafts[..., None], -1)[..., 0]
    return of(logits[:, :-1]) > of(draft_logits), RIGHT(drafts, draft_logits, logits, keys)[1]


def _every_draft(drafts, draft_logits, logits, keys):
    return jnp.ones(drafts.shape, bool), RIGHT(drafts, draft_logits, logits, keys)[1]


def _greedy_bonus(drafts, draft_logits, logits, keys):
    survives, choice = RIGHT(drafts, draft_logits, logits, keys)
    return survives, choice.at[:, -1].set(jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32))


RIGHT = speculative.accept
BROKEN = {  # rules that someone might write
    "a correction from p instead of max(p - q, 0)": _corrected_from_p, "a draft kept where p > q only": _likelier_only,
    "every draft kept": _every_draft, "the likeliest token as the bonus": _greedy_bonus}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_acceptance_rule_is_caught(name, monkeypatch):
    controls = CONTROLS[0]
    EXECUTABLES.clear()
    monkeypatch.setattr(speculative, "accept", BROKEN[name])
    value = joint.p_value(draw(Orthrus(block_size=2, **controls)), joint.exact(*small(), **controls))
    EXECUTABLES.clear()
    assert value < 1e-6
