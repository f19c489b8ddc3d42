"""Block diffusion against a plain loop under every set of conventions, and what its parts promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax import decode
from dlm_jax.decode import Autoregressive, BlockDiffusion, Conventions, SelfSpeculation, generate
from dlm_jax.decode.runner import python_loop
from dlm_jax.models import build
from dlm_jax.scoring import Pass
from tests.conftest import random_params, tiny_config
from tests.decode import blocks_reference as reference

MASK, EOS, K = 96, 1, 4
TOLD = {
    "sdar": Conventions(prompt="block-causal", grid="absolute", commit="block-bidirectional"),
    "fast_dllm_v2": Conventions(prompt="block-causal", grid="absolute", commit="block-bidirectional",
                                logits="shifted", seed="autoregressive"),
    "nemotron": Conventions(prompt="causal", seed="autoregressive", commit="causal"),
    "llada2": Conventions(prompt="block-causal", grid="absolute"),
    "wedlm": Conventions(prompt="causal"),
    "whole_prompt": Conventions(prompt="full", commit="block-bidirectional"),
    "judged": Conventions(prompt="block-causal", grid="anchored", commit="block-bidirectional", logits="shifted"),
}
# no released model's: with those above, every two facts that go together do so once
UNHEARD = {
    "full_causal": Conventions(prompt="full", logits="shifted", commit="causal"),
    "causal_row": Conventions(prompt="causal", logits="shifted", grid="absolute"),
    "full_seeded": Conventions(prompt="full", seed="autoregressive", commit="block-bidirectional"),
    "causal_prompt": Conventions(prompt="causal", grid="absolute", commit="block-bidirectional"),
    "causal_commit": Conventions(prompt="block-causal", grid="absolute", commit="causal"),
}
PROMPTS = [[5, 9, 11], [7, 3, 8, 12, 20, 31, 44, 50], [2], [60, 61, 62, 63, 64]]
LIMITS = [9, 8, 11, 6]


@pytest.fixture(scope="module")
def weights():
    """Parameters that all these models share; their conventions differ."""
    return random_params(build.build(tiny_config()), scale=0.4)


def model_of(told, **changes):
    return build.build(tiny_config(conventions=told, mask_token_id=MASK, block_size=K, **changes))


@pytest.fixture(scope="module")
def outputs(weights):
    """A row's outputs under a dense mask, padded to one shape."""
    model, size = build.build(tiny_config()), 32

    @jax.jit
    def run(tokens, positions, mask):
        score = model.scorer(weights)
        return score.head(score.hidden(tokens[None], Pass(positions[None], mask[None]))[0])[0]

    def padded(tokens, positions, mask):
        T = len(tokens)
        fill = np.zeros((size, size), bool)
        fill[:T, :T] = mask
        pad = lambda x: np.pad(x, (0, size - T)).astype(np.int32)
        return np.asarray(run(pad(tokens), pad(positions), fill))[:T]

    return padded


def spent(ledger, row):
    return {kind: int(ledger.forwards[kind][row]) for kind in ("prefill", "denoise", "commit")}


@pytest.mark.parametrize("name", [*TOLD, *(pytest.param(name, marks=pytest.mark.slow) for name in UNHEARD)])
def test_it_is_the_plain_loop(name, weights, outputs):
    told, decoder = (TOLD | UNHEARD)[name], BlockDiffusion(commit=decode.Threshold(0.1))
    out = generate(model_of(told), weights, PROMPTS, decoder, max_new_tokens=LIMITS)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        want, counts = reference.decode(outputs, prompt, told, size=K, limit=limit, threshold=0.1, mask=MASK, eos=EOS)
        assert out.tokens[row].tolist() == want
        assert spent(out.ledger, row) == counts


def test_sub_blocks_are_filled_one_after_the_other(weights, outputs):
    told, decoder = TOLD["sdar"], BlockDiffusion(commit=decode.Threshold(0.1), sub_block=2)
    out = generate(model_of(told), weights, PROMPTS, decoder, max_new_tokens=LIMITS)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        want, counts = reference.decode(outputs, prompt, told, size=K, limit=limit, threshold=0.1, mask=MASK, eos=EOS,
                                        sub=2)
        assert out.tokens[row].tolist() == want
        assert spent(out.ledger, row) == counts


@pytest.mark.parametrize("name", ["fast_dllm_v2", "llada2", "wedlm"])
def test_a_row_depends_on_itself_alone(name, weights):
    model = model_of(TOLD[name])
    decoder = BlockDiffusion(commit=decode.Even(2), temperature=0.8, thinking=decode.Thinking(3, 77))
    together = generate(model, weights, PROMPTS, decoder, max_new_tokens=LIMITS)
    request = decode.Runner(model, weights, decoder)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        asked = request.request([prompt], max_new_tokens=limit, first_row=row)
        alone = request.read(request.run(request.start(asked)), [0])
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert spent(together.ledger, row) == spent(alone.ledger, 0)


def test_every_loop_takes_the_same_steps(weights):
    model = model_of(TOLD["fast_dllm_v2"])
    settings = dict(block_size=8, sub_block=4, commit=decode.TopN(1))
    runner = decode.Runner(model, weights, BlockDiffusion(inner=True, **settings))
    request = runner.request(PROMPTS, max_new_tokens=LIMITS)
    compiled = runner.run(runner.start(request)).state
    plain = python_loop(model.scorer(weights), runner.decoder, request)
    np.testing.assert_array_equal(compiled.canvas.tokens, plain.canvas.tokens)
    np.testing.assert_array_equal(compiled.counts.forwards, plain.counts.forwards)
    whole = generate(model, weights, PROMPTS, BlockDiffusion(**settings), max_new_tokens=LIMITS).ledger
    assert compiled.counts.positions.sum() < sum(x.sum() for x in whole.positions.values()), "pieces were run alone"


def test_what_closes_an_answer(weights):
    model, told = model_of(TOLD["sdar"]), {}
    for closing in ("never", "length", "always"):
        out = generate(model, weights, [[5, 9, 11, 13]], BlockDiffusion(closing=closing), max_new_tokens=8, eos_id=-1)
        told[closing] = int(out.ledger.forwards["commit"][0])
    assert told == {"never": 1, "length": 2, "always": 2}


def test_a_block_may_be_left_with_masks(weights):
    out = generate(model_of(TOLD["sdar"]), weights, [[5, 9, 11, 13]], BlockDiffusion(commit=decode.TopN(1), passes=2),
                   max_new_tokens=8, eos_id=-1)
    assert (out.canvas[0].reshape(2, 4) == MASK).sum(axis=1).tolist() == [2, 2]
    assert spent(out.ledger, 0) == {"prefill": 1, "denoise": 4, "commit": 1}


@pytest.mark.parametrize("budget, place", [(0, 0), (2, 2), (5, 5), (20, None)])
def test_thinking_ends_where_its_budget_does(budget, place, weights):
    decoder = BlockDiffusion(thinking=decode.Thinking(budget, 77))
    out = generate(model_of(TOLD["nemotron"]), weights, [[5, 9, 11]], decoder, max_new_tokens=12, eos_id=-1)
    assert np.flatnonzero(out.canvas[0] == 77).tolist() == ([] if place is None else [place])


@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_self_speculation_is_lossless(threshold, weights):
    model = model_of(TOLD["nemotron"])
    said = generate(model, weights, PROMPTS, Autoregressive(), max_new_tokens=LIMITS)
    fast = generate(model, weights, PROMPTS, SelfSpeculation(threshold=threshold), max_new_tokens=LIMITS)
    assert [x.tolist() for x in fast.tokens] == [x.tolist() for x in said.tokens]
    assert (fast.ledger.forwards["verify"] <= said.ledger.forwards["decode"]).all()


def test_whole_and_cut_blocks(weights):
    model, prompt = model_of(TOLD["sdar"]), [[5, 9, 11, 13]]
    for cut, positions in ((False, 4), (True, 2)):
        out = generate(model, weights, prompt, BlockDiffusion(commit=decode.TopN(4), cut=cut), max_new_tokens=2)
        assert int(out.ledger.positions["denoise"][0]) == positions


def test_rules():
    chances = jnp.log(jnp.array([[0.5, 0.97, 0.9, 0.2]]))
    spread = lambda p: jnp.stack([p, jnp.log1p(-jnp.exp(p))], axis=-1)
    drafts = decode.Drafts(jnp.zeros((1, 4), jnp.int32), spread(chances), jnp.ones((1, 4), bool), jnp.arange(4)[None],
                           None, decode.Sampler())
    clock = decode.Clock(jnp.array([0]), jnp.array([0]), jnp.array([4]), jnp.array([4]), 4)

    def chosen(rule, confidence=decode.Probability()):
        judged = drafts.replace(measure=confidence)
        sure = confidence.of(judged)
        return rule.choose(judged.replace(confidence=sure, order=sure), clock)[0].tolist()

    assert chosen(decode.Even(3)) == [False, True, True, False], "two of four in the first of three steps"
    assert chosen(decode.InOrder(decode.Even(2))) == [True, True, False, False]
    assert chosen(decode.Enough(0.85, decode.TopN(1))) == [False, True, True, False]
    assert chosen(decode.Enough(0.95, decode.TopN(2))) == [False, True, True, False], "one is not enough"
    assert chosen(decode.Enough(0.95, decode.InOrder(decode.TopN(2)))) == [True, True, False, False]
    nats = lambda p: -(p * np.log(p) + (1 - p) * np.log(1 - p))
    bound = lambda x: chosen(decode.EntropyBound(x), decode.Entropy())
    assert bound(0.0) == [False, True, False, False]
    assert bound(nats(0.97) + nats(0.9) + 1e-3) == [False, True, True, False]
    assert bound(nats(0.97) + nats(0.9) + nats(0.2) + 1e-3) == [False, True, True, True]


@pytest.mark.parametrize("told, decoder, message", [
    (None, BlockDiffusion(), "nothing says how this qwen3 model was taught.*Conventions"),
    (Conventions(), BlockDiffusion(), "prompt = 'full' with commit = 'none'.*MaskedDiffusion"),
    (Conventions(grid="absolute", commit="causal"), BlockDiffusion(), "prompt = 'full' with grid = 'absolute'"),
    (TOLD["sdar"], SelfSpeculation(), "is bidirectional: decode it"),
    (TOLD["nemotron"].replace(commit="block-bidirectional"), SelfSpeculation(), "both autoregressive.*BlockDiffusion"),
    (TOLD["wedlm"], Autoregressive(), "takes next tokens from outputs.*decode it with BlockDiffusion"),
    (TOLD["sdar"], Autoregressive(), "is bidirectional: decode it with a masked-diffusion decoder .BlockDiffusion"),
    (TOLD["sdar"], decode.MaskedDiffusion(), "shows tokens the whole row.*BlockDiffusion"),
])
def test_models_that_it_cannot_serve(told, decoder, message, weights):
    with pytest.raises(ValueError, match=message):
        decode.Runner(model_of(told), weights, decoder)


@pytest.mark.parametrize("make, message", [
    (lambda: Conventions(prompt="block"), "prompt = 'block': accepted are"),
    (lambda: Conventions(seed="autoregressive"), "seed = 'autoregressive' with commit = 'none'"),
    (lambda: BlockDiffusion(stop=decode.Fill()), "fills what follows an EOS"),
    (lambda: BlockDiffusion(closing="maybe"), "closing = 'maybe': accepted are"),
    (lambda: BlockDiffusion(block_size=6, sub_block=4), "sub_block = 4 does not divide block_size = 6"),
    (lambda: BlockDiffusion(inner=True), "inner = True with sub_block = None"),
    (lambda: BlockDiffusion(commit=decode.EntropyBound(0.1)), "EntropyBound adds up entropies"),
    (lambda: SelfSpeculation(threshold=0.5, temperature=1.0), "no fair draws"),
])
def test_settings_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_model_without_block_size_is_asked_for_one(weights):
    model = build.build(tiny_config(conventions=TOLD["sdar"], mask_token_id=MASK))
    with pytest.raises(ValueError, match="name that of its training"):
        decode.Runner(model, weights, BlockDiffusion())
    with pytest.raises(ValueError, match="no block_size: set one, or pass a visibility"):
        dlm_jax.forward(model, weights, [[5, 9]])
