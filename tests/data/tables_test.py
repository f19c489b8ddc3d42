"""Rows of Parquet, Arrow, CSV, long JSONL, directories and the hub: the same rows, places named, nothing fetched."""

import csv
import datetime
import json
import subprocess
import sys

import pytest

from dlm_jax.data import pipeline, sources, tables, word_problems
from dlm_jax.data import tokenizer as tok
from tests.conftest import ROOT

datasets = pytest.importorskip("datasets")
RAW = word_problems.generate(9, seed=0)
ROWS = [sources.parse_row(raw) for raw in RAW]
TALK = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "#### 4"}]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keeps what `datasets` makes of a file, and what it prints, out of the way."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write(path, raw):
    """Writes rows in the format that a file's name says."""
    table = datasets.Dataset.from_list(raw)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in raw))
    else:
        table.save_to_disk(path.parent / "saved")
        next((path.parent / "saved").glob("*.arrow")).rename(path)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.csv", "rows.jsonl"])
def test_every_format_gives_the_same_rows(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "MAPPED", 10)
    monkeypatch.setattr(sources, "_AT_ONCE", 4)
    rows = sources.read_rows(write(tmp_path / name, RAW))
    assert isinstance(rows, sources.Rows) and len(rows) == 9
    assert list(rows) == rows[:] == ROWS and rows[2:7:2] == ROWS[2:7:2]
    assert (rows[0], rows[-1], rows[-3]) == (ROWS[0], ROWS[-1], ROWS[-3])
    with pytest.raises(IndexError):
        rows[9]


def test_a_directory_and_a_saved_dataset(tmp_path):
    write(tmp_path / "test-0.parquet", RAW)
    assert list(sources.read_rows(tmp_path)) == ROWS
    datasets.DatasetDict({"test": datasets.Dataset.from_list(RAW)}).save_to_disk(tmp_path / "one")
    assert list(sources.read_rows(tmp_path / "one")) == ROWS
    datasets.DatasetDict(dict.fromkeys(("train", "test"), datasets.Dataset.from_list(RAW))).save_to_disk(
        tmp_path / "two")
    with pytest.raises(ValueError, match=r"two has the splits \['train', 'test'\]; give the files of one"):
        sources.read_rows(tmp_path / "two")


def test_messages_and_empty_columns(tmp_path):
    pair = {"query": "a", "response": "b"}
    every = dict.fromkeys([*TALK, *pair, "n"])
    rows = sources.read_rows(write(tmp_path / "rows.parquet", [every | TALK, every | pair]))
    assert list(rows) == [sources.parse_row(TALK), sources.parse_row(pair)]


def test_texts_stay_what_they_are(tmp_path):
    """Numbers, dates and the word nan are texts of a CSV file, and dates of a JSONL file whatever its size."""
    path = tmp_path / "rows.csv"
    path.write_text("\ufeffquestion,answer\n007,nan\n2024-01-01,1.50\n", encoding="utf-8")
    pairs = [(row.prompt_messages[0]["content"], row.response) for row in sources.read_rows(path)]
    assert pairs == [("007", "nan"), ("2024-01-01", "1.50")]
    (tmp_path / "rows.jsonl").write_text('{"question": "when?", "answer": "2024-01-01"}\n')
    assert sources.read_rows(tmp_path / "rows.jsonl")[0].response == "2024-01-01"
    inferred = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")[0]["answer"]
    assert isinstance(inferred, datetime.datetime), "`datasets` no longer infers dates; sources need not parse JSON"


def test_a_bad_row_is_named_where_it_is(tmp_path, monkeypatch):
    bad = [*RAW[:2], {"question": "q", "answer": " "}]
    with pytest.raises(ValueError, match='rows.parquet: row 3: "answer" is empty'):
        sources.read_rows(write(tmp_path / "rows.parquet", bad))
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["question", "answer"], ["a\nb", "c"], [], ["q", ""]])
    with pytest.raises(ValueError, match='rows.csv:5: "answer" is empty'):
        sources.read_rows(tmp_path / "rows.csv")
    monkeypatch.setattr(sources, "MAPPED", 10)
    for line, why in ((json.dumps(bad[2]), '"answer" is empty'), ("{", "not JSON")):
        (tmp_path / "rows.jsonl").write_text(f"\ufeff{json.dumps(RAW[0])}\r\n\n{line}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=f"rows.jsonl:3: {why}"):
            sources.read_rows(tmp_path / "rows.jsonl")


def test_other_columns_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"row 1: a row has the keys \['instruction', 'output'\], expected"):
        sources.read_rows(write(tmp_path / "rows.parquet", [{"instruction": "a", "output": "b"}]))


def test_damaged_and_empty_files(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="rows.parquet cannot be read"):
        sources.read_rows(tmp_path / "rows.parquet")
    for number, text in enumerate(("", "question,answer\n")):
        path = tmp_path / f"{number}.csv"
        path.write_text(text)
        with pytest.raises(ValueError, match="csv cannot be read"):
            sources.read_rows(path)


def test_a_hub_id_offline_is_a_clear_error():
    # tests/conftest.py sets HF_HUB_OFFLINE
    with pytest.raises(ValueError, match="owner/nothing:test cannot be read.*ffline.*no such file or directory here"):
        sources.read_rows("owner/nothing:test")


@pytest.mark.parametrize("source, parts", [
    ("openai/gsm8k", ("openai/gsm8k", None, None)), ("a/b:test", ("a/b", None, "test")),
    ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")), ("a/b:test[:5]", ("a/b", None, "test[:5]")),
    ("a/b:c.d:test[1:5]", ("a/b", "c.d", "test[1:5]")), ("rows.jsonl", None), ("a/b/c", None), ("a/b:", None)])
def test_hub_ids_are_told_from_paths(source, parts):
    found = tables.hub_id(source)
    assert (found and found.group("id", "config", "split")) == parts


def test_what_the_hub_is_asked_for(monkeypatch):
    asked, answer = [], datasets.Dataset.from_list(RAW)

    def load(*args, **options):
        asked.append((args, options))
        return answer if options else datasets.DatasetDict(train=answer, test=answer)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(sources.read_rows("openai/gsm8k:main:test[:9]")) == ROWS
    with pytest.raises(ValueError, match=r"gsm8k has the splits \['train', 'test'\]; name one as openai/gsm8k:SPLIT"):
        sources.read_rows("openai/gsm8k")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test[:9]"}), (("openai/gsm8k", None), {})]


def test_a_misspelt_file_is_no_hub_id(tmp_path):
    for name in ("data/none.jsonl", "data/none.parquet", tmp_path / "none"):
        with pytest.raises(ValueError, match="no such file; give one of rows"):
            sources.read_rows(name)


def test_a_pipeline_reads_a_table_as_it_reads_a_list(tmp_path):
    tokenizer = tok.train(tok.texts_of(ROWS), 300)
    make = lambda rows: next(pipeline.Pipeline(rows, tokenizer, batch_size=4, length=64, seed=1))
    there, here = make(sources.read_rows(write(tmp_path / "rows.parquet", RAW))), make(ROWS)
    assert all((there[name] == here[name]).all() for name in here)


def test_json_rows_do_not_wait_for_datasets(tmp_path):
    path = write(tmp_path / "rows.jsonl", RAW)
    code = ("import sys; from dlm_jax.data import sources; "
            f"sources.read_rows({str(path)!r}); print('datasets' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
