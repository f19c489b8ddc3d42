"""FLARE's streams and losses: leaks, the slow way block by block, masks, the ablation family and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.models import build
from dlm_jax.nn import gated_delta
from dlm_jax.nn import visibility as vis
from dlm_jax.objectives import Autoregressive, Flare, flare, losses
from dlm_jax.scoring import Pass, Window
from tests.conftest import random_params, tiny_config
from tests.models.hybrids import hybrid_config
from tests.objectives import packs

MASK, K, T = 96, 4, 24
MODELS = {"dense": build.build(tiny_config(num_layers=2)),
          "hybrid": build.build(hybrid_config(pattern=("gated_delta", "attention"), num_layers=2))}
PARAMS_OF = {name: random_params(model) for name, model in MODELS.items()}
MODEL, PARAMS = MODELS["dense"], PARAMS_OF["dense"]
# a document with a part of a last block, one without prompt, one that is all prompt but a token
SIZES = [(3, 4), (0, 4), (4, 1)]
ROWS = [list(zip((5, 8, 2), packs.documents(SIZES, MASK)))]
BATCH = packs.packed(ROWS, T, 4, align=K)
LENGTHS, STARTS = [7, 4, 5], [0, 8, 12]


def make(name="flare", **changes):
    return flare.variant(name, **{"mask_id": MASK, "block_size": K, "head_chunk": 16} | changes)


def sees(objective, query, key):
    """Whether one token of the streams sees another, from the words of the paper."""
    (one, i), (other, j) = divmod(query, T), divmod(key, T)
    document = lambda t: max(d for d, start in enumerate(STARTS) if start <= t) if t < 20 else None
    if document(i) is None or document(i) != document(j):
        return False
    start = i // K * K
    if other == 0:
        last = start - 1 if one else i if objective.context == "causal" else start + K - 1
        return j <= last
    last = i if objective.inside == "causal" else start + K - 1
    return one == other and start <= j <= last


@functools.cache
def logits_of_perturbed(objective, backbone="dense"):
    """Logits of the packed row's streams, and of the same with one token changed, for every token."""
    tokens, told = flare.streams(jax.jit(objective.prepare)(BATCH, jax.random.key(3)), objective)
    tokens = np.tile(np.asarray(tokens), (1 + tokens.shape[1], 1))
    changed = np.arange(tokens.shape[1])
    tokens[1 + changed, changed] = (tokens[1 + changed, changed] + 7) % MASK
    rows = lambda x: jnp.tile(x, (len(tokens), 1))
    told = told.replace(positions=rows(told.positions),
                        recurrence=told.recurrence.replace(documents=rows(told.recurrence.documents)))
    run = lambda params, tokens: logits(MODELS[backbone].scorer(params), tokens, told)
    return np.asarray(jax.jit(run)(PARAMS_OF[backbone], jnp.asarray(tokens)))


def logits(score, tokens, told):
    return score.head(score.hidden(tokens, told)[0])


@pytest.mark.parametrize("backbone, name", [
    ("dense", "flare"), ("dense", "am_causal"), ("dense", "block_diffusion"), ("hybrid", "flare"),
    ("hybrid", "am_causal")])
def test_a_changed_token_changes_what_may_see_it_and_nothing_else(backbone, name):
    objective = make(name)
    first, *others = logits_of_perturbed(objective, backbone)
    moved = np.stack([np.abs(first - other).max(-1) > 0 for other in others], axis=1)
    n = len(first)
    want = np.array([[i == j or sees(objective, i, j) for j in range(n)] for i in range(n)])
    real = np.arange(n) % T < 20  # what padding makes of padding is nobody's
    np.testing.assert_array_equal(moved[real], want[real])


def block_by_block(objective, rows):
    """The streams the slow way: each block alone after its document's clean tokens before it.

    Returns:
      Tokens and what a pass is told; for each row where its block stands in the streams and in the row, and its size.
    """
    passes, places = [], []
    masked = np.asarray(rows.masked[0])
    tokens = np.asarray(rows.tokens[0])
    for start, size in zip(STARTS, LENGTHS):
        end = start + -(-size // K) * K
        for begin in range(start, end, K):
            for view in range(-1, objective.views):  # -1: the clean block
                block = tokens[begin : begin + K]
                block = block if view < 0 else np.where(masked[begin : begin + K, view], MASK, block)
                seen = np.concatenate([tokens[start:begin], block])
                index = np.arange(len(seen))
                mask = index[None] <= index[:, None]
                if view >= 0 and objective.inside == "bidirectional":
                    mask = mask | (index[:, None] >= begin - start)
                passes.append((np.pad(seen, (0, T - len(seen))), np.pad(mask, (0, T - len(seen)))))
                places.append(((view + 1) * T + begin, begin - start, len(block)))
    tokens, masks = (jnp.asarray(np.stack(x)) for x in zip(*passes))
    noisy = np.asarray([at >= T and objective.inside == "bidirectional" for at, _, _ in places])
    begin, size = np.asarray([place[1:] for place in places], np.int32).T
    window = Window(jnp.asarray(np.where(noisy, begin, begin + size)), jnp.asarray(np.where(noisy, size, 0)))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
    return tokens, Pass(positions, masks, recurrence=window), places


@pytest.mark.parametrize("backbone, name, chunk", [
    ("dense", "flare", 64), ("dense", "am_causal", 64), ("hybrid", "flare", 64), ("hybrid", "am_causal", 64),
    ("hybrid", "flare", 8)])  # chunks end inside documents, too
def test_the_streams_are_every_block_alone_after_its_clean_prefix(backbone, name, chunk, monkeypatch):
    monkeypatch.setattr(gated_delta, "CHUNK", chunk)
    objective, params = make(name), PARAMS_OF[backbone]
    rows = jax.jit(objective.prepare)(BATCH, jax.random.key(3))
    run = jax.jit(lambda params, tokens, told: logits(MODELS[backbone].scorer(params), tokens, told))
    fast = run(params, *flare.streams(rows, objective))[0]
    tokens, told, places = block_by_block(objective, rows)
    slow = run(params, tokens, told)
    for row, (at, begin, size) in enumerate(places):
        np.testing.assert_allclose(fast[at : at + size], slow[row, begin : begin + size], rtol=1e-4, atol=1e-4)


def spelled(objective, rows, logits):
    """The loss as a loop over the response's tokens, of (streams, T, V) logits."""
    logp = np.asarray(jax.nn.log_softmax(logits), np.float64)
    tokens, masked = np.asarray(rows.tokens[0]), np.asarray(rows.masked[0])
    terms = dict.fromkeys(rows.weights, 0.0)
    response = [(start + i, i) for start, (prompt, size) in zip(STARTS, SIZES) for i in range(prompt, prompt + size)]
    for at, inside in response:
        if objective.ntp and inside:
            terms["ar"] -= logp[0, at - 1, tokens[at]]
        for view in range(objective.views):
            stream, row = view + 1, at if objective.shift == "none" else at - 1
            if inside % K == 0 and objective.shift == "clean_boundary":
                stream = 0
            left_out = objective.shift != "none" and not inside or objective.shift == "in_block" and inside % K == 0
            if masked[at, view] and not left_out:
                terms[f"diff{view + 1}"] -= logp[stream, row, tokens[at]]
    return {name: term / len(response) for name, term in terms.items()}


@pytest.mark.parametrize("shift", flare.SHIFTS)
@pytest.mark.parametrize("name", ["flare", "am_bidir"])
def test_the_loss_is_the_sum_over_the_response(name, shift):
    objective = make(name, shift=shift)
    rows = jax.jit(objective.prepare)(BATCH, jax.random.key(3))
    assert np.asarray(rows.masked).any((0, 1)).all()
    logits = logits_of_perturbed(make(name))[0].reshape(1 + objective.views, T, -1)
    want = spelled(objective, rows, logits)
    total, metrics = jax.jit(lambda p: objective.rows_loss(MODEL.scorer(p), rows))(PARAMS)
    for term, value in want.items():
        np.testing.assert_allclose(metrics[f"loss_{term}"], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total, sum(want.values()), rtol=1e-4)
    np.testing.assert_allclose(metrics["masked_share"], np.asarray(rows.masked)[..., 0].sum() / 9, rtol=1e-6)


def test_a_mean_over_predictions_counts_them():
    rows = make(normalisation="predictions", shift="in_block").prepare(BATCH, jax.random.key(0))
    weights = np.stack(list(rows.weights.values()))
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
    assert len(np.unique(weights)) == 2 and (weights > 0).sum() == 8 + 6


@pytest.mark.parametrize("backbone", MODELS)
def test_no_gradient_crosses_a_document(backbone):
    # every document has ids of its own, so the embedding's rows tell whose gradient they got
    ids = [list(range(10 * n, 10 * n + a + b)) for n, (a, b) in enumerate(SIZES, 1)]
    batch = packs.packed([[(n, (x[:a], x[a:])) for n, (x, (a, b)) in enumerate(zip(ids, SIZES))]], T, 4, K)
    objective = make()
    rows = jax.jit(objective.prepare)(batch, jax.random.key(3))

    @jax.jit
    def gradient(document):
        only = jax.tree.map(lambda w: jnp.where(rows.documents == document, w, 0.0), rows.weights)
        model, params = MODELS[backbone], PARAMS_OF[backbone]
        loss = lambda embed: objective.rows_loss(model.scorer(params | {"embed": embed}), rows.replace(weights=only))
        return jax.grad(lambda embed: loss(embed)[0])(params["embed"])

    for number, mine in enumerate(ids):
        moved = np.abs(np.asarray(gradient(number))).max(-1) > 0
        of_others = [i for other in ids if other is not mine for i in other]
        assert moved[mine[:-1]].all() and not moved[of_others].any()


def _many(documents=512, length=64, prompt=0):
    return {"tokens": jnp.full((documents, length), 5, jnp.int32), "loss_mask": jnp.ones((documents, length), bool),
            "length": jnp.full(documents, length), "example_id": jnp.arange(documents)}


@pytest.mark.parametrize("antithetic", [True, False])
def test_masks_are_complementary_and_of_the_right_law(antithetic):
    objective = make(antithetic=antithetic)
    rows = jax.jit(objective.prepare)(_many(), jax.random.key(0))
    one, other = np.moveaxis(np.asarray(rows.masked), -1, 0)
    np.testing.assert_array_equal(one, ~other)
    # with a uniform time a block of K tokens has 0, 1, ... K masks with equal probability, whichever block it is
    counts = one.reshape(512, 16, K).sum(-1)
    for block in (0, 7, 15, slice(None)):
        shares = np.bincount(counts[:, block].ravel(), minlength=K + 1) / counts[:, block].size
        np.testing.assert_allclose(shares, 1 / (K + 1), atol=0.06)
    if not antithetic:
        assert abs(np.corrcoef(one[:, 0], one[:, K])[0, 1]) < 0.12
    # spread evenly, a document's share of masks varies less than with times of their own
    spread = one.mean(1).std()
    assert abs(one.mean() - 0.5) < 0.01 and (spread < 0.065 if antithetic else spread > 0.075)


def test_a_document_is_masked_alike_in_any_company_and_differently_by_step():
    objective, key = make(), jax.random.key(4)
    batch = _many(8)
    whole = objective.prepare(batch, key).masked
    part = jax.tree.map(lambda x: x[2:5][::-1], batch)
    np.testing.assert_array_equal(objective.prepare(part, key).masked, whole[2:5][::-1])
    assert (np.asarray(objective.prepare(batch, jax.random.key(5)).masked) != whole).any()


def test_prompts_fillers_and_padding_are_clean_and_what_fills_a_block_is_seen():
    rows = make().prepare(BATCH, jax.random.key(0))
    response = np.zeros(T, bool)
    for start, (prompt, size) in zip(STARTS, SIZES):
        response[start + prompt : start + prompt + size] = True
    np.testing.assert_array_equal(np.asarray(rows.masked[0]).any(-1), response)
    np.testing.assert_array_equal(rows.valid[0], np.arange(T) < 20)
    assert rows.documents[0].tolist() == [0] * 8 + [1] * 4 + [2] * 8 + [vis.NONE] * 4
    assert rows.positions[0].tolist() == [*range(8), *range(4), *range(8), *range(4)]


def test_fillers_may_be_masked_in_every_view_and_change_nothing_else():
    shown, hidden = (make(filler=name).prepare(BATCH, jax.random.key(0)) for name in ("visible", "masked"))
    filler = np.isin(np.arange(T), [7, 17, 18, 19])
    np.testing.assert_array_equal(hidden.masked, shown.masked | filler[None, :, None])
    jax.tree.map(np.testing.assert_array_equal, hidden.replace(masked=None), shown.replace(masked=None))
    loss = lambda one, batch: one.loss(MODEL.scorer(PARAMS), batch, jax.random.key(0))[0]
    other = BATCH | {"tokens": jnp.where(filler, 40, BATCH["tokens"])}
    np.testing.assert_array_equal(loss(make(filler="masked"), BATCH), loss(make(filler="masked"), other))
    assert loss(make(), BATCH) != loss(make(), other)


def test_ar_sft_is_the_autoregressive_loss():
    batch = packs.alone(ROWS, T)
    objective = make("ar_sft", mask_id=None, normalisation="predictions")
    loss = lambda one: jax.jit(lambda p: one.loss(MODEL.scorer(p), batch, jax.random.key(0))[0])(PARAMS)
    np.testing.assert_allclose(loss(objective), loss(Autoregressive()), rtol=1e-6)


def test_the_family_has_the_papers_names():
    assert list(flare.VARIANTS) == ["ar_sft", "block_diffusion", "causal_context", "ntp_loss", "flare", "am_causal",
                                    "am_bidir"]
    assert flare.variant("flare") == Flare() and flare.variant("flare", block_size=8).block_size == 8
    with pytest.raises(ValueError, match="variant 'tidar'.*ar_sft"):
        flare.variant("tidar")


@pytest.mark.parametrize("changes, message", [
    (dict(block_size=0), "block_size = 0"), (dict(views=3), "views = 3"), (dict(masking="all"), "views=1"),
    (dict(views=0, ntp=False), "views = 0.*ntp=True"), (dict(context="block"), "ntp=False"),
    (dict(shift="row"), "shift 'row'.*noisy_row"), (dict(mask_id=-1), "mask_id = -1"),
    (dict(filler="hidden"), "filler 'hidden'"), (dict(inside="both"), "inside 'both'"),
    (dict(normalisation="token"), "normalisation 'token'"),
])
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_documents_inside_a_block_are_refused_and_never_leak():
    batch = packs.packed(ROWS, T, 4, align=2)
    objective = make(block_size=8)
    with pytest.raises(ValueError, match="document 2 of row 0 starts at token 12, inside a block of block_size = 8.*"
                                         "align=8"):
        objective.prepare(batch, jax.random.key(0))
    rows = jax.jit(objective.prepare)(batch, jax.random.key(0))  # no message can be raised from compiled code
    assert all(np.isnan(weight).all() for weight in rows.weights.values())


@pytest.mark.parametrize("family, changes, message", [
    ("a2d-qwen3", {}, "continues a causal model"), ("Dream", {}, "continues a causal model"),
    ("qwen3", dict(mask_id=97), "mask_id = 97 lies outside"), ("qwen3", dict(mask_id=None), "mask_id is None"),
])
def test_models_that_cannot_be_continued_are_refused(family, changes, message):
    model = build.build(tiny_config(family))
    with pytest.raises(ValueError, match=message):
        make(**changes).check(model.scorer({}))


def test_block_causal_clean_streams_are_for_attention_alone():
    score = MODELS["hybrid"].scorer({})
    assert score.recurrent and not MODEL.scorer({}).recurrent
    make("causal_context").check(score)
    with pytest.raises(ValueError, match="context = 'block'.*recurrent layers have no schedule.*context='causal'"):
        make("block_diffusion").check(score)


def test_the_head_reads_two_rows_a_token_and_a_chunk_at_a_time(monkeypatch):
    seen = []
    original = losses.head_nll
    monkeypatch.setattr(losses, "head_nll", lambda score, hidden, labels, chunk: seen.append(
        (hidden.shape, chunk)) or original(score, hidden, labels, chunk))
    objective = make(head_chunk=8)
    jax.eval_shape(lambda p: objective.loss(MODEL.scorer(p), BATCH, jax.random.key(0))[0], PARAMS)
    assert seen == [((1, 2 * T, 32), 8)]
