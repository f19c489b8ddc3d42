"""Masked-diffusion decoding as a plain loop over one row: no cache, no batch, no padding, everything recomputed."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def plan(masks: int, steps: int) -> list[int]:
    """Block diffusion's numbers of tokens: what is left over the steps left, half to even, zeros left out."""
    counts = []
    for left in range(steps, 0, -1):
        counts.append(round(Fraction(masks, left)))
        masks -= counts[-1]
    return [count for count in counts if count]


def sureness(logits: np.ndarray, draft: int, confidence: str) -> float:
    """Confidence in a draft, from one output."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return {"probability": p[draft], "margin": p[draft] - np.delete(p, draft).max(),
            "entropy": float(np.sum(p * np.log(p + 1e-300)))}[confidence]


def factor_count(ordered: list[float], factor: float) -> int:
    """Fast-dLLM's factor rule on confidences in falling order."""
    for r in range(2, len(ordered) + 1):
        if ordered[r - 1] < 1 - factor / (r + 1):
            return len(ordered) if r == len(ordered) else r - 1
    return len(ordered)


def decode(predict, prompt: list[int], *, length: int, mask: int, eos: int, shift: int, block: int = 0,
           rule: str = "threshold", confidence: str = "probability", early_stop: str = "fill", steps: int = 0,
           eps: float = 1e-3, threshold: float = 0.9, factor: float = 1.0, eos_run: int = 1, first_token: bool = False,
           multi_block: bool = False, block_add_threshold: float = 0.1, decoded_token_threshold: float = 0.95,
           cfg_scale: float = 0.0, cache: str = "none") -> tuple[list[int], list[int], int]:
    """Decodes one row.

    Args:
      predict: (ids, which keys each query sees) -> (tokens, V) outputs as the model gives them.
      Others: as `MaskedDiffusion`, with cache "block" for block-causal visibility, else "none".

    Returns:
      The tokens, the forward that committed each (-1 for none), and the number of forwards.
    """
    P, block = len(prompt), block or length
    answer, at = [mask] * length, [-1] * length
    blocks = [range(b, min(b + block, length)) for b in range(0, length, block)]
    number = (np.arange(P + length) + -P % block) // block if cache == "block" else np.zeros(P + length, int)
    visible = number[None, :] <= number[:, None]
    whole = steps or len(blocks) * min(block, length)
    per_block = max(whole // len(blocks), 1)
    forward, opened, step, current, late = 0, 1, 0, 0, set()
    while True:
        masked = [g for g in range(length) if at[g] < 0]
        if not masked:
            break
        first = masked[0] // block
        if first != current:
            inside = [answer[g] for b in blocks[:first] for g in b]
            if early_stop == "block" and eos in inside:
                break
            forward += cache == "block"  # the finished block, clean
            current, step = first, 0
        done = [1 - sum(at[g] < 0 for g in b) / len(b) for b in blocks]
        opened = max(opened, first + 1)
        if multi_block and opened < len(blocks) and done[opened - 1] >= block_add_threshold:
            opened += not (early_stop in ("fill", "late_fill") and eos in answer)

        outputs = predict(prompt + answer, visible)
        if cfg_scale:
            free = predict([mask] * P + answer, visible)
            outputs = free + (cfg_scale + 1) * (outputs - free)
        forward += 1
        eligible = sorted({g for b in blocks[first:opened] for g in b if at[g] < 0} | late)
        draft, sure = {}, {}
        for g in eligible:
            logits = outputs[P + g - shift].astype(np.float64)
            draft[g] = int(np.delete(logits, mask).argmax())
            draft[g] += draft[g] >= mask
            sure[g] = sureness(logits, draft[g], confidence)
        order = sorted(eligible, key=lambda g: -sure[g])

        least = -threshold if confidence == "entropy" else threshold
        reach = sum(sure[g] >= least for g in eligible)
        time = lambda i, total: 1 + (eps - 1) * i / total
        falling = lambda masks, i, total: math.floor(masks * (1 - time(i + 1, total) / time(i, total)))
        if rule == "threshold":
            count = max(reach, 1)
        elif rule == "factor":
            count = factor_count([sure[g] for g in order], factor)
        elif rule == "budget":
            done = length - len(masked)
            count = max(min(reach, min(first * per_block + step + 1, whole) * length // whole - done), 1)
        elif rule == "shares":
            count = plan(len(blocks[first]), per_block)[step]
        else:
            if rule == "quota":
                count = len(blocks[first]) // per_block + (step < len(blocks[first]) % per_block)
            elif rule == "timesteps":
                count = falling(len(masked), first * per_block + step, whole)
            else:
                count = falling(len(eligible), step, per_block)
            count = len(eligible) if step >= per_block - 1 else count
        chosen = set(order[:count])
        if first_token and step == 0:
            chosen = {eligible[0]}
        if multi_block:
            turn = [b for b in range(first, opened) if any(at[g] < 0 for g in blocks[b])
                    and (b == 0 or done[b - 1] >= decoded_token_threshold)]
            if turn and not chosen & set(blocks[turn[0]]):
                chosen.add(next(g for g in order if g in blocks[turn[0]]))
        step += 1
        for g in chosen:
            answer[g], at[g] = draft[g], at[g] if g in late else forward

        late = set()
        left = [g for g in range(length) if at[g] < 0]
        ends = [g for g in range(length) if at[g] >= 0 and answer[g] == eos]
        filled = []
        if early_stop == "fill" and ends:
            filled = range(ends[0] + 1, length)
        elif early_stop == "late_fill" and ends and left:
            filled = range(ends[0] + 1, length)
            late = set(filled) & set(left)
        elif early_stop == "run" and left and left == list(range(left[0], length)) and left[0] >= eos_run:
            filled = left if set(answer[left[0] - eos_run: left[0]]) == {eos} else []
        for g in filled:
            answer[g], at[g] = eos, forward if at[g] < 0 else at[g]
    return answer, at, forward
