"""Masked diffusion against a plain dense reference, with and without shift, and its degenerate rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build
from dlm_jax.objectives import MaskedDiffusion, losses, masked_diffusion, noise
from tests.conftest import random_params, tiny_config
from tests.objectives import dense
from tests.objectives.dense import Spelled

MASK, EOS = 19, 1
SIZES = dict(vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
MODELS = {name: build.build(tiny_config(family, **SIZES))
          for name, family in (("llada", "llada"), ("dream", "Dream"), ("causal", "qwen3"))}
PARAMS = {name: random_params(model) for name, model in MODELS.items()}


def make_batch(B=4, T=10, seed=0):
    rng = np.random.default_rng(seed)
    length = np.concatenate([[T - 1], rng.integers(3, T, B - 1)])  # one column that no row reaches
    prompt = np.minimum(rng.integers(1, T, B), length)
    index = np.arange(T)
    return {
        "tokens": jnp.asarray(np.where(index < length[:, None], rng.integers(2, MASK, (B, T)), 0), jnp.int32),
        "loss_mask": jnp.asarray((prompt[:, None] <= index) & (index < length[:, None])),
        "length": jnp.asarray(length, jnp.int32), "prompt_length": jnp.asarray(prompt, jnp.int32),
        "example_id": jnp.asarray(rng.permutation(10_000)[:B], jnp.int32)}


def make_objective(**changes):
    return MaskedDiffusion(**{"mask_id": MASK, "eos_id": EOS, "head_chunk": 4} | changes)


def reference(name, batch, drawn, objective):
    """LLaDA's loss, row by row and token by token."""
    tokens, B, shift = np.array(batch["tokens"]), len(batch["tokens"]), MODELS[name].config.shift
    longest, rows = int(max(batch["length"])), []
    for row in range(B):
        end = int(batch["length"][row])
        start = int(batch["prompt_length"][row]) if objective.target == "response" else 0
        if objective.padding == "eos":
            tokens[row, end:longest] = EOS
            end = longest
        rows.append((start, end, [i for i in range(start, end) if drawn.uniform[row, i] < drawn.time[row, i]]))
    taught, spelled = sum(end - start for start, end, _ in rows), Spelled(tokens.shape[1])
    for row, (start, end, masked) in enumerate(rows):
        noisy = tokens[row, :end].copy()
        noisy[masked] = MASK
        here = spelled.forward(noisy, np.ones((end, end)))
        for i in masked:
            share = {"sequence": B * (end - start), "token": taught, "batch": B}[objective.normalisation]
            spelled.predict(here, max(i - shift, 0), tokens[row, i], 1 / float(drawn.time[row, i]) / share)
    return spelled


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_gradient(name, params, rows, objective):
    f = lambda p: objective.rows_loss(MODELS[name].scorer(p), rows)[0]
    return jax.value_and_grad(f)(params)


def prepared(batch, objective, seed=3):
    drawn = noise.draw(jax.random.key(seed), batch["example_id"], batch["tokens"].shape[1], (objective.eps, 1.0))
    return drawn, objective.prepare(batch, jax.random.key(seed))


@pytest.mark.parametrize("name, changes", [
    ("llada", {}), ("dream", {}), ("llada", dict(target="all", padding="ignore")),
    ("dream", dict(padding="ignore", normalisation="token")), ("llada", dict(normalisation="batch", eps=0.5)),
], ids=["llada-sft", "dream-sft", "llada-pretraining", "dream-token", "llada-batch"])
def test_loss_and_gradient_are_those_of_the_reference(name, changes):
    batch, objective = make_batch(), make_objective(**changes)
    drawn, rows = prepared(batch, objective)
    assert 0 < jnp.sum(rows.labels != losses.IGNORE) < jnp.sum(rows.valid)
    want, gradient = reference(name, batch, drawn, objective).value_and_gradient(MODELS[name], PARAMS[name])
    got, mine = value_and_gradient(name, PARAMS[name], rows, objective)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(want)), mine, gradient)


def test_the_masked_share_follows_t_and_the_prompt_is_never_masked():
    batch = make_batch(B=512, T=40)
    drawn, rows = prepared(batch, make_objective())
    masked, index = np.asarray(rows.labels) != losses.IGNORE, np.arange(40)
    np.testing.assert_array_equal(rows.tokens, np.where(masked, MASK, np.where(
        (index >= np.asarray(batch["length"])[:, None]) & np.asarray(rows.valid), EOS, batch["tokens"])))
    in_answer = (index >= np.asarray(batch["prompt_length"])[:, None]) & np.asarray(rows.valid)
    assert not masked[~in_answer].any()
    p = np.asarray(drawn.time)[in_answer]
    assert abs(masked.sum() - p.sum()) < 4 * np.sqrt(np.sum(p * (1 - p)))
    # E[1 / p over masked tokens] is the number of tokens: every row's weights have mean 1 / B
    wide = prepared(make_batch(B=4096, T=40), make_objective(eps=0.2))[1]
    np.testing.assert_allclose(np.sum(wide.weights["mdm"]), 1, atol=0.05)


def test_blocks_of_a_response_are_learned_as_they_are_decoded():
    """The input is what a decoder has in front of it in the middle of a block, and the loss is of that block alone."""
    batch, objective = make_batch(B=64, T=40), make_objective(block_length=8)
    drawn, rows = prepared(batch, objective)
    labels, T = np.asarray(rows.labels), 40
    for row, (start, tokens) in enumerate(zip(np.asarray(batch["prompt_length"]), np.asarray(rows.tokens))):
        answer = np.flatnonzero(np.asarray(rows.valid)[row] & (np.arange(T) >= start))
        clean = np.where(answer < int(batch["length"][row]), np.asarray(batch["tokens"])[row, answer], EOS)
        masked, predicted = tokens[answer] == MASK, labels[row, answer] != losses.IGNORE
        np.testing.assert_array_equal(labels[row, answer][predicted], clean[predicted])
        np.testing.assert_array_equal(tokens[answer][~masked], clean[~masked])
        assert (tokens[:start] != MASK).all()
        if predicted.any():
            block = np.flatnonzero(predicted)[0] // 8
            assert np.flatnonzero(predicted)[-1] // 8 == block
            assert masked[(block + 1) * 8:].all() and not masked[:block * 8].any()
    assert (labels != losses.IGNORE).any(axis=1).mean() > 0.5
    # weights: 1 / p within the block, rows by their blocks' tokens
    wide = prepared(make_batch(B=4096, T=40), make_objective(block_length=8, eps=0.2))[1]
    np.testing.assert_allclose(np.sum(wide.weights["mdm"]), 1, atol=0.05)


@pytest.mark.parametrize("which", dense.DEGENERATE)
def test_degenerate_rows_have_finite_loss_and_gradient(which):
    objective, batch = make_objective(padding="ignore"), make_batch()
    dense.check_degenerate(which, batch, objective, lambda rows, drawn: value_and_gradient(
        "llada", PARAMS["llada"], masked_diffusion.arrange(rows, drawn, objective), objective))


@pytest.mark.parametrize("changes", [{}, dict(block_length=3)])
def test_a_row_is_corrupted_alike_in_any_batch(changes):
    batch, objective = make_batch(B=16), make_objective(padding="ignore", normalisation="batch", **changes)
    whole = objective.prepare(batch, jax.random.key(0))
    part = objective.prepare(jax.tree.map(lambda x: x[5:9][::-1], batch), jax.random.key(0))
    np.testing.assert_array_equal(part.tokens, whole.tokens[5:9][::-1])
    np.testing.assert_allclose(part.weights["mdm"], 4 * whole.weights["mdm"][5:9][::-1], rtol=1e-6)


def test_which_block_is_learned_does_not_follow_longer_rows():
    """Ends of sequence fill a row to its longest neighbour; blocks of nothing else are not drawn."""
    batch, objective = make_batch(B=64, T=40), make_objective(block_length=3)
    rows = objective.prepare(batch, jax.random.key(0))
    chosen = np.asarray(batch["length"]) < 20
    short = jax.tree.map(lambda x: x[chosen], batch)
    alone = objective.prepare(short, jax.random.key(0))
    own = np.arange(40) < np.asarray(short["length"])[:, None]
    np.testing.assert_array_equal(np.where(own, alone.labels, 0), np.where(own, rows.labels[chosen], 0))
    assert (np.asarray(rows.labels)[chosen] != losses.IGNORE).any()


def test_antithetic_times_make_batches_more_alike():
    batch, prepare = make_batch(B=16, T=24), jax.jit(MaskedDiffusion.prepare, static_argnums=0)
    objective = make_objective(target="all", padding="eos")  # rows of one length
    masked = lambda seed, **changes: int(jnp.sum(
        prepare(dataclasses.replace(objective, **changes), batch, jax.random.key(seed)).labels != losses.IGNORE))
    plain, even = (np.array([masked(seed, antithetic=a) for seed in range(60)]) for a in (False, True))
    assert even.std() < 0.6 * plain.std()
    assert abs(even.mean() - plain.mean()) < 3 * plain.std() / np.sqrt(60)


def test_random_lengths_cut_the_share_of_rows_that_is_asked_for():
    batch = make_batch(B=2048, T=40)
    batch |= {"length": jnp.full(2048, 40)}
    rows = make_objective(target="all", padding="ignore", random_length=0.5).prepare(batch, jax.random.key(0))
    length = np.asarray(rows.valid).sum(1)
    np.testing.assert_allclose(np.mean(length < 40), 0.5 * 39 / 40, atol=0.04)
    assert length.min() >= 1
    np.testing.assert_allclose(np.mean(length[length < 40]), 20, atol=1.5)


def test_random_canvases_end_between_a_row_and_the_batch():
    batch = make_batch(B=2048, T=40)
    batch |= {"length": jnp.full(2048, 10).at[0].set(20)}
    rows = make_objective(random_canvas=0.5).prepare(batch, jax.random.key(0))
    length = np.asarray(rows.valid).sum(1)
    np.testing.assert_allclose(np.mean(length != 20), 0.5 * 30 / 31, atol=0.04)
    assert (length.min(), length.max()) == (10, 40) and 20 <= length[0]
    np.testing.assert_allclose(np.mean(length[length != 20]), 25, atol=1.5)
    filled = np.arange(40) >= np.asarray(batch["length"])[:, None]
    tokens, labels = np.asarray(rows.tokens), np.asarray(rows.labels)
    assert np.isin(np.where(labels != losses.IGNORE, labels, tokens)[filled & np.asarray(rows.valid)], EOS).all()


def test_a_causal_model_is_refused_with_the_fix():
    score = MODELS["causal"].scorer(PARAMS["causal"])
    with pytest.raises(ValueError, match="'masked_diffusion' needs a bidirectional model.*to-diffusion"):
        make_objective().loss(score, make_batch(), jax.random.key(0))


@pytest.mark.parametrize("changes, message", [
    (dict(mask_id=-1), "mask_id = -1"), (dict(eos_id=-2), "eos_id = -2"), (dict(eos_id=MASK), "mask_id = eos_id = 19"),
    (dict(target="prompt"), "'prompt'.*response.*all"), (dict(padding="zero"), "'zero'.*eos.*ignore"),
    (dict(eps=0.0), "eps = 0.0"), (dict(eps=1.5), "eps = 1.5"), (dict(normalisation="mean"), "'mean'.*sequence"),
    (dict(block_length=-1), "block_length = -1"), (dict(block_length=2.5), "block_length = 2.5"),
    (dict(random_length=2.0), "random_length = 2.0"), (dict(random_length=0.1), "target 'all' and padding 'ignore'"),
    (dict(random_canvas=-0.5), "random_canvas = -0.5"), (dict(random_canvas=1.0, padding="ignore"), "padding 'eos'"),
    (dict(random_canvas=1.0, block_length=4), "block_length 0, not 'eos' and 4"),
    (dict(head_chunk=0), "head_chunk = 0"),
])
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_objective(**changes)


@pytest.mark.parametrize("changes, message", [
    (dict(mask_id=None), "mask_id is None"), (dict(eos_id=None), "eos_id is None.*padding='ignore'"),
    (dict(mask_id=20), "mask_id = 20 lies outside the vocabulary of 20"), (dict(eos_id=25), "eos_id = 25 lies outside"),
])
def test_ids_that_are_missing_or_outside_the_vocabulary_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_objective(**changes).loss(MODELS["llada"].scorer(PARAMS["llada"]), make_batch(), jax.random.key(0))
