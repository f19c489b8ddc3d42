"""The parts of masked diffusion by themselves: rules and confidences against plain numbers, and what is refused."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.decode import MaskedDiffusion, Sampler
from dlm_jax.decode.masked.commit import elapsed
from dlm_jax.decode.masked.drafts import Clock, Drafts, places
from tests.decode import masked_reference as reference


def clock(step=0, *, left, tokens=None, block_length=None, block=0):
    """The clock of one row in its first block, which is its whole answer unless a length is given."""
    one = lambda x: jnp.array([x], jnp.int32)
    tokens = left if tokens is None else tokens
    return Clock(one(step), one(block), one(left), one(tokens), block_length or tokens)


def drafts(confidence, eligible=None):
    """One row of drafts with given confidences, as `of` of Probability gives them."""
    sure = jnp.asarray(confidence, jnp.float32)[None]
    eligible = jnp.ones(sure.shape, bool) if eligible is None else jnp.asarray(eligible)[None]
    return Drafts(jnp.zeros(sure.shape, jnp.int32), jnp.zeros((*sure.shape, 2)), eligible, jnp.arange(sure.size)[None],
                  jax.random.split(jax.random.key(0), sure.shape), Sampler(), decode.Probability(), sure, sure)


def test_shares_are_block_diffusions():
    """Equal shares of what is left, half to even; no forward commits nothing."""
    for tokens, steps in itertools.product(range(1, 17), range(1, 20)):
        want, got, left, step = reference.plan(tokens, steps), [], tokens, 0
        rule = decode.Shares(steps)
        while left:
            made = drafts(np.zeros(tokens), np.arange(tokens) < left)
            now = clock(step, left=left, tokens=tokens)
            got.append(int(rule.choose(made, now).sum()))
            step = int(rule.after(made, now)[0])
            left -= got[-1]
        assert got == want, (tokens, steps)


def test_time_falls_as_in_dream():
    for steps, eps in ((7, 1e-3), (32, 1e-3), (100, 1e-2)):
        times = np.linspace(1, eps, steps + 1)
        shares = np.array([elapsed(jnp.array([steps]), jnp.array([i]), jnp.float32(eps))[0] for i in range(steps - 1)])
        for masked, i in itertools.product((1, 5, 24, 61), range(steps - 1)):
            exact = masked * (1 - times[i + 1] / times[i])
            got = math.floor(np.float32(masked) * shares[i])
            assert got == math.floor(exact) or abs(exact - round(exact)) < 1e-4


def test_even_shares_sum_to_the_block():
    for tokens, steps in ((8, 3), (8, 8), (5, 4), (32, 20)):
        shares, left = [], tokens
        for step in range(steps):
            made = drafts(np.zeros(tokens), np.arange(tokens) < left)
            shares.append(int(decode.Quota(steps).choose(made, clock(step, left=left, tokens=tokens)).sum()))
            left -= shares[-1]
        assert sum(shares) == tokens and shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1


def test_confidences_and_counts():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 11)) * 3
    eligible = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1]], bool)
    token = jnp.array(logits.argmax(-1))
    made = Drafts(token, jnp.array(logits, jnp.float32), jnp.array(eligible), token,
                  jax.random.split(jax.random.key(0), (2, 5)), Sampler())
    for kind, measure in (("probability", decode.Probability()), ("margin", decode.Margin()),
                          ("entropy", decode.Entropy())):
        got = measure.of(made)
        want = np.array([[reference.sureness(x, x.argmax(), kind) for x in row] for row in logits])
        level = np.array([measure.level(x) for x in (-want if kind == "entropy" else want).ravel()]).reshape(2, 5)
        np.testing.assert_allclose(got, level, rtol=1e-5, atol=1e-6)
        place = np.asarray(places(got, jnp.array(eligible)))
        for row in range(2):
            inside = np.flatnonzero(eligible[row])
            order = sorted(inside, key=lambda c: -want[row, c])
            assert [place[row, c] for c in order] == list(range(len(inside)))


def test_the_factor_rule_counts_as_released():
    sure = np.array([0.99, 0.95, 0.9, 0.6, 0.1])
    for factor, keep in itertools.product((0.05, 0.2, 0.5, 1.0, 3.0), range(1, 6)):
        made = drafts(sure - 1, np.arange(5) < keep)
        got = int(decode.Factor(factor).choose(made, clock(left=keep)).sum())
        assert got == reference.factor_count(sure[:keep].tolist(), factor)


def test_confidences_near_one_keep_their_order():
    logits = np.zeros((1, 3, 8), np.float32)
    logits[0, :, 0] = [20.0, 20.5, 20.2]
    zero = jnp.zeros((1, 3), jnp.int32)
    got = decode.Probability().of(Drafts(zero, jnp.array(logits), zero == 0, zero, None, Sampler()))
    assert np.argsort(-np.asarray(got)[0]).tolist() == [1, 2, 0]


def test_thresholds_are_reached_at_equality_and_the_surest_always_stays():
    made = drafts(np.array([0.5, 0.25, 0.75]) - 1)
    chosen = lambda threshold: np.asarray(decode.Threshold(threshold).choose(made, clock(left=3)))[0].tolist()
    assert chosen(0.5) == [True, False, True] and chosen(0.500001) == chosen(0.9) == [False, False, True]
    assert np.asarray(decode.TopN(2).choose(made, clock(left=3)))[0].tolist() == [True, False, True]
    first = decode.FirstToken(decode.Threshold(0.5))
    assert np.asarray(first.choose(made, clock(0, left=3)))[0].tolist() == [True, False, False]
    assert np.asarray(first.choose(made, clock(1, left=3)))[0].tolist() == [True, False, True]


def test_noise_disturbs_the_order_by_its_temperature():
    """Of two drafts a gap apart, Gumbel noise of temperature T takes the other with probability 1/(1 + e^(gap/T))."""
    gap, many = 1.0, 4096
    sure = jnp.tile(jnp.array([[0.0, -gap]]), (many, 1))
    zero = jnp.zeros((many, 2), jnp.int32)
    made = Drafts(zero, jnp.zeros((many, 2, 2)), zero == 0, zero, jax.random.split(jax.random.key(1), (many, 2)),
                  Sampler(), decode.Probability(), sure, sure)
    now = Clock(zero[:, 0], zero[:, 0], zero[:, 0] + 2, zero[:, 0] + 2, 2)
    for temperature in (0.5, 2.0):
        swapped = float(decode.Noisy(decode.TopN(1), temperature).choose(made, now)[:, 1].mean())
        want = 1 / (1 + math.exp(gap / temperature))
        assert abs(swapped - want) < 4 * math.sqrt(want * (1 - want) / many)


@pytest.mark.parametrize("make, message", [
    (lambda: MaskedDiffusion(commit="best"), "commit = 'best': expected a CommitRule, such as Threshold"),
    (lambda: MaskedDiffusion(commit=0.9), "commit = 0.9: expected a CommitRule, such as Threshold"),
    (lambda: MaskedDiffusion(commit=decode.Threshold), "expected a CommitRule, such as Threshold"),
    (lambda: MaskedDiffusion(cache="lru"), "cache = 'lru': expected a CachePolicy"),
    (lambda: MaskedDiffusion(stop=None), "stop = None: expected a Stop"),
    (lambda: MaskedDiffusion(schedule=decode.Whole(), cache=decode.Dual()), "works block by block"),
    (lambda: MaskedDiffusion(commit=decode.Quota(), schedule=decode.Blocks(8, decode.Ahead())), "plans the steps"),
    (lambda: MaskedDiffusion(commit=decode.FirstToken(), schedule=decode.Blocks(8, decode.Ahead())), "plans the steps"),
    (lambda: MaskedDiffusion(cache=decode.BlockCausal(), schedule=decode.Blocks(8, decode.Ahead())), "hides later"),
    (lambda: MaskedDiffusion(commit=decode.Factor(), confidence=decode.Entropy()), "Factor bounds probabilities"),
    (lambda: MaskedDiffusion(commit=decode.Noisy(decode.Factor(), 0.1), confidence=decode.Entropy()), "bounds prob"),
    (lambda: MaskedDiffusion(confidence=decode.Random()), "commits at random"),
    (lambda: MaskedDiffusion(confidence=decode.Tempered(decode.Random())), "commits at random"),
    (lambda: MaskedDiffusion(schedule=decode.Whole(), stop=decode.AfterBlock()), "ends an answer after a block"),
    (lambda: decode.Blocks(2.5), "length = 2.5"),
    (lambda: decode.Blocks(0), "length = 0"),
    (lambda: MaskedDiffusion(commit=decode.Threshold(0.0)), "threshold = 0.0"),
    (lambda: MaskedDiffusion(commit=decode.Threshold(1.5)), "threshold = 1.5"),
    (lambda: decode.Threshold(float("nan")), "threshold = nan"),
    (lambda: decode.Threshold(float("inf")), "threshold = inf"),
    (lambda: decode.Threshold("high"), "threshold = 'high'"),
    (lambda: decode.Factor(0), "factor = 0"),
    (lambda: decode.Quota(-1), "steps = -1"),
    (lambda: decode.TopN(0), "n = 0"),
    (lambda: decode.Run(0), "length = 0"),
    (lambda: decode.Free(refresh_every=-1), "refresh_every = -1"),
    (lambda: decode.ClassifierFree(-1), "scale = -1"),
    (lambda: decode.Ahead(1.5), "add = 1.5"),
    (lambda: MaskedDiffusion(temperature=-1), "temperature = -1"),
    (lambda: MaskedDiffusion(top_p=0.0), "top_p = 0.0"),
    (lambda: decode.llada(remasking="high"), "remasking = 'high'"),
    (lambda: decode.dream(alg="best"), "alg = 'best'"),
    (lambda: decode.fast_dllm(factor=1.0), "give one"),
    (lambda: decode.fast_dllm(steps=8), "steps = 8 counts only where"),
    (lambda: decode.fast_dllm_dream(steps=8), r"steps = 8 with cache = Dual"),
    (lambda: decode.fast_dllm_dream(cache=decode.NoCache(), threshold=None), "see dream"),
])
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: decode.NoCache(refresh_every=2), lambda: decode.Threshold(steps=8),
                                  lambda: decode.BlockCausal(refresh_every=2), lambda: decode.Ancestral(threshold=1)])
def test_what_means_nothing_cannot_be_written(make):
    with pytest.raises(TypeError, match="unexpected keyword"):
        make()


def test_presets_are_points_of_the_product():
    assert decode.llada(steps=64, block_length=32) == MaskedDiffusion(
        schedule=decode.Blocks(32), commit=decode.Quota(64), stop=decode.Never())
    assert decode.dream(steps=8).commit == decode.Ancestral(8)
    assert decode.dream(steps=8, alg="entropy", alg_temp=0.2).commit == decode.Noisy(decode.Timesteps(8), 0.2)
    assert decode.fast_dllm(factor=1.0, threshold=None).commit == decode.Factor(1.0)
    assert decode.fast_dllm_dream(cache=decode.NoCache(), steps=8).commit == decode.Budget(0.9, 8)
    assert decode.free_cache(steps=8, block_length=8).cache == decode.free_cache_dream(steps=8, block_length=8).cache
    assert decode.llada(cfg_scale=1.5, temperature=0.5).guidance == decode.ClassifierFree(1.5)
    assert decode.d3llm(ahead=None).schedule == decode.Blocks(32)
