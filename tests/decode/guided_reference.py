"""Guided diffusion written plainly: one row, Python lists, no padding, the guide without a cache.

It asks the drafter for logits of a stretch of tokens while all others keep the keys and values they had, and the
guide for logits of a whole sequence.
"""

from __future__ import annotations

import numpy as np


def softmax(logits):
    mass = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return mass / mass.sum()


class Reference:
    """A row being decoded; see `decode.guided.Guided` for the hyperparameters.

    Args:
      drafter: (tokens, start, stop, seen) -> (stop - start, V) raw logits of tokens [start, stop) among [0, seen).
      guide: guide ids -> (T, V') logits, causal.
      prompt: draft ids.
      to_guide, to_draft: id -> id of the other vocabulary, -1 for none; unmapped ids are fed as `placeholder`.
      shift: the drafter's raw output at index i predicts token i + shift.
      guide_prompt: guide ids of the prompt; None maps the drafter's.
    """

    def __init__(self, drafter, guide, prompt, *, length, eos, mask, to_guide, to_draft, placeholder, shift,
                 rule="agreed", accept="exact", top_k=2, share=0.5, tau=0.5, threshold=0.0, cache="prompt",
                 block_length=256, reach=128, verify_batch_size=32, guide_prompt=None):
        self.drafter, self.guide, self.shift = drafter, guide, shift
        self.tokens, self.start, self.end = list(prompt), len(prompt), len(prompt) + length
        self.eos, self.mask, self.placeholder = eos, mask, placeholder
        self.to_guide, self.to_draft = to_guide, to_draft
        self.rule, self.accept, self.top_k = rule, accept, top_k
        self.share, self.tau, self.threshold = share, tau, threshold
        self.cache, self.block, self.reach = cache, block_length, reach
        self.chunk = verify_batch_size or length
        self.read = self.feed(prompt) if guide_prompt is None else list(guide_prompt)
        self.origin, self.at, self.agreed = [], [], []
        self.forwards, self.positions = {"draft": 0, "guide": 1}, {"draft": 0, "guide": len(self.read)}

    def run(self):
        """Returns the committed tokens."""
        while len(self.tokens) < self.end and self.eos not in self.tokens[self.start:]:
            self.round()
        return self.tokens[self.start:]

    def window(self):
        """Where the drafter's window begins and ends."""
        first, done = len(self.tokens), len(self.tokens) - self.start
        if done == 0 or self.cache == "none":
            return 0, self.end
        if self.cache == "prompt":
            return self.start, self.end
        if self.cache == "free":
            return self.start + done - done % self.block - self.shift, self.end
        if self.cache == "aggressive":
            return first - 1, self.end
        if self.cache == "delayed":
            fresh = done - self.at.count(self.at[-1])
            return self.start + fresh - fresh % self.block - self.shift, self.end
        if self.cache == "sliding":
            return max(first - 1 - self.reach, 0), min(first - 1 + self.reach, self.end)
        return first - first % self.block, self.end

    def drafts(self):
        """One forward of the drafter: a token and its logits for every masked position of its window."""
        begin, stop = self.window()
        masked = self.tokens + [self.mask] * (self.end - len(self.tokens))
        logits = np.array(self.drafter(masked, begin, stop, stop), np.float32)
        logits[:, self.mask] = -np.inf
        self.forwards["draft"] += 1
        self.positions["draft"] += stop - begin
        out = [logits[max(i - self.shift - begin, 0)] for i in range(len(self.tokens), stop)]
        return [int(x.argmax()) for x in out], out

    def accepted(self, draft, own, logits):
        """The guide's verdict on one draft, from the drafter's logits and its own."""
        order = np.argsort(-logits, kind="stable")
        names = [int(self.to_draft[i]) for i in order]
        probability, sure = softmax(logits), softmax(own)
        if sure[draft] < self.threshold:
            return False
        if self.accept == "exact":
            return names[0] == draft
        if self.accept == "relaxed":
            return names[0] == draft or bool(sure.max() > self.tau * probability.max())
        if draft not in names[: self.top_k]:
            return False
        likely = probability[order[names.index(draft)]] >= self.share * probability.max()
        return self.accept == "top_k" or bool(likely)

    def feed(self, tokens):
        return [int(self.to_guide[t]) if self.to_guide[t] >= 0 else self.placeholder for t in tokens]

    def round(self):
        """Drafts, lets the guide read, commits."""
        drafts, own = self.drafts()
        known = self.read + self.feed(self.tokens[self.start:])
        logits = np.asarray(self.guide(known + self.feed(drafts)))[len(known) - 1:]
        verdicts = [self.accepted(*each) for each in zip(drafts, own, logits)]
        agreed = verdicts.index(False) if False in verdicts else len(drafts)
        correction = int(self.to_draft[logits[agreed].argmax()]) if agreed < len(drafts) else -1
        # chunks that the guide had to read: up to the one with the first rejection or accepted end of sequence
        ends = drafts.index(self.eos) if self.eos in drafts[:agreed] else len(drafts)
        chunks = min(agreed, ends, len(drafts) - 1) // self.chunk + 1
        self.forwards["guide"] += chunks
        self.positions["guide"] += min(chunks * self.chunk, len(drafts))

        new = [(token, 0) for token in drafts[:agreed]]
        free = self.rule == "speculative" or (self.rule == "one_free" and not new)
        if free and correction >= 0 and correction != self.mask:
            new.append((correction, 1))
        elif not new:
            new.append((drafts[0], 0))
        for token, origin in new:
            self.tokens.append(token)
            self.origin.append(origin)
            self.at.append(self.forwards["draft"])
            if token == self.eos:
                break
        self.agreed.append(agreed)
