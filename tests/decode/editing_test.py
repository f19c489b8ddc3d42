"""Token editing: the batched decoder against a plain loop over one row, rows apart and together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.models import build
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.conftest import random_params
from tests.models.mixtures import mixture_config

V, MASK, EOS, SIZE, LIMIT = 24, 23, 1, 4, 10
PROMPTS = [[5, 9, 4, 7, 3], [8, 2], [3, 3, 6, 11], [4]]


@functools.cache
def model():
    """A sparse model whose drafts change from forward to forward and are masks now and then."""
    config = mixture_config("llada2_moe", vocab_size=V, mask_token_id=MASK, eos_token_id=EOS, block_size=SIZE)
    made = build.build(config)
    return made, random_params(made, 3, 0.45)


@jax.jit
def logits_of(row):
    made, params = model()
    index = jnp.arange(row.shape[1])[None]
    score = made.scorer(params)
    return score.head(score.hidden(row, Pass(index, vis.blocks(jnp.ones(row.shape, bool), SIZE)))[0])[0]


def by_hand(prompt, threshold, edit, passes, least, stop):
    """LLaDA2.1's loop over one row: answer, and forwards."""
    start, total = len(prompt), -(-(len(prompt) + LIMIT) // SIZE) * SIZE
    row, forwards = np.full(16, MASK), 0
    row[:start] = prompt
    for begin in range(start // SIZE * SIZE, total, SIZE):
        block, full = np.arange(begin, begin + SIZE), 0
        ours = block >= start
        while True:
            masked = (row[block] == MASK) & ours
            full += not masked.any()
            if full > passes:
                break
            shown = np.where(np.arange(16) < begin + SIZE, row, 0)
            logits = np.asarray(logits_of(jnp.asarray(shown[None], jnp.int32)))[block].astype(np.float64)
            forwards += 1
            probability = np.exp(logits - logits.max(1, keepdims=True))
            probability /= probability.sum(1, keepdims=True)
            barred = np.where(masked[:, None] & (np.arange(V) == MASK), -1, probability)
            draft = barred.argmax(1)
            sure = np.where(masked, np.take_along_axis(probability, draft[:, None], 1)[:, 0], -1)
            take = sure > threshold
            if take.sum() < least:
                take = np.isin(np.arange(SIZE), np.argsort(-sure, kind="stable")[: min(least, masked.sum())])
            of = np.take_along_axis(probability, draft[:, None], 1)[:, 0]
            change = ~masked & ours & (draft != row[block]) & (of > edit)
            row[block] = np.where((take & masked) | change, draft, row[block])
            if not masked.any() and not change.any():
                break
        if stop and EOS in row[start: begin + SIZE]:
            break
    return row[start: start + LIMIT], forwards


SETTINGS = [(0.9, 0.5, 3, 1, False), (0.3, 0.2, 16, 2, True), (0.6, 0.0, 2, 1, True), (0.5, 0.3, 0, 1, False)]


@pytest.mark.parametrize("threshold, edit, passes, least, stop", SETTINGS)
def test_rows_together_are_the_loop_over_each(threshold, edit, passes, least, stop):
    decoder = decode.BlockDiffusion(
        block_size=SIZE, commit=decode.Enough(threshold, decode.TopN(least)), editing=decode.Editing(edit, passes),
        stop=decode.AfterBlock() if stop else decode.Never())
    out = decode.generate(*model(), PROMPTS, decoder, max_new_tokens=LIMIT)
    for i, prompt in enumerate(PROMPTS):
        want, forwards = by_hand(prompt, threshold, edit, passes, least, stop)
        shown = np.where(out.committed_at[i] >= 0, out.canvas[i], MASK)[:LIMIT]
        np.testing.assert_array_equal(shown, want)
        assert out.ledger.forwards["denoise"][i] == forwards


def test_editing_changes_tokens_and_takes_some_back():
    """What the test above compares is there to be compared."""
    found = [by_hand(prompt, *setting) for prompt in PROMPTS for setting in SETTINGS[:3]]
    plain = [by_hand(prompt, setting[0], 2.0, 16, *setting[3:]) for prompt in PROMPTS for setting in SETTINGS[:3]]
    assert any((a[0] != b[0]).any() for a, b in zip(found, plain, strict=True))


def test_kept_keys_and_values_change_nothing_but_what_is_computed():
    """The released loop keeps nothing; a pass over every finished block that does gives the same answers."""
    decoder = decode.BlockDiffusion(block_size=SIZE, commit=decode.Enough(0.3, decode.TopN(2)),
                                    editing=decode.Editing(0.2, 16), stop=decode.Never())
    told = decode.Conventions(prompt="block-causal", grid="absolute", commit="block-bidirectional")
    plain, kept = (decode.generate(*model(), PROMPTS, made, max_new_tokens=LIMIT)
                   for made in (decoder, decoder.replace(conventions=told)))
    for a, b in zip(plain.tokens, kept.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (plain.ledger.forwards["denoise"] == kept.ledger.forwards["denoise"]).all()
    assert (kept.ledger.forwards["commit"] > 0).all() and not plain.ledger.forwards["commit"].any()
