"""What the job trains and what answers: a further system is one more entry in these lists."""

from __future__ import annotations

import dataclasses
from typing import Any

from dlm_jax import decode, objectives
from dlm_jax.data import tokenizer as tokenizers


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
    steps: dict[str, int] = dataclasses.field(default_factory=lambda: {
        "seed": 800, "refusion": 3200, "orthrus": 300, "masked": 1800, "block": 600, "guide": 80})


BUDGETS = {
    "standard": Budget(),
    "smoke": Budget(rows=400, questions=8, layers=2, width=32, intermediate=64, heads=2, kv_heads=1, vocabulary=400,
                    batch_tokens=640, longest=160, steps=dict.fromkeys(Budget().steps, 20)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One training of the list below.

    Attributes:
      name: of its folders, and in the budget. title, family: in the report; a family shares a colour.
      start: the training it continues; None starts from fresh parameters.
      body, logit_shift: of the model it trains, made from the one it starts from (see `stages.adapted`).
      objective: what it minimises.
      learning_rate: its peak.
    """

    name: str
    title: str
    family: str
    start: str | None = "seed"
    body: str = "qwen3"
    logit_shift: int | None = None
    objective: Any
    learning_rate: float = 3e-3


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


MASK_ID, END_ID = map(tokenizers.SPECIAL.index, (tokenizers.MASK, tokenizers.END))
BLOCK = 8  # tokens

TRAININGS = (
    Training(name="seed", title="AR seed", family="AR", start=None, objective=objectives.Autoregressive()),
    # these answers are a few slots long: floor(tK) of them would never mask all, which is how decoding begins
    Training(name="refusion", title="ReFusion", family="ReFusion",
             objective=objectives.ReFusion(mask_id=MASK_ID, slot_sizes=(8,), masking="released")),
    Training(name="orthrus", title="Orthrus", family="Orthrus", body="orthrus",
             objective=objectives.Orthrus(mask_id=MASK_ID, block_size=BLOCK, blocks=8, anchors="response")),
    # slowly: at the seed's own rate, so few steps lose its arithmetic and do not find it again
    Training(name="masked", title="Masked diffusion", family="Masked diffusion", body="a2d-qwen3", logit_shift=1,
             objective=objectives.MaskedDiffusion(mask_id=MASK_ID, eos_id=END_ID, antithetic=True, eps=0.05,
                                               block_length=BLOCK),
             learning_rate=1e-3),
    Training(name="block", title="Block diffusion", family="Block diffusion", body="a2d-qwen3",
             objective=objectives.BlockDiffusion(mask_id=MASK_ID, eos_id=END_ID, block_size=BLOCK, antithetic=True),
             learning_rate=1e-3),
    Training(name="guide", title="Weak guide", family="AR", start=None, objective=objectives.Autoregressive()),
)


def _refusion(tau: float, headline: bool = False) -> System:
    decoder = decode.ReFusion(slot_size=8, block_length=16, slot_threshold=tau, token_threshold=tau)
    return System(name=f"ReFusion τ {tau}", label=f"τ {tau}", family="ReFusion", training="refusion", decoder=decoder,
                  headline=headline)


def _masked(name: str, training: str = "masked", headline: bool = False, **parts) -> System:
    family = next(t.family for t in TRAININGS if t.name == training)
    return System(name=f"{family}, {name}", label=name, family=family, training=training, headline=headline,
                  decoder=decode.MaskedDiffusion(schedule=decode.Blocks(BLOCK), **parts))


# a frozen block of 8 keeps the keys and values its last tokens had as masks, which costs so small a model most answers:
# `Delayed` freezes it when it is finished. Answers are short, so a guide reads all drafts of a round at once
def _guided(name: str, guide: str, headline: bool = False, **parts) -> System:
    decoder = decode.Guided(cache=decode.Delayed(block_length=BLOCK), verify_batch_size=0, **parts)
    return System(name=f"Masked diffusion, {name}", label=name, family="Masked diffusion", training="masked",
                  guide=guide, headline=headline, decoder=decoder)


_SURE = dict(commit=decode.Threshold(0.95))
_BLOCKS = dict(training="block", cache=decode.BlockCausal(), stop=decode.AfterBlock())
SYSTEMS = (
    System(name="AR", label="AR", family="AR", training="seed", decoder=decode.Autoregressive(), headline=True),
    _refusion(0.6, headline=True), _refusion(0.8),
    System(name="Orthrus", label="Orthrus", family="Orthrus", training="orthrus",
           decoder=decode.Orthrus(block_size=BLOCK), lossless=True, headline=True),
    _masked("vanilla", commit=decode.Quota(), stop=decode.Never()),
    _masked("threshold", **_SURE),
    _masked("dual cache", cache=decode.Dual(), **_SURE),
    _masked("FreeCache", cache=decode.Free(), **_SURE),
    _masked("FreeCache, delayed, refreshed", cache=decode.Delayed(refresh_every=4), **_SURE),
    _guided("FreeCache, delayed, and guide", guide="seed", headline=True),
    _guided("weak guide", guide="guide"),
    _guided("weak guide, draft threshold", guide="guide", accept=decode.guided.Sure(threshold=0.9)),
    System(name="AR, the weak guide", label="weak guide", family="AR", training="guide",
           decoder=decode.Autoregressive()),
    _masked("vanilla", commit=decode.Quota(), **_BLOCKS),
    _masked("threshold", headline=True, **_SURE, **_BLOCKS),
)
