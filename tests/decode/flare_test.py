"""FLARE's two decoders: beside plain loops that keep nothing, the autoregressive answers, and the laws they claim."""

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import ARTrust, Autoregressive, DiffusionTrust, Each, Runner, generate
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config
from tests.decode import flare_reference

EOS, V = 1, 12
MASK = V - 1
SLOW = pytest.mark.slow


def dense():
    """A causal model over so few ids that a draft is kept now and then."""
    model = build.build(tiny_config("qwen3", vocab_size=V, num_layers=2, mask_token_id=MASK))
    return model, random_params(model, seed=3, scale=0.3)


NETWORKS = {"dense": dense}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


@pytest.fixture(scope="module")
def plain(network):
    return flare_reference.Model(*network)


def prompts(seed: int, count: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(2, V - 1, draw.integers(1, 10)).tolist() for _ in range(count)]


LIMITS = [1, 2, 3, 9, 14, 20, 20, 20]
READINGS = [(2, "restart", "compact"), (4, "restart", "compact"), (3, "hold", "wide_last"),
            (5, "restart", "wide_first"), *(pytest.param(N, on, cold, marks=SLOW) for N, on, cold in (
                (8, "hold", "compact"), (3, "restart", "wide_last"), (4, "hold", "wide_first")))]


@pytest.mark.parametrize("horizon, on_reject, cold_start", READINGS)
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
    rows = prompts(5, 3)
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
        np.testing.assert_array_equal(batch.state.accepted[:3], accepted)
        np.testing.assert_array_equal(batch.state.length[:3], length[:3] + accepted + 1)
    out = runner.read(runner.run(batch), range(3))
    assert [tokens.tolist() for tokens in out.tokens] == expected


def runner_rows(batch, drafts):
    """Returns rows that hold other drafts."""
    held = jnp.full(len(drafts), drafts.shape[1], jnp.int32)
    return type(batch)(batch.request, batch.state.replace(drafts=jnp.asarray(drafts), held=held))


@pytest.mark.parametrize("block_size, steps, thresholds, first", [
    (4, 4, (0.4, 0.4, 0.4, 0.4), "seed"), (5, 3, (0.5, 0.3, 0.9), "judged"),
    pytest.param(1, 1, (0.5,), "seed", marks=SLOW), pytest.param(2, 7, (0.3,) * 7, "judged", marks=SLOW)])
def test_diffusion_trust_is_a_plain_loop(network, plain, block_size, steps, thresholds, first):
    rows = prompts(1, 8)
    decoder = DiffusionTrust(block_size=block_size, steps=steps, thresholds=Each(thresholds), first=first)
    out = generate(*network, rows, decoder, max_new_tokens=LIMITS)
    for row, (prompt, limit) in enumerate(zip(rows, LIMITS)):
        answer, trace = flare_reference.diffusion_trust(
            plain, prompt, limit, EOS, MASK, block_size, steps, list(thresholds), first == "seed")
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
