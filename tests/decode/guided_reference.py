"""Guided diffusion written plainly: one row, Python lists, no padding, the guide without a cache.

It asks the drafter for logits of a stretch of tokens while all others keep the keys and values they had, and the
guide for logits of a whole sequence.
"""

from __future__ import annotations

import numpy as np


class Reference:
    """A row being decoded; see `decode.guided.Guided` for the hyperparameters.

    Args:
      drafter: (tokens, start, stop, seen) -> (stop - start, V) raw logits of tokens [start, stop) among [0, seen).
      guide: guide ids -> (T, V') logits, causal.
      prompt: draft ids.
      to_guide, to_draft: id -> id of the other vocabulary, -1 for none; unmapped ids are fed as `placeholder`.
      shift: the drafter's raw output at index i predicts token i + shift.
    """

    def __init__(self, drafter, guide, prompt, *, length, eos, mask, to_guide, to_draft, placeholder, shift,
                 rule="paper", acceptance="exact", top_k=2, relative_probability=0.5, logit_threshold=0.5,
                 draft_threshold=0.0, cache="prompt", block_length=256, window_size=128, verify_batch_size=32):
        self.drafter, self.guide, self.shift = drafter, guide, shift
        self.tokens, self.start, self.end = list(prompt), len(prompt), len(prompt) + length
        self.eos, self.mask, self.placeholder = eos, mask, placeholder
        self.to_guide, self.to_draft = to_guide, to_draft
        self.rule, self.acceptance, self.top_k = rule, acceptance, top_k
        self.ratio, self.tau, self.sure = relative_probability, logit_threshold, draft_threshold
        self.cache, self.block, self.reach = cache, block_length, window_size
        self.chunk = verify_batch_size or length
        self.origin, self.at, self.agreed = [], [], []
        self.forwards, self.positions = {"draft": 0, "guide": 1}, {"draft": 0, "guide": len(prompt)}

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
        """One forward of the drafter: a token, its logit and probability for every masked position of its window."""
        begin, stop = self.window()
        masked = self.tokens + [self.mask] * (self.end - len(self.tokens))
        logits = np.array(self.drafter(masked, begin, stop, stop), np.float32)
        logits[:, self.mask] = -np.inf
        self.forwards["draft"] += 1
        self.positions["draft"] += stop - begin
        out = [logits[max(i - self.shift - begin, 0)] for i in range(len(self.tokens), stop)]
        return [int(x.argmax()) for x in out], [float(x.max()) for x in out], [
            1 / np.exp(x - x.max()).sum() for x in out]

    def accepted(self, draft, draft_logit, logits):
        """The guide's verdict on one draft."""
        order = np.argsort(-logits, kind="stable")
        names = [int(self.to_draft[i]) for i in order]
        if self.acceptance == "exact":
            return names[0] == draft
        if draft not in names[: self.top_k]:
            return False
        own = logits[order[names.index(draft)]]
        if self.acceptance == "top_k_relative":
            return np.exp(own - logits.max()) >= self.ratio
        return self.acceptance == "top_k" or draft_logit > self.tau * logits.max()

    def feed(self, tokens):
        return [int(self.to_guide[t]) if self.to_guide[t] >= 0 else self.placeholder for t in tokens]

    def round(self):
        """Drafts, lets the guide read, commits."""
        drafts, confidence, probability = self.drafts()
        logits = np.asarray(self.guide(self.feed(self.tokens + drafts)))[len(self.tokens) - 1:]
        verdicts = [self.accepted(d, c, x) and p >= self.sure for d, c, p, x in zip(
            drafts, confidence, probability, logits)]
        agreed = verdicts.index(False) if False in verdicts else len(drafts)
        correction = int(self.to_draft[logits[agreed].argmax()]) if agreed < len(drafts) else -1
        # chunks that the guide had to read: up to the one with the first rejection or accepted end of sequence
        ends = drafts.index(self.eos) if self.eos in drafts[:agreed] else len(drafts)
        chunks = min(agreed, ends, len(drafts) - 1) // self.chunk + 1
        self.forwards["guide"] += chunks
        self.positions["guide"] += min(chunks * self.chunk, len(drafts))

        new = [(token, 0) for token in drafts[:agreed]]
        if self.rule == "speculative" and correction >= 0 and correction != self.mask:
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
