"""Packed batches: no token lost, every document whole and aligned, sources apart, mixed as asked, resumed exactly."""

import json

import numpy as np
import pytest

from dlm_jax.data import tokenizer as tok
from dlm_jax.data import word_problems
from dlm_jax.data.packing import Packer, lay_out
from dlm_jax.data.sources import parse_row

ROWS = [parse_row(row) for row in word_problems.generate(60, seed=0)]
SOURCES = [ROWS[:37], ROWS[37:]]
TOKENIZER = tok.train(tok.texts_of(ROWS), 300)
ENCODED = tok.encode_rows(TOKENIZER, ROWS)
LENGTH = 480


def make(sources=SOURCES, **changes):
    return Packer(sources, TOKENIZER, **{"batch_size": 4, "length": LENGTH, "seed": 5, **changes})


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def rows_of(packer, count):
    """The next packed rows, each a dictionary."""
    batches = [next(packer) for _ in range(-(-count // packer.batch_size))]
    return [{name: x[b] for name, x in batch.items()} for batch in batches for b in range(packer.batch_size)][:count]


def documents_of(row):
    """(example id, tokens, supervised) of every document of a row."""
    return [(int(i), row["tokens"][a : a + n].tolist(), row["loss_mask"][a : a + n].tolist())
            for i, a, n in zip(row["example_id"], row["start"], row["length"]) if n]


@pytest.mark.parametrize("align", [1, 4, 32])
def test_an_epoch_holds_every_document_once_whole_and_aligned(align):
    packer = make(align=align, batch_size=1)
    rows = rows_of(packer, len(packer))
    found = [document for row in rows for document in documents_of(row)]
    assert sorted(i for i, *_ in found) == list(range(60))
    for i, tokens, supervised in found:
        prompt, response = ENCODED[i]
        assert tokens == [*prompt, *response]
        assert supervised == [False] * len(prompt) + [True] * len(response)
    for row in rows:
        assert (row["start"] % align == 0).all()
        assert row["loss_mask"].sum() == sum(sum(supervised) for *_, supervised in documents_of(row))
        end = 0
        for number, (_, tokens, _) in enumerate(documents_of(row)):
            start, size = row["start"][number], -(-len(tokens) // align) * align
            assert start == end and (row["documents"][start : start + size] == number).all()
            np.testing.assert_array_equal(row["positions"][start : start + size], np.arange(size))
            np.testing.assert_array_equal(row["tokens"][start + len(tokens) : start + size], 0)
            end = start + size
        assert (row["documents"][end:] == -1).all() and (row["tokens"][end:] == 0).all()


def test_rows_are_of_one_source_and_greedy():
    packer = make(batch_size=1)
    rows = rows_of(packer, len(packer))
    last = {0: None, 1: None}
    for row in rows:
        ids = [i for i, *_ in documents_of(row)]
        source = int(ids[0] >= 37)
        assert all((i >= 37) == source for i in ids)
        if last[source] is not None:  # its first document did not fit in its source's row before
            assert last[source] + row["length"][0] > LENGTH
        last[source] = row["length"].sum()


def test_a_row_holds_no_more_documents_than_asked_and_a_long_one_is_cut():
    packer = make(most=2, batch_size=1)
    assert {len(documents_of(row)) for row in rows_of(packer, len(packer))} <= {1, 2}
    longest = max(len(p) + len(r) for p, r in ENCODED)
    packer = make([ROWS], length=longest - 1, batch_size=1)
    rows = rows_of(packer, len(packer))
    cut = [row for row in rows if row["truncated"].any()]
    assert cut and all(row["length"].tolist().count(longest - 1) == 1 for row in cut)
    assert sum(int(row["truncated"].sum()) for row in rows) == packer.report()["truncated"]


def test_epochs_are_shuffled_anew():
    packer = make([ROWS], batch_size=1)
    first = [i for row in rows_of(packer, len(packer)) for i, *_ in documents_of(row)]
    second = [i for row in rows_of(packer, len(packer)) for i, *_ in documents_of(row)]
    assert packer.state()["epoch"] == 1 and first[:10] != second[:10]
    assert make([ROWS], seed=6).state() != make([ROWS]).state()


def test_sources_are_mixed_by_weight_and_zeroed_when_exhausted():
    packer = make([ROWS, ROWS[:3]], weights=(1, 3), batch_size=1, most=1)  # a document a row: 60 and 3 rows an epoch
    sources, ends = [], []
    for row in rows_of(packer, 63 * 40):
        sources.append(int(row["example_id"][0] >= 60))
    epochs = np.reshape(sources, (40, 63))
    assert (epochs.sum(1) == 3).all()  # each source once an epoch, however it is drawn
    first = epochs[:, 0].mean()
    assert 0.55 < first < 0.95  # three quarters of the first draws
    ends = [int(np.flatnonzero(epoch)[-1]) for epoch in epochs]
    assert np.mean(ends) < 8  # the small one is soon exhausted


def test_the_mixing_law_is_the_weights():
    packer = make([ROWS, ROWS, ROWS], weights=(0.4, 0.4, 0.2), batch_size=1, most=1)
    shares = np.zeros(3)
    for _ in range(60):  # of each epoch only the draws while nothing is exhausted
        drawn = [int(row["example_id"][0]) // 60 for row in rows_of(packer, 180)]
        shares += np.bincount(drawn[:30], minlength=3)
    np.testing.assert_allclose(shares / shares.sum(), (0.4, 0.4, 0.2), atol=0.04)


def test_by_default_an_epoch_mixes_sources_by_their_rows():
    sizes = [len(make([rows], batch_size=1)) for rows in SOURCES]
    drawn = [[int(row["example_id"][0]) for row in rows_of(make(batch_size=1, weights=weights), sum(sizes))]
             for weights in (None, sizes, (1, 8))]
    assert sizes[0] > sizes[1] and drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_yield_the_global_batch(hosts):
    whole, parts = make(), [make(process_index=i, process_count=hosts) for i in range(hosts)]
    for _ in range(2 * len(whole) // 4):  # beyond one epoch
        batch, slices = next(whole), [next(part) for part in parts]
        assert same(batch, {name: np.concatenate([s[name] for s in slices]) for name in batch})
    assert all(part.state() == whole.state() for part in parts)


@pytest.mark.parametrize("taken", [0, 2, 9])
def test_a_restored_packer_continues(taken):
    packer = make(weights=(0.3, 0.7))
    for _ in range(taken):
        next(packer)
    state = json.loads(json.dumps(packer.state()))
    again = make(weights=(0.3, 0.7))
    next(again)
    again.restore(state)
    assert all(same(next(packer), next(again)) for _ in range(6))


@pytest.mark.parametrize("change", [{"seed": 6}, {"length": 512}, {"batch_size": 2}, {"align": 4}, {"weights": (1, 2)}])
def test_a_position_in_other_batches_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        make(**change).restore(make().state())


def test_a_position_in_other_rows_is_refused():
    with pytest.raises(ValueError, match="checksum"):
        make(SOURCES[::-1]).restore(make().state())
    with pytest.raises(ValueError, match="the saved data position"):
        make().restore({"step": 3})


def test_the_report_counts_what_the_batches_hold():
    packer = make(batch_size=1)
    rows, report = rows_of(packer, len(packer)), packer.report()
    assert report["rows"] == 60 and report["packed_rows"] == len(packer) < 40
    assert report["supervised_tokens"] == sum(row["loss_mask"].sum() for row in rows)
    padding = 1 - sum(row["length"].sum() for row in rows) / (len(rows) * LENGTH)
    assert report["padding_share"] == pytest.approx(padding) and padding < 0.35


def test_a_row_worked_by_hand():
    row = lay_out([(7, ([5, 6], [7])), (3, ([], [8, 9]))], length=8, most=3, align=4, pad_id=1)
    assert row["tokens"].tolist() == [5, 6, 7, 1, 8, 9, 1, 1]
    assert row["loss_mask"].tolist() == [False, False, True, False, True, True, False, False]
    assert row["documents"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [row[name].tolist() for name in ("start", "length", "prompt_length", "example_id")] == [
        [0, 4, 0], [3, 2, 0], [2, 0, 0], [7, 3, 0]]


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="length = 480 is no multiple of align = 7.*pick 483"):
        make(align=7)
    with pytest.raises(ValueError, match=r"weights = \(1,\): expected a positive number for each of the 2"):
        make(weights=(1,))
    with pytest.raises(ValueError, match=r"weights = \(1, 0\)"):
        make(weights=(1, 0))
    with pytest.raises(ValueError, match="no sources"):
        make([])
    with pytest.raises(ValueError, match="no training rows"):
        make([ROWS, []])
    with pytest.raises(ValueError, match="3 processes"):
        make(process_count=3)
    with pytest.raises(ValueError, match="no row has a response that fits"):
        make(length=20)
