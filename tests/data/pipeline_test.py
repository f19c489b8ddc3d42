"""Batches: a function of rows, seed and step; the same rows on any number of hosts; losses of data reported."""

import copy
import json
import zlib

import numpy as np
import pytest

from dlm_jax.data import tokenizer as tok
from dlm_jax.data import turns as encoded
from dlm_jax.data import word_problems
from dlm_jax.data.pipeline import Pipeline
from dlm_jax.data.sources import parse_row

ROWS = [parse_row(row) for row in word_problems.generate(37, seed=0)]
TOKENIZER = tok.train(tok.texts_of(ROWS), 300)


def make(**changes):
    return Pipeline(ROWS, TOKENIZER, **{"batch_size": 8, "length": 110, "seed": 5, **changes})


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_a_batch_is_the_contract():
    batch = next(make())
    B, T = 8, 110
    expected = {"tokens": ((B, T), np.int32), "loss_mask": ((B, T), np.bool_), "prompt_length": ((B,), np.int32),
                "length": ((B,), np.int32), "truncated": ((B,), np.bool_), "empty": ((B,), np.bool_),
                "example_id": ((B,), np.int32)}
    assert {name: (value.shape, value.dtype.type) for name, value in batch.items()} == expected
    for b, i in enumerate(batch["example_id"]):
        alone = tok.encode_row(TOKENIZER, ROWS[i], T)
        assert all(np.array_equal(batch[name][b], alone[name]) for name in alone)


def test_padding_is_the_tokenizers():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = tokenizer.mask_token
    batch = next(Pipeline(ROWS, tokenizer, batch_size=8, length=400, seed=5))
    padding = np.arange(400) >= batch["length"][:, None]
    assert padding.any() and (batch["tokens"][padding] == tokenizer.mask_token_id).all()


def test_an_epoch_sees_every_row_once_and_epochs_differ():
    pipeline = make(batch_size=37)
    first, second = next(pipeline)["example_id"].tolist(), next(pipeline)["example_id"].tolist()
    assert sorted(first) == sorted(second) == list(range(37)) and first != second
    assert first != next(make(batch_size=37, seed=6))["example_id"].tolist()


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_yield_the_global_batch(hosts):
    whole, parts = make(), [make(process_index=i, process_count=hosts) for i in range(hosts)]
    for _ in range(7):  # beyond one epoch
        batch, slices = next(whole), [next(part) for part in parts]
        assert same(batch, {name: np.concatenate([s[name] for s in slices]) for name in batch})
    assert all(part.state() == whole.state() for part in parts)


@pytest.mark.parametrize("taken", [0, 3, 11])
def test_a_restored_pipeline_continues(taken):
    pipeline = make()
    for _ in range(taken):
        next(pipeline)
    state = json.loads(json.dumps(pipeline.state()))
    again = make()
    next(again)
    again.restore(state)
    assert all(same(next(pipeline), next(again)) for _ in range(4))


@pytest.mark.parametrize("change", [{"seed": 6}, {"length": 111}, {"batch_size": 4}])
def test_a_position_in_other_batches_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        make(**change).restore(make().state())


def test_a_position_in_other_rows_is_refused():
    other = Pipeline(ROWS[::-1], TOKENIZER, batch_size=8, length=110, seed=5)
    with pytest.raises(ValueError, match="checksum"):
        other.restore(make().state())


def test_the_report_counts_what_the_batches_hold():
    turns = tok.encode_rows(TOKENIZER, ROWS)
    length = sorted(len(prompt) for prompt, _ in turns)[5]
    pipeline = make(batch_size=37, length=length)
    batch, report = next(pipeline), pipeline.report()
    assert report["rows"] == 37 and report["longest_row"] == max(len(p) + len(r) for p, r in turns)
    assert report["truncated"] == batch["truncated"].sum() == 37
    assert report["empty"] == batch["empty"].sum() == (~batch["loss_mask"].any(1)).sum() > 0
    assert report["supervised_tokens"] == batch["loss_mask"].sum() > 0
    assert report["padding_share"] == pytest.approx(1 - batch["length"].mean() / length)


def test_the_checksum_is_of_every_row_and_computed_once(monkeypatch):
    checksum = 0
    for prompt, response in tok.encode_rows(TOKENIZER, ROWS):
        checksum = zlib.crc32(np.asarray([len(prompt), *prompt, *response], np.int32).tobytes(), checksum)
    monkeypatch.setattr(encoded, "ENCODED_AT_ONCE", 5)  # encoding in parts changes nothing
    pipeline = make()
    monkeypatch.setattr(encoded, "zlib", None)
    assert pipeline.state()["checksum"] == checksum
    pipeline.restore(pipeline.state())


def test_rows_are_kept_as_one_array_of_four_bytes_a_token():
    pipeline, turns = make(), tok.encode_rows(TOKENIZER, ROWS)
    held = [*vars(pipeline).values(), *vars(pipeline._turns).values()]
    kept = [value for value in held if isinstance(value, np.ndarray)]
    assert sum(a.nbytes for a in kept) == 4 * sum(len(p) + len(r) for p, r in turns) + 8 * (2 * len(turns) + 1)
    assert not any(isinstance(value, list) for value in held)


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="no training rows"):
        Pipeline([], TOKENIZER, batch_size=8, length=110, seed=0)
    with pytest.raises(ValueError, match="3 processes"):
        make(process_count=3)
    with pytest.raises(ValueError, match="process_index = 2"):
        make(process_index=2, process_count=2)
    with pytest.raises(ValueError, match="length = 1"):
        make(length=1)
    with pytest.raises(ValueError, match="no row has a response that fits"):
        make(length=20)
