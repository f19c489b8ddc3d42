"""Block diffusion as a plain loop: every forward reads the whole row under a dense mask, nothing is kept.

Letters: T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import numpy as np


def sees(told, prompt: int, first: int, size: int, start: int, length: int) -> np.ndarray:
    """Returns the (T, T) bool mask of a row whose last block begins at position `start`; its blocks are counted from
    position `first`, which may lie within the prompt."""
    at = np.arange(length)
    end = (at - first) // size * size + first + size - 1
    limit = np.where(at >= start, start + size - 1, end if told.commit != "causal" else at)
    if told.commit == "none":
        limit = end
    of_prompt = {"full": prompt - 1, "causal": at, "block-causal": end}[told.prompt]
    limit = np.where(at < min(prompt, first), of_prompt, limit)
    return at[None, :] <= limit[:, None]


def decode(outputs, prompt: list[int], told, *, size: int, limit: int, threshold: float, mask: int, eos: int,
           sub: int | None = None) -> tuple[list[int], dict[str, int]]:
    """Decodes one prompt greedily: all drafts of the open part that are at least as probable as a threshold, and the
    surest.

    Args:
      outputs: function (tokens (T,), positions (T,), mask (T, T)) -> (T, V) logits.
      prompt: token ids.
      told: `Conventions`.
      size, sub: tokens of a block, and of what is open at once.
      limit: tokens to generate.
      threshold: probability.
      mask, eos: ids.

    Returns:
      The answer up to and including EOS, and forwards by kind.
    """
    P, shift = len(prompt), int(told.logits == "shifted")
    first = P // size * size if told.grid == "absolute" else P
    row, start = list(prompt), first
    count = {"prefill": int(told.commit != "none" and first > 0), "denoise": 0, "commit": 0}

    def run(row, at):
        T = len(row)
        if told.commit == "none" and told.prompt == "causal":  # known tokens first
            order = np.argsort([token == mask for token in row], kind="stable")
            out = outputs(np.array(row)[order], order, np.tril(np.ones((T, T), bool)))
            return out[np.argsort(order)]
        return outputs(np.array(row), np.arange(T), sees(told, P, first, size, at, T))

    def over(row):
        answer = row[P : P + limit]
        if eos in answer and mask not in answer[: answer.index(eos)]:
            return True
        return len(answer) == limit and mask not in answer

    def committed(row):
        return outputs(np.array(row), np.arange(len(row)), sees(told, P, first, size, len(row), len(row)))[-1:]

    def follower(row):
        out = committed(row)[0].copy()
        out[mask] = -np.inf
        return int(out.argmax())

    if told.seed == "autoregressive" and first == P:
        row.append(follower(row))
    while not over(row):
        row += [mask] * (start + size - len(row))
        while mask in row[start:] and not over(row):
            count["denoise"] += 1
            logits = run(row, start)
            if shift and (told.commit != "none" or not start):  # what predicts the first token is the committed row's
                logits = np.concatenate([committed(row[:start]) if start else logits[:1], logits[start:-1]])
            else:
                logits = logits[start - shift : len(row) - shift]
            part = {}
            for i, token in enumerate(row[start:]):
                if token == mask and (sub is None or not part or i // sub == next(iter(part)) // sub):
                    chance = np.exp(logits[i] - logits[i].max())
                    chance /= chance.sum()
                    best = int(np.where(np.arange(len(chance)) == mask, -1, chance).argmax())
                    part[i] = chance[best], best
            surest = max(part, key=lambda i: part[i][0])
            for i, (sure, token) in part.items():
                if sure >= threshold or i == surest:
                    row[start + i] = token
        if over(row):
            break
        if told.commit != "none":
            count["commit"] += 1
        start += size
        if told.seed == "autoregressive":
            row.append(follower(row))
    answer = row[P : P + limit]
    return answer[: answer.index(eos) + 1] if eos in answer else answer, count

