"""ReFusion against the plain reference beside this file, and its small rules against hand-made cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import ReFusion, Sampler, generate, sampling
from dlm_jax.decode import request as requests
from dlm_jax.decode.ledger import Counts
from dlm_jax.decode.refusion import decoder as refusion
from dlm_jax.decode.refusion import rules
from dlm_jax.decode.refusion.forward import Read
from dlm_jax.scoring import Pass
from tests.decode.decode_test import MASK, V, peaked, prompts
from tests.decode.refusion_reference import Reference

CASES = [
    dict(k=4, block=16, slot_threshold=0.25, token_threshold=0.15),
    dict(k=4, block=16, slot_threshold=0.15, token_threshold=0.05),
    dict(k=4, block=16, slot_threshold=0.05, token_threshold=0.3),
    dict(k=2, block=8, slot_threshold=0.3, token_threshold=0.3),
    dict(k=2, block=8, slot_threshold=0.1, token_threshold=0.35),
    dict(k=8, block=8, slot_threshold=0.3, token_threshold=0.1),
    dict(k=4, block=24, slot_threshold=0.2, token_threshold=0.2, certainty="mean"),
    dict(k=4, block=12, slot_threshold=0.2, token_threshold=0.25, kv="recompute"),
    dict(k=4, block=12, slot_threshold=0.2, token_threshold=0.25, completion="redraft"),
    dict(k=4, block=12, slot_threshold=0.2, token_threshold=0.25, completion="redraft", kv="recompute"),
    dict(k=4, block=16, slot_threshold=0.9, token_threshold=0.9, confidence_aware=False, slots_per_round=1),
    dict(k=4, block=16, slot_threshold=0.9, token_threshold=0.9, confidence_aware=False, slots_per_round=3),
]


@pytest.fixture(scope="module")
def network():
    return peaked(7)


@pytest.fixture(scope="module")
def probabilities(network):
    """The model as the reference calls it: tokens, positions and a dense mask to (T, V) probabilities."""
    model, params = network

    @jax.jit
    def forward(tokens, positions, mask):
        hidden, _ = model.scorer(params).hidden(tokens, Pass(positions, mask))
        logits = model.scorer(params).head(hidden)
        return jax.nn.softmax(logits.at[..., MASK].set(-jnp.inf), axis=-1)  # a mask is no answer

    def padded(tokens, positions, mask):  # to one shape, so that it compiles once
        size, fixed = len(tokens), 96
        ids, places, seen = np.zeros((1, fixed), int), np.zeros((1, fixed), int), np.eye(fixed, dtype=bool)[None]
        ids[0, :size], places[0, :size] = tokens, positions
        seen[0, :size, :size] = mask
        return np.asarray(forward(jnp.array(ids), jnp.array(places), jnp.array(seen)))[0, :size]

    return padded


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_equals_the_plain_reference(network, probabilities, case):
    model, params = network
    rows, length = prompts(11, 6), 48 if case["block"] != 16 else 44
    free = ReFusion(slot_size=case["k"], block_length=case["block"], **{
        name: value for name, value in case.items() if name not in ("k", "block")})
    unended = generate(model, params, rows, free, max_new_tokens=length, eos_id=-1)
    common = int(np.bincount(np.concatenate(unended.tokens)).argmax())
    for eos in (-1, common):
        out = generate(model, params, rows, free, max_new_tokens=length, eos_id=eos)
        for i, row in enumerate(rows):
            reference = Reference(probabilities, row, length=length, eos=eos, mask=MASK, **case)
            tokens, calls = reference.run()
            at = np.flatnonzero(out.committed_at[i] >= 0)
            assert {int(g): int(out.canvas[i, g]) for g in at} == {g: t for g, t in tokens.items() if g < length}
            assert {int(g): int(out.origin[i, g]) for g in at} == {
                g: o for g, o in reference.origin.items() if g < length}
            assert int(out.ledger.after_prefill()[i]) == calls
            assert int(out.ledger.positions["prefill"][i]) == len(row)
            for kind, count in reference.positions_read.items():
                assert int(out.ledger.positions[kind][i]) == count, kind


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7), Sampler(1.3, top_k=8, top_p=0.9)], ids=str)
def test_whole_block_as_one_slot_infills_left_to_right(sampler):
    """With one slot a block, nothing verified and one forward a token, the slot's tail is plain AR decoding.

    Every draw is made again here from logits of a plain forward, so the temperature is exactly the one asked for.
    """
    model, params = peaked(3)
    decoder = ReFusion(slot_size=8, block_length=8, confidence_aware=False, sampler=sampler)
    rows = prompts(12, 3)
    out = generate(model, params, rows, decoder, max_new_tokens=8, eos_id=-1, seed=5)
    score, keys = model.scorer(params), requests.make(rows, max_new_tokens=8, capacity=8, seed=5).keys
    logits = jax.jit(lambda tokens: score(tokens).at[..., MASK].set(-jnp.inf))
    ids = np.zeros((3, 24), np.int32)
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in rows])
    for number in range(8):
        ids[np.arange(3), length + number] = MASK  # the first token is planned at its own place
        fed = length + number - (number > 0)
        own = jnp.asarray(logits(jnp.asarray(ids)))[np.arange(3), fed][:, None]
        place = jnp.full((3, 1), number - (number > 0))
        expected = sampler.draw(own, sampling.draw_keys(keys, jnp.full(3, number), place))[:, 0]
        np.testing.assert_array_equal(out.canvas[:, number], expected)
        ids[np.arange(3), length + number] = out.canvas[:, number]
    assert out.ledger.totals() == {"prefill": 3, "denoise": 3, "decode": 21}
    assert {kind: n.tolist() for kind, n in out.ledger.positions.items() if n.any()} == {
        "prefill": length.tolist(), "denoise": [8] * 3, "decode": [7] * 3}


@pytest.mark.parametrize("slot, token, chosen, accepted", [
    (0.2, 0.5, [True, True], [False, True]), (0.8, 0.2, [False, True], [True, True]),
    (0.5, None, [False, True], [False, True]), (0.2, None, [True, True], [True, True])])
def test_first_tokens_are_judged_by_the_token_threshold(monkeypatch, slot, token, chosen, accepted):
    sure = jnp.array([[[0.3, 0.9], [0.6, 0.9]]])
    read = Read(token=jnp.full((1, 2, 2), 5), confidence=sure, of_draft=sure, slot_token=jnp.full((1, 2), 5))
    monkeypatch.setattr(refusion, "prefill", lambda score, request: (None, None, Counts.zeros(1)))
    monkeypatch.setattr(refusion.forward, "run", lambda score, request, state, *_, **__: (read, state))
    request = requests.make([[3]], max_new_tokens=4, capacity=4, mask_id=MASK)
    decoder = ReFusion(slot_size=2, block_length=4, slot_threshold=slot, token_threshold=token)
    state = jax.jit(lambda: decoder.step(None, request, decoder.init(None, request)))()
    assert (state.slot_chosen.tolist(), state.slot_first_accepted.tolist()) == ([chosen], [accepted])


def test_sampled_drafts_differ_by_seed_and_repeat_by_seed():
    model, params = peaked(4)
    decoder = ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, temperature=1.0)
    rows = prompts(13, 3)
    draw = lambda seed: np.concatenate(generate(
        model, params, rows, decoder, max_new_tokens=32, eos_id=-1, seed=seed).tokens)
    assert (draw(1) == draw(1)).all() and (draw(1) != draw(2)).any()


def grid(text: str) -> jnp.ndarray:
    """'110 100' -> (1, 2, 3) bool."""
    return jnp.array([[[c == "1" for c in word] for word in text.split()]])


def test_rules_by_hand():
    open_slots = jnp.array([[True, False, True, True]])
    score = jnp.array([[0.5, 0.9, 0.5, 0.7]])
    assert rules.choose_confident(score, open_slots, 0.5).tolist() == [[False, False, False, True]]
    assert rules.choose_confident(score, open_slots, 0.8).tolist() == [[False, False, False, True]]
    assert rules.choose_top(score, open_slots, 2).tolist() == [[True, False, False, True]]

    chosen = jnp.array([[True, False, True]])
    run = rules.accepted_run(grid("111 000 101"), chosen)
    assert (run == grid("111 000 100")).all()
    assert (rules.slot_runs(grid("011 111 001"), chosen) == grid("111 000 100")).all()
    assert rules.common_length(grid("111 000 110"), chosen).tolist() == [2]
    assert (rules.through_first(grid("000 010 100")) == grid("111 110 000")).all()

    # the EOS came in slot 3, the second of the chosen {2, 3}; slots 0, 2, 3, 4 were open
    four = dict(eos_slot=jnp.array([[False, False, False, True, False]]),
                open_slots=jnp.array([[True, False, True, True, True]]),
                chosen=jnp.array([[False, False, True, True, False]]))
    assert rules.closed_by_eos(**four, by_row=jnp.array([False])).tolist() == [[False, False, False, True, True]]
    assert rules.closed_by_eos(**four, by_row=jnp.array([True])).tolist() == [[False, False, True, True, True]]


def test_every_branch_was_walked(network):
    """The random models above are of use only if they reach all kinds of forward."""
    model, params = network
    out = generate(model, params, prompts(11, 6), ReFusion(
        slot_size=4, block_length=16, slot_threshold=0.25, token_threshold=0.15), max_new_tokens=44, eos_id=-1)
    totals = out.ledger.totals()
    assert totals["denoise"] < totals["verify"] + totals["decode"] and totals["decode"] > 0
    assert (out.origin == 0).any() and (out.origin == 1).any()
    order = out.committed_at[:, ::4]
    assert (np.diff(order, axis=1) < 0).any(), "no slot was decoded out of order"
    assert V > MASK
