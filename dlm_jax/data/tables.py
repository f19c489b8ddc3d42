"""Tables that `datasets` reads: Parquet, Arrow, CSV and long JSONL files, directories, and ids of the Hugging Face hub.

They stay on disk, mapped into memory, and rows are read when they are asked for. No code of a dataset is ever run:
`datasets` runs none since version 4, and says so of ids that need some.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".jsonl": "text"}
ENCODING = "utf-8-sig"  # with or without a byte order mark
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<config>[^:]+))??(:(?P<split>[^:]+(\[[^]]*\])?))?")


def hub_id(source: str) -> re.Match[str] | None:
    """Returns the parts id, config and split of "owner/name", "owner/name:split" or "owner/name:config:split"."""
    return _HUB_ID.fullmatch(source)


def open_file(path: Path) -> Any:
    """Opens a file as a memory-mapped `datasets.Dataset`.

    Args:
      path: of a kind in KINDS; values of a CSV file are texts, those of a JSONL file its lines, as column "text".

    Raises:
      ValueError: the file cannot be read.
    """
    import datasets  # here, because it takes a second and most rows come from short JSONL files

    kind, options = KINDS[path.suffix], {}
    if kind == "text":
        options = {"encoding": ENCODING}
    if kind == "csv":  # without types pandas makes numbers of "007" and nothing of "nan"
        with path.open(newline="", encoding=ENCODING) as stream:
            header = next(csv.reader(stream), [])
        options = {"encoding": ENCODING, "keep_default_na": False,
                   "features": datasets.Features({name: datasets.Value("string") for name in header})}
    return _load(str(path), "", kind, data_files=str(path), split="train", **options)


def open_folder(path: Path) -> Any:
    """Opens a directory of files, or one that `save_to_disk` made; ValueError unless it has one split."""
    import datasets

    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    found = datasets.load_from_disk(str(path)) if saved else _load(str(path), "", str(path))
    return _one_split(found, str(path), "give the files of one")


def open_hub(source: str) -> Any:
    """Opens a dataset of the hub, from the cache where it has been downloaded before.

    Args:
      source: see `hub_id`; a split may be a slice, as "test[:100]".

    Raises:
      ValueError: it cannot be fetched, or it has several configurations or splits and none is named.
    """
    id, config, split = hub_id(source).group("id", "config", "split")
    advice = "; no such file or directory here either: check the name, or connect, or give a downloaded file"
    found = _load(source, advice, id, config, **({"split": split} if split else {}))
    return _one_split(found, source, f"name one as {source}:SPLIT")


def line_of(path: Path, row: int) -> int:
    """Returns the line of a CSV file on which a row begins.

    Args:
      path: the file.
      row: number of the row, from 0; the header is none.
    """
    with path.open(newline="", encoding=ENCODING) as stream:
        reader, line, number = csv.reader(stream), 1, -1
        for values in reader:
            if values and number == row:
                return line
            number, line = number + bool(values), reader.line_num + 1
    raise ValueError(f"{path} has no row {row}")


def records(table: Any, index: slice | Sequence[int]) -> list[dict[str, Any]]:
    """Returns rows of a table as dicts, without the columns that a row leaves empty.

    Args:
      table: a `datasets.Dataset`.
      index: of the rows.
    """
    columns = table[index]
    return [{name: value for name, value in zip(columns, values) if value is not None}
            for values in zip(*columns.values())]


def _load(source: str, advice: str, *args: Any, **options: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(*args, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        if "Config name is missing" in reason[0]:
            raise ValueError(f"{source}: {' '.join(line.strip() for line in reason[:2])}; write "
                             "OWNER/NAME:CONFIG:SPLIT") from None
        raise ValueError(f"{source} cannot be read ({type(error).__name__}: {reason[0]}){advice}") from None


def _one_split(found: Any, source: str, advice: str) -> Any:
    if not isinstance(found, dict):
        return found
    if len(found) > 1:
        raise ValueError(f"{source} has the splits {list(found)}; {advice}")
    return next(iter(found.values()))
