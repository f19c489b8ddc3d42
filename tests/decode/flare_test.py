"""FLARE's two decoders: beside plain loops that keep nothing, the autoregressive answers, and the laws they claim."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dlm_jax.decode import (
    ARTrust, Autoregressive, Constant, DiffusionTrust, Each, Runner, Sampler, SoftmaxArgmax, TruncatedArgmax, generate)
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.decode.flare import policies
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config
from tests.decode import flare_reference, joint
from tests.models import hybrids

EOS, V = 1, 12
MASK = V - 1
SLOW = pytest.mark.slow


@functools.cache
def network_of(kind):
    """A model over so few ids that a draft is kept now and then."""
    changes = dict(vocab_size=V, num_layers=2, mask_token_id=MASK)
    if kind == "dense":
        model = build.build(tiny_config("qwen3", **changes))
    else:
        model = build.build(hybrids.hybrid_config(
            kind, **changes, **{"pattern": ("gated_delta", "attention")} if kind == "qwen3_5_text" else {}))
    return model, random_params(model, seed=3, scale=0.3)


@pytest.fixture(scope="module", params=["dense", "qwen3_5_text", pytest.param("qwen3_next", marks=SLOW)])
def network(request):
    return network_of(request.param)


@pytest.fixture(scope="module")
def plain(network):
    return flare_reference.Model(*network)


def prompts(seed: int, count: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(2, V - 1, draw.integers(1, 10)).tolist() for _ in range(count)]


LIMITS = [1, 2, 3, 9, 14, 20, 20, 20]
READINGS = [
    ("dense", 2, "restart", "compact"), ("dense", 5, "restart", "wide_first"), ("dense", 3, "hold", "wide_last"),
    ("qwen3_5_text", 4, "restart", "compact"), ("qwen3_5_text", 3, "hold", "wide_last"),
    *(pytest.param(*reading, marks=SLOW) for reading in (
        ("dense", 8, "hold", "compact"), ("dense", 3, "restart", "wide_last"), ("dense", 4, "hold", "wide_first"),
        ("qwen3_5_text", 6, "restart", "wide_first"), ("qwen3_next", 4, "restart", "compact")))]


@pytest.mark.parametrize("network, horizon, on_reject, cold_start", READINGS, indirect=["network"])
def test_ar_trust_says_what_plain_decoding_says_in_the_rounds_of_a_plain_loop(
        network, plain, horizon, on_reject, cold_start):
    rows, decoder = prompts(0, 8), ARTrust(horizon=horizon, on_reject=on_reject, cold_start=cold_start)
    runner = Runner(*network, decoder)
    batch, rounds = runner.start(runner.request(rows, max_new_tokens=LIMITS)), [[] for _ in rows]
    while not batch.done.all():
        done, held = batch.done, np.asarray(batch.state.held)
        batch = runner.step(batch)
        for row in np.flatnonzero(~done[:8]):
            rounds[row].append((int(held[row]), int(batch.state.accepted[row])))
    out = runner.read(batch, range(8))
    expected = generate(*network, rows, Autoregressive(), max_new_tokens=LIMITS)
    for row, (prompt, limit) in enumerate(zip(rows, LIMITS)):
        np.testing.assert_array_equal(out.tokens[row], expected.tokens[row])
        answer, same = flare_reference.ar_trust(
            plain, prompt, limit, EOS, MASK, horizon, on_reject, cold_start)
        assert (out.tokens[row].tolist(), rounds[row]) == (answer, same), f"row {row}"
        assert out.ledger.forwards["draft"][row] == sum(held == 0 for held, _ in same)
        assert out.ledger.forwards["verify"][row] == sum(held > 0 for held, _ in same)
    kept = [accepted for row in rounds for _, accepted in row]
    assert max(kept) > 0, "no draft was kept: this test shows little"


@pytest.mark.parametrize("accepted", range(4))
def test_drafts_from_elsewhere_are_kept_up_to_the_first_wrong_one(network, accepted):
    """Every number of drafts kept, on any backbone: what is committed goes on as if it had been said token by token."""
    rows = prompts(5, 8)
    expected = [tokens.tolist() for tokens in generate(
        *network, rows, Autoregressive(), max_new_tokens=20, eos_id=-1).tokens]
    runner = Runner(*network, ARTrust(horizon=4))
    batch = runner.start(runner.request(rows, max_new_tokens=20, eos_id=-1))
    for _ in range(4):
        length = np.asarray(batch.state.length)
        drafts = np.zeros(batch.state.drafts.shape, np.int32)
        for row, answer in enumerate(expected):
            drafts[row] = answer[length[row] : length[row] + 3]
            if accepted < 3:
                drafts[row, accepted] = 2 + (drafts[row, accepted] - 1) % (V - 3)
        batch = runner.step(runner_rows(batch, drafts))
        np.testing.assert_array_equal(batch.state.accepted, accepted)
        np.testing.assert_array_equal(batch.state.length, length + accepted + 1)
    while not batch.done.all():
        batch = runner.step(batch)
    out = runner.read(batch, range(8))
    assert [tokens.tolist() for tokens in out.tokens] == expected


def runner_rows(batch, drafts):
    """Returns rows that hold other drafts."""
    held = jnp.full(len(drafts), drafts.shape[1], jnp.int32)
    return type(batch)(batch.request, batch.state.replace(drafts=jnp.asarray(drafts), held=held))


@pytest.mark.parametrize("block_size, steps, thresholds, first, shift", [
    (4, 4, (0.4, 0.4, 0.4, 0.4), "seed", 1), (5, 3, (0.5, 0.3, 0.9), "judged", 1), (4, 3, (0.3, 0.4, 0.5), "seed", 0),
    pytest.param(3, 3, (0.4,) * 3, "judged", 0, marks=SLOW), pytest.param(1, 1, (0.5,), "seed", 1, marks=SLOW),
    pytest.param(2, 7, (0.3,) * 7, "judged", 1, marks=SLOW)])
def test_diffusion_trust_is_a_plain_loop(network, plain, block_size, steps, thresholds, first, shift):
    rows = prompts(1, 8)
    decoder = DiffusionTrust(
        block_size=block_size, steps=steps, thresholds=Each(thresholds), first=first, shift=shift)
    out = generate(*network, rows, decoder, max_new_tokens=LIMITS)
    for row, (prompt, limit) in enumerate(zip(rows, LIMITS)):
        answer, trace = flare_reference.diffusion_trust(
            plain, prompt, limit, EOS, MASK, block_size, steps, list(thresholds), first == "seed", shift)
        assert out.tokens[row].tolist() == answer, f"row {row}"
        # a forward for every pass, none for what comes after the answer
        forwards, whole = 0, 0
        for number, passes in enumerate(trace):
            forwards += number > 0
            for filled in passes:
                forwards += 1
                for i in filled:
                    place = number * block_size + i
                    if place < len(answer):
                        assert out.committed_at[row, place] == forwards
                        whole = forwards
        seeds = [i * block_size for i in range(len(trace))] if first == "seed" else []
        last = max([whole, *(int(out.committed_at[row, i]) for i in seeds if i < len(answer))])
        assert out.ledger.after_prefill()[row] == last
    assert 0 < out.ledger.forwards["commit"].sum() and (block_size == 1 or out.ledger.forwards["denoise"].sum() > 8)


@pytest.mark.parametrize("decoder", [
    ARTrust(horizon=4, temperature=0.8), DiffusionTrust(block_size=4, steps=4, thresholds=Each((0.4,) * 4))],
    ids=["ar_trust", "diffusion_trust"])
def test_rows_of_recurrent_layers_come_and_go_without_a_trace(decoder):
    runner, ask = Runner(*network_of("qwen3_5_text"), decoder), dict(max_new_tokens=20, eos_id=-1)
    first, newcomer = prompts(7, 8), prompts(8, 1)[0]

    def finished(batch):
        while not batch.done.all():
            batch = runner.step(batch)
        return runner.read(batch, range(8))

    undisturbed = finished(runner.start(runner.request(first, **ask, seed=3)))
    batch = runner.start(runner.request(first, **ask, seed=3))
    for _ in range(3):
        batch = runner.step(batch)
    _, batch = runner.release(batch, [2])
    batch = runner.step(batch)
    out = finished(runner.admit(batch, 2, newcomer, max_new_tokens=20, seed=9, number=4))
    others = finished(runner.start(runner.request([newcomer, *first[:7]], **ask, seed=9, first_row=4)))
    for name in ("canvas", "committed_at", "origin"):
        ours = getattr(out, name)
        np.testing.assert_array_equal(np.delete(ours, 2, 0), np.delete(getattr(undisturbed, name), 2, 0), err_msg=name)
        np.testing.assert_array_equal(ours[2], getattr(others, name)[0], err_msg=name)


# ---- sampling --------------------------------------------------------------------------------------------------

CONTROLS = [dict(temperature=1.0, top_k=0, top_p=1.0), dict(temperature=0.7, top_k=5, top_p=0.9)]
PLAIN = dict(temperature=0.7, top_k=0, top_p=1.0)


def small():
    """A causal model over 6 ids, whose drafts disagree with it."""
    model = build.build(tiny_config("qwen3", vocab_size=joint.SMALL, hidden_size=16, intermediate_size=24, num_layers=1,
                                    num_heads=2, num_kv_heads=1, head_dim=8, bos_token_id=None, pad_token_id=None,
                                    eos_token_id=None, mask_token_id=joint.SMALL - 1))
    return model, random_params(model, seed=3, scale=0.35)


def draw(samples=joint.SAMPLES, **fields):
    return joint.draw(*small(), ARTrust(**fields), samples)


@pytest.mark.parametrize("fields, controls", [
    (dict(horizon=3), CONTROLS[1]), (dict(horizon=2, on_reject="hold", cold_start="wide_last", tile=4), CONTROLS[0]),
    (dict(horizon=3, policy=SoftmaxArgmax()), PLAIN)], ids=["exact", "exact held", "softmax"])
def test_samples_are_distributed_as_the_model_says(fields, controls):
    exact = joint.exact(*small(), **controls)
    assert joint.p_value(draw(**fields, **controls), exact) > 0.01


def test_policies_that_approximate_deviate_by_what_is_written_down():
    """In total variation of three tokens: nothing but truncation for SoftmaxArgmax, 0.18 for TruncatedArgmax."""
    controls = CONTROLS[1]
    exact = joint.exact(*small(), **controls)
    noise = joint.distance(draw(12_800, horizon=3, **controls), exact)
    apart = {kind: joint.distance(draw(12_800, horizon=3, policy=kind(), **controls), exact)
             for kind in (SoftmaxArgmax, TruncatedArgmax)}
    untruncated = joint.exact(*small(), **PLAIN)
    assert apart[SoftmaxArgmax] == pytest.approx(np.abs(untruncated - exact).sum() / 2, abs=2 * noise)
    assert apart[TruncatedArgmax] == pytest.approx(0.18, abs=2 * noise)


@pytest.mark.parametrize("broken", [
    dict(left=lambda policy, p, q, drafted: jnp.exp(p)),
    dict(chance=lambda policy, p, q: jnp.ones_like(p)),
    dict(chance=lambda policy, p, q: (p > q).astype(jnp.float32))],
    ids=["a correction from p", "every draft kept", "a draft kept where p > q only"])
def test_a_broken_rule_is_caught(broken, monkeypatch):
    EXECUTABLES.clear()
    for name, rule in broken.items():
        monkeypatch.setattr(policies, name, rule)
    value = joint.p_value(draw(25_600, horizon=2, **CONTROLS[0]), joint.exact(*small(), **CONTROLS[0]))
    EXECUTABLES.clear()
    assert value < 1e-6


@pytest.mark.parametrize("score", ["model", pytest.param("sampler", marks=SLOW)])
def test_diffusion_trust_draws_a_blocks_tokens_from_the_noisy_rows(score):
    """Of a block of two filled at once: p(seed) of the clean row times q(next) of the noisy row behind it."""
    model, params = small()
    decoder = DiffusionTrust(block_size=2, steps=1, score=score, **CONTROLS[1])
    out = generate(model, params, [joint.PROMPT] * 25_600, decoder, max_new_tokens=2, seed=5)
    run, S = flare_reference.Model(model, params), joint.SMALL
    law = lambda logits: np.asarray(jax.nn.softmax(Sampler(**CONTROLS[1]).shaped(jnp.asarray(logits))), np.float64)
    first = law(run(joint.PROMPT)[-1])
    pairs = np.concatenate([first[i] * law(run(joint.PROMPT, [i, S - 1])[-2]) for i in range(S)])
    counts = np.bincount(np.stack(out.tokens) @ [S, 1], minlength=S * S)
    live = pairs > 0
    assert counts[~live].sum() == 0
    assert stats.chisquare(counts[live], pairs[live] / pairs.sum() * len(out.tokens)).pvalue > 0.01


# ---- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, fields, message", [
    (ARTrust, dict(horizon=1), "horizon = 1"),
    (ARTrust, dict(policy=SoftmaxArgmax), "expected a DraftPolicy, such as ExactTruncated"),
    (ARTrust, dict(on_reject="keep"), "on_reject = 'keep': accepted are"),
    (ARTrust, dict(cold_start="wide"), "cold_start = 'wide': accepted are"),
    (ARTrust, dict(tile=0), "tile = 0"),
    (DiffusionTrust, dict(block_size=0), "block_size = 0"),
    (DiffusionTrust, dict(steps=-1), "steps = -1"),
    (DiffusionTrust, dict(thresholds=0.9), "expected a Thresholds, such as Constant"),
    (DiffusionTrust, dict(first="mask"), "first = 'mask': accepted are"),
    (DiffusionTrust, dict(score="top"), "score = 'top': accepted are"),
    (Constant, dict(probability=1.5), "probability = 1.5"),
    (Each, dict(probabilities=()), "expected a tuple of numbers"),
    (Each, dict(probabilities=(0.5, 2.0)), "probabilities = 2.0"),
])
def test_bad_fields_are_named(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize("decoder", [ARTrust(), DiffusionTrust()], ids=["ar_trust", "diffusion_trust"])
def test_models_that_cannot_draft_are_refused(decoder):
    with pytest.raises(ValueError, match="needs a causal model"):
        generate(build.build(tiny_config("llada")), {}, [[3, 4]], decoder, max_new_tokens=4)
    with pytest.raises(ValueError, match="names none: pass mask_id"):
        generate(build.build(tiny_config("qwen3")), {}, [[3, 4]], decoder, max_new_tokens=4)


def test_the_block_is_the_decoders_else_the_models():
    model, params = network_of("dense")
    trained = model.clone(config=model.config.replace(block_size=3))
    sizes = [Runner(one, params, decoder).decoder.block_size for one, decoder in (
        (model, DiffusionTrust()), (trained, DiffusionTrust()), (trained, DiffusionTrust(block_size=2)))]
    assert sizes == [4, 3, 2]


def test_a_newcomer_needs_room_for_its_windows():
    runner = Runner(*network_of("dense"), ARTrust(horizon=5))
    _, rows = runner.release(runner.start(runner.request([[3, 4]], max_new_tokens=16)), [0])
    with pytest.raises(ValueError, match="max_new_tokens: 17 tokens do not fit a batch made for 16"):
        runner.admit(rows, 0, [3], max_new_tokens=17)


def test_what_a_checkpoint_was_not_trained_for_is_said():
    trained, seed = tiny_config(block_size=4, noisy_shift=1), tiny_config()
    own = tiny_config(block_size=4, noisy_shift=0)
    assert ARTrust(horizon=4).doubt(trained) is None and DiffusionTrust().doubt(trained) is None
    assert "nothing says that it was trained to denoise" in ARTrust().doubt(seed)
    assert "horizon = 6 drafts from 5 masks in a row" in ARTrust(horizon=6).doubt(trained)
    assert "names no noisy_shift" in DiffusionTrust().doubt(seed)
    assert "by a mask's own output" in ARTrust().doubt(own) and DiffusionTrust().doubt(own) is None
    assert "shift = 1, and the model was trained on 0" in DiffusionTrust(shift=1).doubt(own)


def test_a_runner_says_once_what_to_expect(caplog):
    model, params = network_of("dense")
    model = model.clone(config=model.config.replace(block_size=7, noisy_shift=0))
    for _ in range(2):  # a sentence that no other test causes
        Runner(model, params, DiffusionTrust(shift=1))
    assert [line for line in caplog.messages if "shift = 1" in line] == [DiffusionTrust(shift=1).doubt(model.config)]
