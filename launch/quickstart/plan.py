"""What a study is made of: trainings, the systems that answer with them, and how large both are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dlm_jax.data import word_problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How large the job is.

    Attributes:
      rows: training rows generated. questions: held-out rows answered, at most.
      layers, width, intermediate, heads, kv_heads: shape of the model.
      vocabulary: largest number of token ids.
      batch_tokens: tokens a training step sees, padding included; longer rows make smaller batches.
      longest: tokens a row is cut to.
      steps: optimiser steps by training.
    """

    rows: int = 40_000
    questions: int = 256
    layers: int = 4
    width: int = 128
    intermediate: int = 384
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 2048
    batch_tokens: int = 2304
    longest: int = 320
    steps: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One training of a study.

    Attributes:
      name: of its folders, and in the budget. title, family: in the report; a family shares a colour.
      start: the training it continues; None starts from fresh parameters.
      body, logit_shift: of the model it trains, made from the one it starts from (see `stages.adapted`).
      objective: what it minimises.
      learning_rate: its peak.
      length: tokens of its rows; None as many as the rows of the run take.
    """

    name: str
    title: str
    family: str
    start: str | None = "seed"
    body: str = "qwen3"
    logit_shift: int | None = None
    objective: Any
    learning_rate: float = 3e-3
    length: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """One line of the table: a trained model and how it is decoded.

    Attributes:
      name: in the table. label: beside its point in the chart. family: whose colour and line it has.
      training: whose model it is. guide: the training whose model guides it, for decoders that take a guide.
      decoder: how it decodes.
      lossless: whether it claims to answer as the autoregressive view alone would, which is then checked.
      headline: named in the summary, the examples and the replay; the first one is the baseline.
    """

    name: str
    label: str
    family: str
    training: str
    guide: str | None = None
    decoder: Any
    lossless: bool = False
    headline: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A study.

    Attributes:
      title: of its report.
      trainings: in order; the first one starts from fresh parameters.
      systems: what answers; the first one is the baseline.
      budgets: how large it may be, by name.
      stories: the word problems that are told where the user gives no rows.
    """

    title: str
    trainings: tuple[Training, ...]
    systems: tuple[System, ...]
    budgets: Mapping[str, Budget]
    stories: tuple[word_problems.Story, ...] = word_problems.STORIES


def budgets(steps: Mapping[str, int], **changes: Any) -> dict[str, Budget]:
    """Returns the budgets of a study.

    Args:
      steps: of the standard one.
      **changes: its other fields that are not the defaults.
    """
    smoke = Budget(rows=400, questions=8, layers=2, width=32, intermediate=64, heads=2, kv_heads=1, vocabulary=400,
                   batch_tokens=640, longest=160, steps=dict.fromkeys(steps, 20))
    return {"standard": Budget(steps=steps, **changes), "smoke": smoke}
