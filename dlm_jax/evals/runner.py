"""Decoder x task -> one row of results, counted as the ledger defines it.

Tokens are those committed up to and including the end of sequence, never a prompt token, never padding. Tokens per
forward = tokens / model forwards that could commit any, see `Ledger.committing` (a guide's own are counted apart).
Tokens per second = the same tokens / device-synchronised wall time, compilation excluded; taken twice, one question at
a time as the papers do, and in batches.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dlm_jax.data.sources import Row
from dlm_jax.data.tokenizer import encode_prompt, pieces
from dlm_jax.decode import api
from dlm_jax.decode.asynclane import AsyncLane, history
from dlm_jax.decode.lossless import check_lossless
from dlm_jax.evals import intervals, resume, timeline
from dlm_jax.evals.tasks import Task
from dlm_jax.types import Params

INCOMPLETE = "◌"
PASSES = 3  # over the timed questions


@dataclasses.dataclass(frozen=True)
class Answer:
    """One question as one system answered it.

    Attributes:
      question, text, expected: the user's words, the answer, the reference.
      right, by: the judge's word, and what found the result it judged, see `verdicts.Verdict`.
      finished: whether it ended by itself within the room it had.
      tokens: committed, the end of sequence included.
      forwards: model forwards that could commit tokens.
    """

    question: str
    text: str
    expected: str
    right: bool
    by: str | None
    finished: bool
    tokens: int
    forwards: int


def describe(decoder: Any) -> dict[str, Any]:
    """Returns a decoder's kind and hyperparameters as plain values, and so those of its parts.

    Args:
      decoder: a frozen dataclass.
    """
    plain = lambda value: describe(value) if dataclasses.is_dataclass(value) else value
    return {"kind": type(decoder).__name__, **{f.name: plain(getattr(decoder, f.name))
                                               for f in dataclasses.fields(decoder)}}


def evaluate(
    name: str,
    decoder: Any,
    model: Any,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    timed: int = 32,
    seed: int = 0,
    encode: Callable[[Any], Any] | None = None,
    keep: tuple[Path, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[Answer]]:
    """Answers every question of a task with one decoder.

    Args:
      name: what the table calls the system.
      decoder: a decoder of `dlm_jax.decode`.
      model: the module.
      params: its parameters.
      tokenizer: of the model, with end-of-sequence and mask tokens.
      task: the questions and their judge.
      max_new_tokens: room for an answer, tokens.
      batch_size: questions decoded together.
      timed: questions decoded `PASSES` times more, one at a time, for the speed of a single answer: that of the
        pass of median time.
      seed: of sampling.
      encode: a question's messages -> what `generate` takes for it; None is `encode_prompt` with the tokenizer.
      keep: a folder for finished batches, from which a killed run goes on, and what names the model there, see
        `resume.generate`.
      progress: called with the questions answered so far and their number, those answered again included.

    Returns:
      A row of plain values (name, decoder, accuracy, how many answers each extractor found, counts, tokens per
      forward and per second, seconds) and the answers one by one. Ratios are of sums (micro); "..._macro" is the mean
      of the groups' or questions' own, "..._interval" the middle 95% of what resampled questions give.
    """
    start, decoder = time.perf_counter(), decoder.reading(tokenizer)
    prompts = list(map(encode or functools.partial(encode_prompt, tokenizer), [r.prompt_messages for r in task.rows]))
    generate = functools.partial(
        api.generate, model, params, decoder=decoder, max_new_tokens=max_new_tokens,
        eos_id=tokenizer.eos_token_id, mask_id=tokenizer.mask_token_id, seed=seed)
    # the first run of a fresh executable is slow for reasons that are not the decoder's
    warm = [generate(prompts[:batch_size]), generate(prompts[:1])]
    alone = prompts[:max(1, timed)]
    total = len(prompts) + PASSES * len(alone)
    told = lambda before: None if progress is None else lambda n: progress(before + n, total)
    whole = generate if keep is None else functools.partial(
        resume.generate, model, params, folder=keep[0], identity=keep[1], **generate.keywords)
    out = whole(prompts, batch_size=batch_size, progress=told(0))
    passes = [generate(alone, batch_size=1, progress=told(len(prompts) + i * len(alone))) for i in range(PASSES)]
    single = sorted(passes, key=lambda each: sum(_seconds(each).values()))[PASSES // 2]
    forwards = out.ledger.committing()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in out.tokens]
    answers = [Answer(
        question=row.prompt_messages[-1]["content"], text=texts[i], expected=row.response, right=right, by=by,
        finished=tokenizer.eos_token_id in out.tokens[i], tokens=int(out.ledger.committed[i]),
        forwards=int(forwards[i]))
        for i, (row, (right, by)) in enumerate(zip(task.rows, task.verdicts(texts)))]
    tokens, steps = int(out.ledger.committed.sum()), int(forwards.sum())
    rights = [float(answer.right) for answer in answers]
    right = sum(answer.right for answer in answers)
    each = [answer.tokens for answer in answers], [answer.forwards for answer in answers]
    groups = intervals.by_group(rights, task.groups) if len(set(task.groups)) > 1 else {}
    return {
        "name": name,
        "decoder": describe(decoder),
        "task": task.name,
        "metric": task.metric,
        "asked": dict(task.about),
        "accuracy": right / len(answers),
        "accuracy_interval": intervals.bootstrap(rights),
        **({"accuracy_by_group": groups, "accuracy_macro": float(np.mean(list(groups.values())))} if groups else {}),
        "correct": right,
        "extracted": dict(collections.Counter(answer.by or "nothing" for answer in answers)),
        "questions": len(answers),
        "unfinished": sum(not answer.finished for answer in answers),
        "tokens": tokens,
        "tokens_per_forward": _ratio(tokens, steps),
        "tokens_per_forward_interval": intervals.bootstrap(*each),
        "tokens_per_forward_macro": intervals.macro(*each),
        "forwards_per_token": _ratio(steps, tokens),
        "tokens_per_verification": _per_verification(out),
        "forwards": _totals(out.ledger.forwards),
        "positions": _totals(out.ledger.positions),
        **({"counted": _totals(out.ledger.tallies)} if out.ledger.tallies else {}),
        "seconds_per_answer": sum(_seconds(single).values()) / len(single.tokens),
        "tokens_per_second": _speed(single),
        "tokens_per_second_batched": _speed(out),
        "seconds": {"single": _seconds(single), "batched": _seconds(out),
                    "compile": sum(made.seconds["compile"] for made in (*warm, out, *passes))},
        "timed": len(single.tokens),
        "batch_size": batch_size,
        "wall_seconds": time.perf_counter() - start,
    }, answers


def losslessness(
    decoder: Any,
    model: Any,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    encode: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Checks a decoder that claims to answer, token for token, as plain autoregressive decoding of its model does.

    Args:
      decoder, model, params, tokenizer, task, max_new_tokens, batch_size, encode: as in `evaluate`.

    Returns:
      Plain values that join the row of `evaluate`: the share of questions without any difference ("lossless"), and
      how many of the differences are near ties and how many divergences; "lossless_report" says it in words.
    """
    prompts = list(map(encode or functools.partial(encode_prompt, tokenizer), [r.prompt_messages for r in task.rows]))
    found = check_lossless(model, params, prompts, decoder, max_new_tokens=max_new_tokens, batch_size=batch_size,
                           eos_id=tokenizer.eos_token_id, mask_id=tokenizer.mask_token_id)
    ties = sum(difference.near_tie for difference in found.differences)
    return {
        "lossless": 1 - len(found.differences) / len(prompts),
        "near_ties": ties,
        "divergences": len(found.differences) - ties,
        "lossless_report": str(found),
    }


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _per_verification(out: api.Generation) -> float | None:
    """Tokens that a verification commits, None where other forwards but the prefill commit some too."""
    kinds = {kind for kind, rows in out.ledger.forwards.items() if rows.any()} - {"prefill"}
    if kinds != {"draft", "verify"}:
        return None
    by_prefill = sum(int((at[: len(tokens)] == 0).sum()) for at, tokens in zip(out.committed_at, out.tokens))
    return _ratio(int(out.ledger.committed.sum()) - by_prefill, int(out.ledger.forwards["verify"].sum()))


def _seconds(out: api.Generation) -> dict[str, float]:
    return {name: out.seconds[name] for name in ("prefill", "decode")}


def _speed(out: api.Generation) -> float | None:
    return _ratio(float(out.ledger.committed.sum()), sum(_seconds(out).values()))


def _totals(counts: dict[str, np.ndarray]) -> dict[str, int]:
    return {kind: int(rows.sum()) for kind, rows in counts.items() if rows.any()}


def replay(
    name: str,
    decoder: Any,
    model: Any,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Decodes one question while writing down what every forward drafts and commits.

    Args:
      name: what the report calls the system.
      decoder, model, params, tokenizer, max_new_tokens, seed: as in `evaluate`.
      row: the question.

    Returns:
      Plain values: name, slot_size (None without slots), timeline (a picture of its lanes, None without them), and
      frames, one a forward that changed something:
      forward (counted after prefill; 0 is the prefill), kind, drafts and commits ([position, text] and
      [position, text, origin] lists), as far as the answer goes. The end of sequence has the text "", a token
      whose character ends with a later token `INCOMPLETE`.
    """
    eos, prompt = tokenizer.eos_token_id, encode_prompt(tokenizer, row.prompt_messages)
    ask = dict(decoder=decoder.reading(tokenizer), max_new_tokens=max_new_tokens, eos_id=eos,
               mask_id=tokenizer.mask_token_id, seed=seed)
    events = list(api.stream(model, params, prompt, **ask))
    answer = {p: t for event in events if event.committed for p, t in zip(event.numbers, event.tokens)}
    end = min([max_new_tokens - 1, *(p for p, t in answer.items() if t == eos)])
    places = [p for p in sorted(answer) if p <= end]
    final = dict(zip(places, _texts(tokenizer, [answer[p] for p in places])))
    frames: list[dict[str, Any]] = []
    for event in events:
        if not frames or frames[-1]["forward"] != event.forward:
            frames.append({"forward": event.forward, "kind": event.kind, "drafts": [], "commits": []})
        if event.committed:
            frames[-1]["commits"] += [[p, final[p], origin] for p, origin in zip(event.numbers, event.origin)
                                      if p <= end]
        else:
            drafts = zip(event.numbers, _draft_texts(tokenizer, event))
            frames[-1]["drafts"] += [[p, text] for p, text in drafts if p <= end]
    drawn = None
    if isinstance(decoder, AsyncLane):
        record = api.generate(model, params, [prompt], **ask).record
        drawn = timeline.picture(history(record, 0), timeline.refreshes(decoder, int(record["iterations"][0])))
    return {"name": name, "slot_size": getattr(decoder, "slot_size", None), "timeline": drawn, "frames": frames}


def _texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """What a replay shows of tokens that follow each other."""
    texts = []
    for ends, run in itertools.groupby(tokens, lambda token: token == tokenizer.eos_token_id):
        run = list(run)
        texts += [""] * len(run) if ends else [text or INCOMPLETE for text in pieces(tokenizer, run)]
    return texts


def _draft_texts(tokenizer: PreTrainedTokenizerBase, event: api.Event) -> list[str]:
    runs = itertools.groupby(enumerate(zip(event.numbers, event.tokens)), lambda item: item[1][0] - item[0])
    return [text for _, run in runs for text in _texts(tokenizer, [token for _, (_, token) in run])]
