"""Orthrus' objective against per-block loops over whole logits, its anchors, and rows too short for a block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build, convert
from dlm_jax.nn import visibility as vis
from dlm_jax.objectives import Orthrus, losses, orthrus
from dlm_jax.scoring import Pass
from tests.conftest import random_params, tiny_config

MASK = 96
MODEL = build.build(tiny_config("orthrus", num_layers=2, hidden_size=16, intermediate_size=24, mask_token_id=MASK))
PARAMS = random_params(MODEL)
T = 14


def _batch(lengths, seed=0, T=T):
    rng = np.random.default_rng(seed)
    length = np.asarray(lengths, np.int32)
    return {
        "tokens": jnp.asarray(rng.integers(3, MASK, (len(length), T)), jnp.int32), "length": jnp.asarray(length),
        "prompt_length": jnp.asarray(length // 2),
        "example_id": jnp.asarray(rng.permutation(1000)[: len(length)], jnp.int32)}


def _objective(**changes):
    return Orthrus(**{"mask_id": MASK, "block_size": 4, "blocks": 3, "head_chunk": 5} | changes)


def _score(params=PARAMS):
    return MODEL.scorer(params)


sample = jax.jit(orthrus.sample_anchors, static_argnums=2)


def _one_block(params, tokens, anchor, K):
    """Whole logits of the AR view at a..a+K-1, and of the diffusion view's block as decoding would run it."""
    score, index, none = _score(params), jnp.arange(T)[None], jnp.full((1, K), vis.NONE)
    teacher = jax.lax.dynamic_slice_in_dim(score(tokens[None])[0], anchor, K)
    # the clean tokens before the anchor, then the block, all of it visible
    causal = vis.by_rank(jnp.zeros_like(index), index, jnp.concatenate([index, none], axis=1))
    _, cache = score.hidden(tokens[None], Pass(index, causal, index), score.init_cache(1, T + K))
    rank = jnp.where(index < anchor, index, vis.NONE)
    rank = jnp.concatenate([rank, jnp.full((1, K), T)], axis=1)
    rule = vis.by_rank(jnp.zeros((1, K), jnp.int32), jnp.full((1, K), T), rank)
    block = jnp.where(jnp.arange(K) == 0, tokens[anchor], MASK)[None]
    hidden, _ = score.view("diffusion").hidden(
        block, Pass(anchor + jnp.arange(K)[None], rule, T + jnp.arange(K)[None]), jax.lax.stop_gradient(cache))
    return jax.lax.stop_gradient(teacher), score.head(hidden)[0]


def _reference(diffusion, batch, anchors, objective):
    """The loss of Sec. 3.2, every block by itself, offset by offset."""
    params = {**PARAMS, "layers": {**PARAMS["layers"], "attention_diffusion": diffusion}}
    row, start = np.nonzero(anchors >= 0)[0], anchors[anchors >= 0]
    teacher, student = jax.vmap(lambda tokens, anchor: _one_block(params, tokens, anchor, objective.block_size))(
        batch["tokens"][row], start)
    every_log_p, every_log_q = (jax.nn.log_softmax(x / objective.temperature) for x in (teacher, student))
    every_p, same = jnp.exp(every_log_p), (jnp.argmax(teacher, -1) == jnp.argmax(student, -1)).astype(float)
    terms, agreement, overlap = [], [], []
    for i in range(objective.offsets):
        ahead, block = start + i + 1, np.arange(len(start))
        if objective.distance == "cross_entropy":  # where the row ends there is no next token
            block = block[ahead < np.asarray(batch["length"])[row]]
        p, log_p, log_q = every_p[block, i], every_log_p[block, i], every_log_q[block, i]
        if objective.distance == "kl":
            terms.append(jnp.sum(p * (log_p - log_q), -1))
        elif objective.distance == "top_k_kl":
            top = jnp.argsort(-p, axis=-1)[:, : objective.top_k]
            p, log_q = jnp.take_along_axis(p, top, -1), jnp.take_along_axis(log_q, top, -1)
            kept = p / jnp.sum(p, -1, keepdims=True)
            terms.append(jnp.sum(kept * (jnp.log(kept) - log_q), -1))
        else:
            terms.append(-log_q[np.arange(len(block)), batch["tokens"][row[block], ahead[block]]])
        agreement.append(same[block, i])
        overlap.append(jnp.sum(jnp.minimum(every_p, jnp.exp(every_log_q))[block, i], -1))
    runs = jnp.sum(jnp.cumprod(same[:, : objective.block_size - 1], axis=1), axis=1)
    measures = {"agreement": jnp.mean(jnp.concatenate(agreement)), "accepted": jnp.mean(runs),
                "overlap": jnp.mean(jnp.concatenate(overlap))}
    measures |= {f"agreement_{n}": jnp.mean(same[:, n - 1]) for n in (1, 2, 4) if n < objective.block_size}
    return jnp.mean(jnp.concatenate(terms)), measures


@functools.partial(jax.jit, static_argnums=3)
def _loss_and_gradient(params, batch, key, objective):
    return jax.value_and_grad(lambda p: objective.loss(_score(p), batch, key), has_aux=True)(params)


@pytest.mark.parametrize("seed, changes", [
    (0, {}), (1, {"block_size": 6, "distance": "top_k_kl", "top_k": 3, "blocks": 20, "temperature": 2.0}),
    (1, {"block_size": 2, "distance": "cross_entropy", "last_offset": True, "head_chunk": 512})])
def test_the_loss_is_that_of_plain_loops_in_value_and_gradient(seed, changes):
    objective, key = _objective(**changes), jax.random.key(seed)
    batch = _batch([T, 1 + seed, np.random.default_rng(seed).integers(7, T)], seed)  # a whole row, one without room
    anchors = np.asarray(sample(key, batch, objective))
    reference = jax.jit(lambda diffusion: jax.value_and_grad(_reference, has_aux=True)(
        diffusion, batch, anchors, objective))
    (want, measures), slope = reference(PARAMS["layers"]["attention_diffusion"])
    (got, metrics), gradient = _loss_and_gradient(PARAMS, batch, key, objective)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    for name, value in measures.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert metrics["blocks"] == np.sum(anchors >= 0)
    assert metrics["skipped_rows"] == (seed + 1 < objective.block_size)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
                 gradient["layers"].pop("attention_diffusion"), slope)


def test_the_teacher_the_clean_keys_and_the_head_are_constants():
    _, gradient = _loss_and_gradient(PARAMS, _batch([T, T, 9]), jax.random.key(0), _objective())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        assert not np.any(gradient["layers"]["attention"][name]), name
        assert np.any(gradient["layers"]["attention_diffusion"][name]), name
    assert not np.any(gradient["lm_head"])


def test_pieces_of_the_head_change_nothing():
    batch, key = _batch([T, 9, 2]), jax.random.key(1)
    (one, metrics), gradient = _loss_and_gradient(PARAMS, batch, key, _objective(head_chunk=1))
    (whole, same), other = _loss_and_gradient(PARAMS, batch, key, _objective())
    np.testing.assert_allclose(one, whole, rtol=1e-6)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], same[name], rtol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, other)


def test_the_teacher_is_the_autoregressive_model():
    model = build.build(tiny_config(num_layers=2))
    params = random_params(model)
    dual, both = convert.init_from_ar(model, params, mask_id=MASK)
    objective, batch = _objective(), _batch([T])
    rows = orthrus.arrange(batch, jnp.asarray([[2, 7]]), objective)
    hidden, teacher = jax.jit(lambda p: orthrus.views(dual.scorer(p), rows, objective))(both)
    score = model.scorer(params)
    assert hidden.shape == (1, 8, 32)
    np.testing.assert_allclose(*jax.jit(lambda h, t: (score.head(h), score(t)))(teacher, batch["tokens"]), atol=1e-5)


@pytest.mark.parametrize("where", orthrus.ANCHORS)
def test_anchors_fit_differ_and_ascend(where):
    lengths = np.random.default_rng(3).integers(1, T + 1, 64)
    batch, objective = _batch(lengths), _objective(anchors=where, blocks=6)
    drawn = np.asarray(sample(jax.random.key(3), batch, objective))
    assert drawn.shape == (64, 6) and drawn.dtype == np.int32
    for row, length, prompt in zip(drawn, lengths, np.asarray(batch["prompt_length"])):
        first = prompt if where == "response" else 0
        used = row[row >= 0]
        assert len(used) == min(6, max(0, length - objective.block_size - first + 1))
        assert (np.diff(used) > 0).all() and (row[len(used):] == -1).all()
        assert (used >= first).all() and (used + objective.block_size <= length).all()
    assert 0 < (drawn[:, 0] < 0).sum() < 64


def test_anchors_are_uniform():
    batch = _batch(np.full(4096, T)) | {"example_id": jnp.arange(4096)}
    drawn = np.asarray(sample(jax.random.key(4), batch, _objective(blocks=2)))
    possible = T - 4 + 1
    counts = np.bincount(drawn.ravel(), minlength=possible)
    expected = drawn.size / possible
    assert len(counts) == possible and np.sum((counts - expected) ** 2 / expected) < 29.6  # chi-square, 10: p = 0.001


def test_anchors_follow_the_example_and_the_step_not_the_batch():
    batch = _batch(np.random.default_rng(5).integers(6, T + 1, 16))
    whole = np.asarray(sample(jax.random.key(5), batch, _objective()))
    part = jax.tree.map(lambda x: x[5:9][::-1], batch)
    np.testing.assert_array_equal(sample(jax.random.key(5), part, _objective()), whole[5:9][::-1])
    assert (np.asarray(sample(jax.random.key(6), batch, _objective())) != whole).any()


def test_a_row_worked_by_hand():
    batch = {"tokens": jnp.asarray([[10, 11, 12, 13, 14, 15, 0]]), "length": jnp.asarray([6])}
    got = orthrus.arrange(batch, jnp.asarray([[0, 3, -1]]), _objective(block_size=3, last_offset=True))
    np.testing.assert_array_equal(got.blocks, [[10, MASK, MASK, 13, MASK, MASK, 10, MASK, MASK]])
    np.testing.assert_array_equal(got.positions, [[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    np.testing.assert_array_equal(got.limit, [[-1, -1, -1, 2, 2, 2, -1, -1, -1]])
    np.testing.assert_array_equal(got.labels[0, :2], [[11, 12, 13], [14, 15, losses.IGNORE]])
    np.testing.assert_allclose(got.weights[0], np.asarray([[1, 1, 1], [1, 1, 1], [0, 0, 0]]) / 6)
    np.testing.assert_allclose(got.share, [[0.5, 0.5, 0]])
    hard = orthrus.arrange(batch, jnp.asarray([[0, 3, -1]]), _objective(
        block_size=3, last_offset=True, distance="cross_entropy"))
    np.testing.assert_allclose(hard.weights[0], np.asarray([[1, 1, 1], [1, 1, 0], [0, 0, 0]]) / 5, rtol=1e-6)


def test_rows_too_short_for_a_block_are_counted_and_without_effect():
    batch, key = _batch([T, 3, 9]), jax.random.key(7)
    (value, metrics), gradient = _loss_and_gradient(PARAMS, batch, key, _objective())
    batch["tokens"] = batch["tokens"].at[1].set(5)
    (same, _), other = _loss_and_gradient(PARAMS, batch, key, _objective())
    assert metrics["skipped_rows"] == 1 and metrics["blocks"] == 6 and value == same
    jax.tree.map(np.testing.assert_array_equal, gradient, other)


def test_a_batch_of_short_rows_alone_has_loss_and_gradient_zero():
    (value, metrics), gradient = _loss_and_gradient(PARAMS, _batch([3, 1, 2]), jax.random.key(8), _objective())
    assert value == 0 and metrics["skipped_rows"] == 3 and metrics["blocks"] == 0
    assert all(not np.any(g) for g in jax.tree.leaves(gradient))


def test_padding_is_never_read():
    batch, key = _batch([9, 11, 2]), jax.random.key(9)
    garbage = jnp.where(jnp.arange(T) < batch["length"][:, None], batch["tokens"], 5)
    (one, _), _ = _loss_and_gradient(PARAMS, batch, key, _objective())
    (other, _), _ = _loss_and_gradient(PARAMS, batch | {"tokens": garbage}, key, _objective())
    assert one == other


@pytest.mark.parametrize("changes, message", [
    ({"mask_id": -1}, "mask_id = -1"), ({"block_size": 1}, "block_size = 1: expected at least 2"),
    ({"anchors": "prompt"}, "'prompt'.*sequence.*response"),
    ({"distance": "mse"}, "'mse'.*kl.*top_k_kl.*cross_entropy"),
    ({"temperature": 0.0}, "temperature = 0.0"), ({"temperature": float("nan")}, "temperature = nan"),
    ({"blocks": 0}, "blocks = 0"), ({"top_k": 0}, "top_k = 0"), ({"head_chunk": 0}, "head_chunk = 0")])
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _objective(**changes)


@pytest.mark.parametrize("changes, message", [
    ({"mask_id": None}, "mask_id is None"), ({"mask_id": 97}, "mask_id = 97 lies outside the vocabulary of 97"),
    ({"block_size": 15}, "rows of 14 tokens have no room for blocks of block_size = 15"),
    ({"distance": "top_k_kl", "top_k": 98}, "top_k = 98 exceeds the vocabulary of 97")])
def test_what_cannot_be_trained_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _objective(**changes).loss(_score(), _batch([T]), jax.random.key(0))


def test_a_model_without_a_second_view_is_refused():
    model = build.build(tiny_config())
    with pytest.raises(ValueError, match="no diffusion view.*to-orthrus"):
        _objective().loss(model.scorer(random_params(model)), _batch([T]), jax.random.key(0))
