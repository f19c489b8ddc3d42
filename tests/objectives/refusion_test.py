"""ReFusion's corruption, arrangement and losses, as properties and on a hand-worked row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.objectives import ReFusion, losses, refusion

MASK = 19
MODEL = build.build(TransformerConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
PARAMS = jax.jit(build.init_params, static_argnums=0)(MODEL, jax.random.key(0))


def _batch(B=64, T=40, seed=0):
    rng = np.random.default_rng(seed)
    length = rng.integers(3, T + 1, B)
    prompt = np.minimum(rng.integers(1, T, B), length)  # some rows have no response
    return {
        "tokens": jnp.asarray(rng.integers(0, MASK, (B, T)), jnp.int32),
        "length": jnp.asarray(length, jnp.int32), "prompt_length": jnp.asarray(prompt, jnp.int32),
        "example_id": jnp.asarray(rng.permutation(1000)[:B], jnp.int32)}


def _objective(**changes):
    return ReFusion(**{"mask_id": MASK, "slot_sizes": (4, 8, 16)} | changes)


def _score(params=PARAMS):
    return MODEL.scorer(params)


def _slots(batch, corruption):
    return np.ceil((batch["length"] - batch["prompt_length"]) / corruption.slot_size).astype(int)


corrupt = jax.jit(refusion.corrupt, static_argnums=2)
arrange = jax.jit(refusion.arrange, static_argnums=2)


@pytest.mark.parametrize("masking", refusion.MASKINGS)
def test_corruption_draws_what_it_says(masking):
    batch, objective = _batch(B=512), _objective(masking=masking)
    drawn = corrupt(jax.random.key(6), batch, objective)  # of which a row has t = 0.0001, below the floor
    slots, size = _slots(batch, drawn), np.asarray(drawn.slot_size)
    assert set(size) == {4, 8, 16}
    np.testing.assert_allclose([np.mean(size == k) for k in (4, 8, 16)], 1 / 3, atol=0.08)
    for row in range(512):
        K, masked = slots[row], np.asarray(drawn.slot_masked[row])
        assert not masked[K:].any()
        clean = ~masked[:K]
        # the ranks of clean slots are a permutation
        assert sorted(np.asarray(drawn.slot_rank[row])[:K][clean]) == list(range(clean.sum()))
        if masking == "paper" and K:
            assert masked.sum() < K  # floor(tK), t below 1
            np.testing.assert_allclose(drawn.p_mask[row], masked.sum() / K, rtol=1e-6)
    if masking == "released":
        expected, actual = float(np.sum(drawn.p_mask * slots)), float(np.sum(drawn.slot_masked))
        spread = np.sqrt(np.sum(np.asarray(drawn.p_mask * (1 - drawn.p_mask)) * slots))
        assert abs(expected - actual) < 4 * spread
        assert 1e-3 <= drawn.p_mask.min() and drawn.p_mask.max() <= 1


def test_masked_slots_and_clean_orders_are_uniform():
    B, K = 4096, 4
    batch = {
        "tokens": jnp.zeros((B, 16), jnp.int32), "length": jnp.full(B, 16), "prompt_length": jnp.zeros(B, jnp.int32),
        "example_id": jnp.arange(B)}
    drawn = corrupt(jax.random.key(2), batch, _objective(slot_sizes=(4,)))
    counts = np.asarray(drawn.slot_masked).sum(1)
    # floor(4 t) is uniform on 0..3
    np.testing.assert_allclose(np.bincount(counts, minlength=4) / B, 0.25, atol=0.03)
    np.testing.assert_allclose(np.asarray(drawn.slot_masked).mean(0), 1.5 / K, atol=0.03)
    unmasked = counts == 0
    orders, frequency = np.unique(np.asarray(drawn.slot_rank)[unmasked], axis=0, return_counts=True)
    assert len(orders) == 24
    assert frequency.min() > 0.5 * unmasked.sum() / 24


def test_a_row_is_corrupted_alike_in_any_batch_and_differently_by_step():
    batch = _batch()
    whole = corrupt(jax.random.key(3), batch, _objective())
    part = jax.tree.map(lambda x: x[5:9][::-1], batch)
    np.testing.assert_array_equal(corrupt(jax.random.key(3), part, _objective()).slot_masked,
                                  np.asarray(whole.slot_masked)[5:9][::-1])
    assert (np.asarray(corrupt(jax.random.key(4), batch, _objective()).slot_masked) != whole.slot_masked).any()


@pytest.mark.parametrize("masking", refusion.MASKINGS)
def test_arrangement_properties(masking):
    batch, objective = _batch(), _objective(masking=masking)
    drawn = corrupt(jax.random.key(5), batch, objective)
    got = arrange(batch, drawn, MASK)
    tokens = np.asarray(batch["tokens"])
    for row in range(len(tokens)):
        prompt, length = int(batch["prompt_length"][row]), int(batch["length"][row])
        k, position = int(drawn.slot_size[row]), np.asarray(got.positions[row])
        mdm, ar, label = (np.asarray(x[row]) for x in (got.mdm_mask, got.ar_mask, got.labels))
        assert sorted(position) == list(range(len(position)))
        np.testing.assert_array_equal(position[:prompt], np.arange(prompt))
        np.testing.assert_array_equal(position[length:], np.arange(length, len(position)))
        np.testing.assert_array_equal(got.tokens[row], np.where(mdm, MASK, tokens[row][position]))
        # masked slots come last, in ascending position; they predict themselves, unshifted
        masked = np.flatnonzero(mdm)
        np.testing.assert_array_equal(masked, np.arange(length - len(masked), length))
        assert (np.diff(position[masked]) > 0).all()
        np.testing.assert_array_equal(label[masked], tokens[row][position[masked]])
        # clean tokens are whole slots, and predict the next token unless it starts another slot
        for place in range(prompt, length - len(masked)):
            here = position[place]
            following = here + 1 < length and (here + 1 - prompt) % k != 0
            assert ar[place] == following
            assert label[place] == (tokens[row][here + 1] if following else losses.IGNORE)
            if following:
                assert position[place + 1] == here + 1
        assert (label[:prompt] == losses.IGNORE).all() and (label[length:] == losses.IGNORE).all()
        np.testing.assert_array_equal(got.valid[row], np.arange(len(position)) < length)


def test_a_row_worked_by_hand():
    # prompt 10 11, slots (0 1 2) (3 4 5) (6 7), the second masked, the third first; one padding token
    batch = {"tokens": jnp.asarray([[10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 12]]), "prompt_length": jnp.asarray([2]),
             "length": jnp.asarray([10])}
    drawn = refusion.Corruption(
        jnp.asarray([3]), jnp.asarray([0.5]), jnp.asarray([[False, True, False]]), jnp.asarray([[1, 0, 0]]))
    got = refusion.arrange(batch, drawn, MASK)
    none = losses.IGNORE
    np.testing.assert_array_equal(got.tokens, [[10, 11, 6, 7, 0, 1, 2, MASK, MASK, MASK, 12]])
    np.testing.assert_array_equal(got.positions, [[0, 1, 8, 9, 2, 3, 4, 5, 6, 7, 10]])
    np.testing.assert_array_equal(got.labels, [[none, none, 7, none, 1, 2, none, 3, 4, 5, none]])
    nll = jnp.where(got.labels == none, 0.0, 2.0 ** jnp.arange(11))
    paper = refusion.reduce(nll, got, drawn, "paper")
    np.testing.assert_allclose(paper["ar"], (4 + 16 + 32) / ((3 - 1) * 2))
    np.testing.assert_allclose(paper["mdm"], (128 + 256 + 512) / (3 * 1))
    released = refusion.reduce(nll, got, drawn, "released")
    np.testing.assert_allclose(released["ar"], (4 + 16 + 32) / 3, rtol=1e-6)
    np.testing.assert_allclose(released["mdm"], (128 + 256 + 512) / 0.5 / 8, rtol=1e-6)


def test_weights_of_full_slots_sum_to_one_a_row():
    batch = _batch() | {"prompt_length": jnp.zeros(64, jnp.int32), "length": jnp.full(64, 32)}
    drawn = corrupt(jax.random.key(6), batch, _objective())
    got = arrange(batch, drawn, MASK)
    weight = refusion.weights(got, drawn)
    for term, slots in (("ar", got.clean_slots), ("mdm", got.masked_slots)):
        np.testing.assert_allclose(64 * weight[term].sum(1), np.asarray(slots > 0, np.float32), rtol=1e-5)


@functools.partial(jax.jit, static_argnums=3)
def _loss_and_gradient(params, batch, drawn, objective):
    """What the trainer sees of an explicit corruption."""
    original = refusion.corrupt
    try:
        refusion.corrupt = lambda *_: drawn
        return jax.value_and_grad(lambda p: objective.loss(_score(p), batch, jax.random.key(0))[0])(params)
    finally:
        refusion.corrupt = original


@pytest.mark.parametrize("normalisation", refusion.NORMALISATIONS)
@pytest.mark.parametrize("which", ["all masked", "none masked", "no response"])
def test_empty_sets_give_finite_loss_and_gradient(normalisation, which):
    batch = _batch(B=2, T=12) | {"prompt_length": jnp.asarray([2, 3]), "length": jnp.asarray([12, 10])}
    if which == "no response":
        batch["prompt_length"] = batch["length"]
    drawn = refusion.Corruption(
        jnp.asarray([4, 4]), jnp.ones(2), jnp.full((2, 3), which == "all masked"), jnp.tile(jnp.arange(3), (2, 1)))
    got = arrange(batch, drawn, MASK)
    nll = jnp.where(got.labels == losses.IGNORE, 0.0, 1.0)
    term = jax.jit(lambda n: refusion.reduce(n, got, drawn, normalisation))(nll)
    empty_ar = which in ("all masked", "no response")
    if normalisation == "released" and empty_ar:
        assert np.isnan(term["ar"])  # what the released code returns
    else:
        assert (term["ar"] == 0) == empty_ar
    assert (term["mdm"] == 0) == (which in ("none masked", "no response"))

    objective = _objective(slot_sizes=(4,), masking="released", normalisation=normalisation)
    value, gradient = _loss_and_gradient(PARAMS, batch, drawn, objective)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert (value == 0) == (which == "no response")


def test_lambda_weighs_the_denoising_term():
    batch = _batch(B=8)
    run = lambda weight: jax.jit(lambda p, b: _objective(mdm_weight=weight).loss(
        _score(p), b, jax.random.key(7)))(PARAMS, batch)
    (one, metrics), (half, _) = run(1.0), run(0.5)
    np.testing.assert_allclose(one - half, 0.5 * metrics["loss_mdm"], rtol=1e-5)
    np.testing.assert_allclose(one, metrics["loss_ar"] + metrics["loss_mdm"], rtol=1e-6)


def test_batch_size_and_slot_sizes_share_one_compilation():
    traces = []

    @jax.jit
    def loss(params, batch, key):
        traces.append(1)
        return _objective().loss(_score(params), batch, key)[0]

    for seed in range(4):
        loss(PARAMS, _batch(B=4, seed=seed), jax.random.key(seed))
    assert len(traces) == 1


@pytest.mark.parametrize("changes, message", [
    ({"mask_id": -1}, "mask_id = -1"), ({"slot_sizes": ()}, "slot_sizes"), ({"slot_sizes": (0, 4)}, "slot_sizes"),
    ({"masking": "token"}, "'token'.*paper.*released"), ({"normalisation": "mean"}, "'mean'.*paper.*released"),
    ({"mdm_weight": -1.0}, "mdm_weight"), ({"mdm_weight": float("nan")}, "mdm_weight"),
    ({"head_chunk": 0}, "head_chunk"),
])
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _objective(**changes)


def test_a_mask_id_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="mask_id is None"):
        _objective(mask_id=None).loss(_score(), _batch(B=2), jax.random.key(0))


def test_a_mask_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="mask_id = 20 lies outside the vocabulary of 20"):
        _objective(mask_id=20).loss(_score(), _batch(B=2), jax.random.key(0))
