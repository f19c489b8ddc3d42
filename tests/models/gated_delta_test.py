"""Hybrid stacks: training streams, passes over a cache, and what they must agree on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from configs import flare
from dlm_jax.models import build
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Pass, Streams, Window
from tests.models.hybrids import draw, feed, hybrid, ints

CAPACITY, CLOSE = 24, dict(rtol=2e-4, atol=1e-4)


@pytest.fixture(params=["qwen3_5_text", "qwen3_next"])
def model(request):
    return hybrid(request.param)


def empty(model, params, batch, window=0):
    return model.scorer(params).init_cache(batch, CAPACITY, window)


@pytest.mark.parametrize("pieces", [(16,), (5, 1, 1, 6, 3)])
def test_pieces_through_a_cache_are_the_whole(model, pieces):
    tokens = draw((2, 16))
    whole = dlm_jax.forward(*model, tokens)
    cache, start, got = empty(*model, 2), 0, []
    for size in pieces:
        out, cache = feed(*model, cache, tokens[:, start: start + size], ints(start, start), ints(size, size))
        got, start = [*got, out], start + size
    assert isinstance(cache, Cache)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), whole, **CLOSE)


@pytest.mark.parametrize("window", [0, 6])
def test_padding_and_neighbours_never_reach_a_state(window):
    """Rows of different lengths: each is what it is alone, whatever stands in the padding."""
    model, params = hybrid()
    tokens, counts = draw((3, 6)), ints(6, 2, 4)
    noise = draw((3, 6), 1)
    padded = jnp.where(jnp.arange(6) < counts[:, None], tokens, noise)
    probe = draw((3, 1), 2)
    runs = []
    for given in (tokens, padded):
        out, cache = feed(model, params, empty(model, params, 3, window), given, ints(0, 0, 0), counts)
        runs.append((out, feed(model, params, cache, probe, counts, ints(1, 1, 1))[0]))
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    for row, count in enumerate(counts.tolist()):
        alone = dlm_jax.forward(model, params, jnp.concatenate([tokens[row: row + 1, :count], probe[row: row + 1]], 1))
        np.testing.assert_allclose(runs[0][0][row, :count], alone[0, :count], **CLOSE)
        np.testing.assert_allclose(runs[0][1][row, 0], alone[0, -1], **CLOSE)


@functools.partial(jax.jit, static_argnames="model")
def logits(model, params, tokens, told, cache=None):
    score = model.scorer(params)
    return score.head(score.hidden(tokens, told, cache)[0])


def window_pass(model, params, advance, read, tentative, window=5):
    prefix, tokens = draw((3, 4)), draw((3, 7), 1)
    _, cache = feed(model, params, empty(model, params, 3, window), prefix, ints(0, 0, 0), ints(4, 4, 4))
    told = Window(advance, read, tentative)
    out, cache = feed(model, params, cache, tokens, ints(4, 4, 4), advance + read, told)
    return jnp.concatenate([prefix, tokens], axis=1), out, cache


@pytest.mark.parametrize("accepted", range(6))
def test_a_committed_window_is_its_accepted_tokens_replayed(model, accepted):
    advance, read = ints(5, 3, 0), ints(2, 4, 3)
    tokens, _, cache = window_pass(*model, advance, read, True)
    taken = jnp.minimum(ints(accepted, accepted, accepted), advance)
    cache, probe = cache.commit(taken), draw((3, 1), 2)
    for _ in range(2):  # the pass that applies what was kept, and one after it
        got, cache = feed(*model, cache, probe, 4 + taken, ints(1, 1, 1))
        for row, count in enumerate(taken.tolist()):
            replay = jnp.concatenate([tokens[row: row + 1, : 4 + count], probe[row: row + 1]], axis=1)
            tail, room = replay.shape[1], CAPACITY
            fresh = dlm_jax.forward(*model, jnp.pad(replay, ((0, 0), (0, room - tail))))
            np.testing.assert_allclose(got[row, 0], fresh[0, tail - 1], **CLOSE)
        tokens = jnp.stack([jnp.concatenate([tokens[row, : 4 + count], probe[row], draw((CAPACITY,), 5)])[:CAPACITY]
                            for row, count in enumerate(taken.tolist())])
        taken, probe = taken + 1, draw((3, 1), 3)


@pytest.mark.parametrize("tentative, window", [(True, 5), (False, 7), (False, 0)])
def test_a_window_reads_its_block_at_the_end(tentative, window):
    """Tokens that advance read as they would alone; a block as in a training row; nothing of it is left."""
    model, advance, read = hybrid(), ints(4, 0, 2), ints(3, 3, 0)
    tokens, out, cache = window_pass(*model, advance, read, tentative, window)
    causal = dlm_jax.forward(*model, tokens)
    for row, count in enumerate(advance.tolist()):
        np.testing.assert_allclose(out[row, :count], causal[row, 4: 4 + count], **CLOSE)
    for row in (0, 1):
        start = 4 + int(advance[row])
        clean = tokens[row: row + 1, : start + 3]
        _, views = two_streams(*model, clean, clean[:, None], 4)
        np.testing.assert_allclose(out[row, start - 4: start - 1], views[0, 0, start:], **CLOSE)
    _, without = feed(*model, window_pass(*model, advance, read, tentative, window)[2], tokens[:, 4:], ints(4, 4, 4),
                      ints(0, 0, 0), Window(ints(0, 0, 0), ints(0, 0, 0)))
    plain = window_pass(*model, advance, ints(0, 0, 0), tentative, window)[2]
    probe = draw((3, 1), 2)
    left = [feed(*model, c, probe, 4 + advance, ints(1, 1, 1))[0] for c in (cache, without, plain)]
    np.testing.assert_allclose(left[0], left[2], **CLOSE)
    np.testing.assert_allclose(left[1], left[2], **CLOSE)


def two_streams(model, params, clean, views, block_size, documents=None, causal=False):
    """Returns clean and noisy logits of one packed forward."""
    B, L = clean.shape
    W = views.shape[1]
    index = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))
    documents = jnp.zeros((B, L), jnp.int32) if documents is None else documents
    new = jnp.concatenate([jnp.ones((B, 1), bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    floor = jax.lax.cummax(jnp.where(new, index, 0), axis=1)
    tile = lambda x: jnp.tile(x, (1, W))
    block = index // block_size
    none = jnp.full_like(index, vis.NONE)
    views_of = tile(block) + jnp.repeat(jnp.arange(W) * L, L)[None]
    order = tile(index if causal else jnp.zeros_like(index))
    join = lambda a, b: jnp.concatenate([a, b], axis=1)
    rule = vis.Visibility(
        floor_q=join(floor, tile(floor)), limit_q=join(index, tile(block * block_size - 1)),
        group_q=join(none, views_of), order_q=join(jnp.zeros_like(index), order),
        rank_k=join(index, tile(none)), group_k=join(none, views_of), order_k=join(jnp.zeros_like(index), order))
    told = Pass(jnp.tile(index - floor, (1, 1 + W)), rule, recurrence=Streams(documents, W, block_size, causal))
    out = logits(model, params, join(clean, views.reshape(B, -1)), told)
    return out[:, :L], out[:, L:].reshape(B, W, L, -1)


@pytest.mark.parametrize("causal", [False, True])
def test_streams_are_every_block_alone_after_its_clean_prefix(model, causal):
    """The slow way: the clean prefix through a cache, then the block, read at its end or token by token."""
    clean, views = draw((1, 12)), draw((1, 2, 12), 1)
    got_clean, got = two_streams(*model, clean, views, 4, causal=causal)
    np.testing.assert_allclose(got_clean, dlm_jax.forward(*model, clean), **CLOSE)
    for start in (0, 4, 8):
        for view in range(2):
            tokens = jnp.concatenate([clean[:, :start], views[:, view, start: start + 4]], axis=1)
            tokens = jnp.pad(tokens, ((0, 0), (0, 12 - tokens.shape[1])))
            told = Window(ints(start + 4 * causal), ints(4 * (not causal)))
            out, _ = feed(*model, empty(*model, 1), tokens, ints(0), ints(start + 4), told)
            np.testing.assert_allclose(got[:, view, start: start + 4], out[:, start: start + 4], **CLOSE)


def test_documents_of_a_row_are_themselves():
    model = hybrid()
    clean, views = draw((1, 12)), draw((1, 1, 12), 1)
    documents = ints([0] * 4 + [1] * 8)
    packed = two_streams(*model, clean, views, 4, documents)
    first = two_streams(*model, clean[:, :4], views[..., :4], 4)
    second = two_streams(*model, clean[:, 4:], views[..., 4:], 4)
    for whole, one, other in zip(packed, first, second):
        np.testing.assert_allclose(whole, jnp.concatenate([one, other], axis=-2), **CLOSE)


def test_long_passes_read_as_short_ones(monkeypatch):
    from dlm_jax.nn import gated_delta

    advance, read = ints(3, 0, 2), ints(4, 4, 0)
    model, params = hybrid()
    short = window_pass(model, params, advance, read, False, 0)
    monkeypatch.setattr(gated_delta, "SHORT", 0)
    model = dataclasses.replace(model, remat=True)  # another program
    long = window_pass(model, params, advance, read, False, 0)
    live = (jnp.arange(7) < (advance + read)[:, None])[..., None]
    np.testing.assert_allclose(jnp.where(live, long[1], 0), jnp.where(live, short[1], 0), **CLOSE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), long[2].members[0], short[2].members[0])


def test_a_cache_that_is_only_read_stays_as_it_is():
    model, params = hybrid()
    prefix, block = draw((2, 4)), draw((2, 4), 1)
    score = model.scorer(params)
    _, cache = feed(model, params, empty(model, params, 2, 4), prefix, ints(0, 0), ints(4, 4))
    want, _ = feed(model, params, cache, block, ints(4, 4), ints(4, 4), Window(ints(0, 0), ints(4, 4)))
    positions = 4 + jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
    entries = jnp.broadcast_to(jnp.arange(CAPACITY + 4), (2, CAPACITY + 4))
    rank = jnp.where(entries < 4, entries, jnp.where(entries >= CAPACITY, entries - CAPACITY + 4, vis.NONE))
    rule = vis.by_rank(jnp.zeros_like(positions), jnp.full_like(positions, 7), rank.astype(jnp.int32))
    told = Pass(positions, rule, None, Window(ints(0, 0), ints(4, 4)))
    hidden, after = jax.jit(lambda told: score.hidden(block, told, cache))(told)
    np.testing.assert_allclose(score.head(hidden), want, **CLOSE)
    jax.tree.map(np.testing.assert_array_equal, after, cache)
    plain = Pass(positions, vis.causal(jnp.ones((2, 4), bool)))
    for wrong, kept, message in (
            (told.replace(recurrence=None), cache, "only reads the cache says nothing of what recurrent layers read"),
            (told.replace(recurrence=Streams()), cache, "told the Streams of a training row"),
            (plain.replace(recurrence=Streams(views=2)), None, "a row of 4 tokens is not a clean stream and 2 views")):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda told, kept: logits(model, params, block, told, kept), wrong, kept)


@pytest.mark.parametrize("name, state, kept", [("qwen3_5_2b", 18.0, 2.606), ("qwen3_5_9b", 48.0, 4.887)])
def test_a_window_keeps_what_was_written_not_the_states_in_between(name, state, kept):
    model = build.build(flare.MODELS[name])
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), build.abstract_params(model))
    cache = jax.eval_shape(lambda params: model.scorer(params).init_cache(1, 16, 4), params)
    members = [member for member in cache.members if hasattr(member, "state")]
    mib = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**20
    assert sum(mib(member.state) for member in members) == state
    assert sum(mib((member.inputs, member.writes)) for member in members) == pytest.approx(kept, abs=0.001)
    assert kept < state * 4 / 25  # of a state after each token
