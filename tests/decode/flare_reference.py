"""The two FLARE decoders as plain loops that keep nothing: every forward runs a row's whole text anew, alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass, Window


class Model:
    """Logits of one row: clean tokens, then masks or drafts that see one another and all before them.

    Attributes:
      calls: forwards so far.
    """

    def __init__(self, model, params, length: int = 64):
        self.calls = 0

        @jax.jit
        def run(tokens, clean, total):
            score, S = model.scorer(params), length
            index = jnp.arange(S, dtype=jnp.int32)[None]
            noisy, valid = (index >= clean) & (index < total), index < total
            told = Pass(index, vis.Visibility(
                jnp.zeros_like(index), jnp.where(noisy, clean - 1, jnp.where(valid, index, vis.NONE)),
                jnp.where(noisy, 0, vis.NONE), jnp.zeros_like(index), jnp.where(index < clean, index, vis.NONE),
                jnp.where(noisy, 0, vis.NONE), jnp.zeros_like(index)), jnp.where(valid, index, S),
                Window(clean[None], (total - clean)[None]))
            return score.head(score.hidden(tokens[None], told, score.init_cache(1, S))[0])[0]

        self._run, self._length = run, length

    def __call__(self, clean: list[int], noisy: list[int] = ()) -> np.ndarray:
        """Returns a row of (V,) logits for each clean and each noisy token."""
        self.calls += 1
        tokens = np.zeros(self._length, np.int32)
        text = [*clean, *noisy]
        tokens[: len(text)] = text
        return np.asarray(self._run(tokens, np.int32(len(clean)), np.int32(len(text))))[: len(text)]


def ar_trust(run: Model, prompt: list[int], limit: int, eos: int | None, mask: int, horizon: int, on_reject: str,
             cold_start: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the greedy answer, and of every round how many drafts were held and how many of them kept."""
    said, drafts, rounds = [int(run(prompt)[-1].argmax())], [], []
    while len(said) < limit and eos not in said:
        masks = horizon - 1 if drafts or cold_start == "compact" else 2 * (horizon - 1)
        logits = run([*prompt, *said, *drafts], [mask] * masks)
        clean = logits[len(prompt) + len(said) - 1 : len(logits) - masks].argmax(-1).tolist()
        noisy = logits[len(logits) - masks :].argmax(-1).tolist()
        kept = next((i for i, draft in enumerate(drafts) if draft != clean[i]), len(drafts))
        rounds.append((len(drafts), kept))
        said += [*drafts[:kept], clean[kept]]
        rejected = kept < len(drafts)
        drafts = noisy[-(horizon - 1) :] if cold_start == "wide_last" else noisy[: horizon - 1]
        drafts = [] if rejected and on_reject == "restart" else drafts
    return cut(said, limit, eos), rounds


def diffusion_trust(run: Model, prompt: list[int], limit: int, eos: int | None, mask: int, block_size: int, steps: int,
                    thresholds: list[float], seeded: bool = True, shift: int = 1
                    ) -> tuple[list[int], list[list[list[int]]]]:
    """Returns the greedy answer, and of every block which offsets each denoise pass filled."""
    text, trace = list(prompt), []
    for _ in range(-(-limit // block_size)):
        behind = run(text)[-1]
        block = [int(behind.argmax()) if seeded else mask] + [mask] * (block_size - 1)
        still = list(range(seeded, block_size))
        trace.append([])
        for step in range(steps):
            if not still:
                break
            own = run(text, block)[len(text) :]
            logits = (np.concatenate([behind[None], own[:-1]]) if shift else own).astype(np.float64)
            chance = np.exp(logits - logits.max(-1, keepdims=True))
            chance = (chance / chance.sum(-1, keepdims=True)).max(-1)
            filled = [i for i in still if chance[i] >= thresholds[step] or step == steps - 1]
            for i in filled:
                block[i] = int(logits[i].argmax())
            trace[-1].append(filled)
            still = [i for i in still if i not in filled]
        text += block
        if eos in block:
            break
    return cut(text[len(prompt) :], limit, eos), trace


def cut(tokens: list[int], limit: int, eos: int | None) -> list[int]:
    """Returns an answer up to its limit and its first EOS."""
    tokens = tokens[:limit]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
