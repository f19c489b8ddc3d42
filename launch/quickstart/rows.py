"""The rows of a run: read or generated, split, written down, and turned into a tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm_jax.data import sources, word_problems
from dlm_jax.data import tokenizer as tokenizers

Rows = Sequence[sources.Row]


def make(data: Path | None, seed: int, count: int, questions: int,
         stories: Sequence[word_problems.Story] = word_problems.STORIES) -> tuple[list[sources.Row], list[sources.Row]]:
    """Returns training rows and held-out rows; no held-out question occurs in training.

    Args:
      data: the user's rows, None for generated word problems.
      seed: of the generator, or of the choice of held-out rows.
      count: training rows generated.
      questions: held-out rows, at most.
      stories: that the generator tells.

    Raises:
      ValueError: unreadable rows, or too few different questions to hold one back.
    """
    if data is None:
        told = lambda number, split: word_problems.generate(number, seed=seed, split=split, stories=stories)
        return tuple([sources.parse_row(raw) for raw in told(number, split)]
                     for split, number in (("train", count), ("test", questions)))
    rows = sources.read_rows(data)
    asked = [json.dumps(row.prompt_messages) for row in rows]
    different = sorted(set(asked))
    if len(different) < 2:
        raise ValueError(f"{data}: all rows ask the same; give at least 2 different questions, one of them to hold out")
    random.Random(seed).shuffle(different)
    held = set(different[:min(questions, max(1, len(different) // 10))])
    train, test = [], {}
    for question, row in zip(asked, rows):
        if question in held:
            test.setdefault(question, row)
        else:
            train.append(row)
    return train, list(test.values())


def as_jsonl(rows: Rows) -> str:
    """Returns the text of a file that reads back as these rows."""
    turns = lambda row: [*row.prompt_messages, {"role": "assistant", "content": row.response}]
    return "".join(json.dumps({"messages": turns(row)}, ensure_ascii=False) + "\n" for row in rows)


def make_tokenizer(folder: Path, rows: Rows, vocabulary: int) -> Any:
    """Returns the run's tokenizer, trained on its training rows the first time.

    Args:
      folder: where it is kept.
      rows: training rows.
      vocabulary: largest number of token ids.
    """
    if not (folder / "done").exists():
        tokenizers.save(tokenizers.train(tokenizers.texts_of(rows), vocabulary), folder)
        (folder / "done").touch()
    return tokenizers.load(folder)


def lengths(rows: Rows, tokenizer: Any, longest: int) -> tuple[int, int]:
    """Returns the tokens a row and a response need, rounded up to a multiple of 8 and cut to `longest`."""
    sizes = [(len(prompt), len(response)) for prompt, response in tokenizers.encode_rows(tokenizer, rows)]
    fit = lambda n: min(-(-n // 8) * 8, longest)
    return fit(max(p + r for p, r in sizes)), fit(max(r for _, r in sizes))


def answerable(rows: Rows, tokenizer: Any, most: int) -> list[sources.Row]:
    """Returns the rows whose prompt leaves the model room for an answer.

    Args:
      rows: held-out rows.
      tokenizer: of the run.
      most: longest prompt, tokens.

    Raises:
      ValueError: none does.
    """
    sizes = [len(tokenizers.encode_prompt(tokenizer, row.prompt_messages)) for row in rows]
    if min(sizes) > most:
        raise ValueError(f"every held-out question is too long: the shortest has {min(sizes)} tokens, the model "
                         f"answers prompts of {most} at most; shorten the questions")
    return [row for row, size in zip(rows, sizes) if size <= most]
