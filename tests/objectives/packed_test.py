"""Packed = alone: what an objective makes of documents in one row is what it makes of each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import objectives
from dlm_jax.models import build
from dlm_jax.nn import visibility as vis
from dlm_jax.objectives import documents, flare, losses
from tests.conftest import random_params, tiny_config
from tests.models.hybrids import hybrid_config
from tests.objectives import packs

MASK, K, T = 96, 4, 40
SIZES = [[(5, 9), (3, 6), (2, 7)], [(4, 13)]]  # a row of three documents, and one with room for more
NUMBERS = iter((7, 3, 11, 5))
ROWS = [list(zip(NUMBERS, packs.documents(sizes, MASK, seed))) for seed, sizes in enumerate(SIZES)]
MODELS = {family: build.build(tiny_config(family, num_layers=1, hidden_size=16, intermediate_size=24, **more))
          for family, more in (("qwen3", {}), ("llada", {}), ("Dream", {}), ("a2d-qwen3", {}),
                               ("orthrus", {"mask_token_id": MASK}))}
MODELS["hybrid"] = build.build(hybrid_config(
    pattern=("gated_delta", "attention"), num_layers=2, hidden_size=16, intermediate_size=24))
KEY = jax.random.key(2)

MASKED = dict(mask_id=MASK, padding="ignore")
OBJECTIVES = {
    "autoregressive": ("qwen3", objectives.Autoregressive()),
    "llada": ("llada", objectives.MaskedDiffusion(**MASKED, antithetic=True)),
    "dream": ("Dream", objectives.MaskedDiffusion(**MASKED, target="all", normalisation="batch")),
    "block_diffusion": ("a2d-qwen3", objectives.BlockDiffusion(**MASKED, block_size=K, antithetic=True)),
    "refusion": ("qwen3", objectives.ReFusion(mask_id=MASK, slot_sizes=(2, 4), masking="released")),
    "orthrus": ("orthrus", objectives.Orthrus(mask_id=MASK, block_size=K)),  # with a block at every place
    "flare": ("qwen3", flare.variant("flare", mask_id=MASK, block_size=K)),
    "hybrid_autoregressive": ("hybrid", objectives.Autoregressive()),
    "hybrid_flare": ("hybrid", flare.variant("flare", mask_id=MASK, block_size=K)),
    "hybrid_am_causal": ("hybrid", flare.variant("am_causal", mask_id=MASK, block_size=K)),
}
# rows are compared, and not run
FURTHER = {
    "blockwise": objectives.MaskedDiffusion(**MASKED, block_length=3),
    "cut": objectives.MaskedDiffusion(**MASKED, target="all", random_length=1.0),
    "row_blocks": objectives.BlockDiffusion(**MASKED, block_size=K, align="row", normalisation="sequence"),
    "paper": objectives.ReFusion(mask_id=MASK, slot_sizes=(2, 4)),
    **{name: flare.variant(name, mask_id=MASK, block_size=K, shift="clean_boundary", antithetic=False)
       for name in ("am_causal", "ar_sft")},
}


def batches(objective):
    """The packed batch and the unpacked one of the same documents."""
    return packs.packed(ROWS, T, 5, objective.unit), packs.alone(ROWS, T)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if name == "hybrid_am_causal" else name for name in OBJECTIVES])
def test_loss_and_gradient_of_packed_documents_are_those_of_each_alone(name):
    family, objective = OBJECTIVES[name]
    model = MODELS[family]
    params = random_params(model, scale=0.1)
    loss = lambda params, batch: objective.loss(model.scorer(params), batch, KEY)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    packed, alone = batches(objective)
    (got, metrics), mine = run(params, packed)
    (want, theirs), gradient = run(params, alone)
    assert want > 0
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for metric in metrics.keys() - {"skipped_rows"}:
        np.testing.assert_allclose(metrics[metric], theirs[metric], rtol=1e-5, err_msg=metric)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-6 * largest), mine, gradient)


@pytest.mark.parametrize("name", [*FURTHER, "refusion", "block_diffusion"])
def test_rows_are_prepared_as_each_document_alone(name):
    objective = FURTHER[name] if name in FURTHER else OBJECTIVES[name][1]
    packed, alone = batches(objective)
    prepare = jax.jit(objective.prepare)
    got, want = prepare(packed, KEY), prepare(alone, KEY)
    document = 0
    for row, here in enumerate(ROWS):
        for number in range(len(here)):
            start, size = int(packed["start"][row, number]), int(packed["length"][row, number])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a[row, start : start + size], b[document, :size],
                                                                 rtol=1e-6), got.replace(documents=None), want)
            document += 1
    np.testing.assert_array_equal(got.documents, packed["documents"])
    padding = np.asarray(packed["documents"]) < 0
    assert padding.any() and all((np.asarray(w)[padding] == 0).all() for w in got.weights.values())


@pytest.mark.parametrize("name", ["autoregressive", "llada", "dream", "orthrus", "hybrid_autoregressive"])
def test_a_changed_document_changes_no_other(name):
    family, objective = OBJECTIVES[name]
    model = MODELS[family]
    params = random_params(model)
    batch = packs.packed(ROWS[:1], T, 3)
    other = batch | {"tokens": jnp.where(batch["documents"] == 1, batch["tokens"] // 2, batch["tokens"])}

    @jax.jit
    def outputs(batch):
        rows = objective.prepare(batch, KEY)
        if name == "orthrus":
            from dlm_jax.objectives import orthrus

            return orthrus.views(model.scorer(params), rows, objective)
        seen = []
        score = model.scorer(params)
        head = lambda _, hidden, labels, __: seen.append(hidden) or jnp.zeros(labels.shape)
        original, losses.head_nll = losses.head_nll, head
        try:
            objective.rows_loss(score, rows)
        finally:
            losses.head_nll = original
        return tuple(seen)

    changed = [np.abs(np.asarray(a - b)).max(-1)[0] > 0 for a, b in zip(outputs(batch), outputs(other))]
    number = np.asarray(batch["documents"][0])
    assert changed[-1][number == 1].any() and not changed[-1][(number == 0) | (number == 2)].any()
    if name == "orthrus":
        of = number[np.asarray(jax.jit(objective.prepare)(batch, KEY).teachers[0])]
        assert changed[0][of == 1].any() and not changed[0][of != 1].any()


@pytest.mark.parametrize("rule", [vis.causal, vis.bidirectional])
def test_visibility_ends_with_the_document(rule):
    draw = np.random.default_rng(0)
    number = np.asarray([[0, 0, 0, 1, 2, 2, -1, -1], [0] * 8, [-1] * 8])
    valid = (number >= 0) & (draw.random(number.shape) < 0.8)
    index = np.arange(8)
    want = (number[:, :, None] == number[:, None]) & valid[:, None]
    want &= (number >= 0)[:, :, None]
    if rule is vis.causal:
        want &= index[None] <= index[:, None]
    np.testing.assert_array_equal(rule(jnp.asarray(valid), jnp.asarray(number)).dense(), want)


def test_first_outputs_of_a_document_stay_its_own():
    number = jnp.asarray([[0, 0, 1, 1, 1, -1]])
    x = jnp.arange(6)[None, :, None]
    np.testing.assert_array_equal(losses.aligned(x, 1, number)[0, :, 0], [0, 0, 2, 2, 3, 5])


def test_what_is_taken_apart_is_put_together_again():
    batch = packs.packed(ROWS, T, 5, K)
    rows = documents.apart(batch)
    assert rows["tokens"].shape == (2 * 6, T) and rows["length"].tolist()[:6] == [14, 9, 9, 0, 0, 0]
    held = np.asarray(batch["documents"]) >= 0
    np.testing.assert_array_equal(np.asarray(documents.together(rows["tokens"], batch))[held],
                                  np.asarray(batch["tokens"])[held])


def test_packed_rows_are_not_filled_with_ends_of_sequence():
    objective = objectives.MaskedDiffusion(mask_id=MASK, eos_id=1)
    with pytest.raises(ValueError, match="padding = 'eos' fills rows.*give padding='ignore'"):
        objective.prepare(packs.packed(ROWS, T, 5), KEY)
