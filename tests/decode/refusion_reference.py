"""ReFusion written plainly: one row, no cache, no fixed shapes; every forward runs the whole history.

Each committed token remembers which committed tokens its key and value were made from, so that cache reuse
(Table 4) is a dense mask here and nothing else.
"""

import numpy as np


class Reference:
    """Decodes one prompt by the paper's rule; `probabilities(tokens, positions, mask)` is the model."""

    def __init__(self, probabilities, prompt, *, k, block, slot_threshold, token_threshold, length, eos, mask,
                 certainty="first", kv="reuse", completion="autoregressive", confidence_aware=True, slots_per_round=1,
                 compat=False):
        self.probabilities, self.k, self.block = probabilities, k, block
        self.slot_threshold, self.token_threshold = slot_threshold, token_threshold
        self.length, self.eos, self.mask = length, eos, mask
        self.certainty, self.kv, self.completion = certainty, kv, completion
        self.confidence_aware, self.slots_per_round, self.compat = confidence_aware, slots_per_round, compat
        self.tokens, self.positions = list(prompt), list(range(len(prompt)))
        self.sees = [list(range(i + 1)) for i in range(len(prompt))]
        self.start, self.calls, self.origin = len(prompt), 0, {}
        self.positions_read, self.waiting = dict.fromkeys(("denoise", "verify", "decode", "draft", "refresh"), 0), 0
        self.shares, self.kinds = [], {"mdm": 0, "global_verify": 0, "refine_draft": 0, "refine_verify": 0}

    def forward(self, tokens, positions, causal_from):
        """Probabilities at new tokens; new token i sees all committed ones and new ones from causal_from[i] to i."""
        old, new = len(self.tokens), len(tokens)
        mask = np.zeros((old + new, old + new), bool)
        for i, seen in enumerate(self.sees):
            mask[i, seen] = True
        for i in range(new):
            mask[old + i, :old] = True
            mask[old + i, old + causal_from[i]: old + i + 1] = True
        self.calls += 1
        return self.probabilities(self.tokens + list(tokens), self.positions + list(positions), mask)[old:]

    def joint(self, tokens, positions):
        """One causal sequence after what is committed."""
        return self.forward(tokens, positions, [0] * len(tokens))

    def apart(self, rows):
        """Slots that do not see each other; rows of (positions, tokens). Returns probabilities per row."""
        tokens, positions, since, borders = [], [], [], [0]
        for places, ids in rows:
            since += [len(tokens)] * len(ids)
            tokens += list(ids)
            positions += list(places)
            borders.append(len(tokens))
        p = self.forward(tokens, positions, since)
        return [p[a:b] for a, b in zip(borders, borders[1:])]

    def commit(self, rows, joint, origins=None):
        """Appends rows of (positions, tokens); jointly, or each seeing only itself."""
        base = len(self.tokens)
        for r, (places, ids) in enumerate(rows):
            own = len(self.tokens)
            for j, (place, token) in enumerate(zip(places, ids)):
                self.tokens.append(int(token))
                self.positions.append(int(place))
                here = len(self.tokens) - 1
                self.sees.append(list(range(base)) + list(range(base if joint else own, here + 1)))
                self.origin[int(place) - self.start] = 0 if origins is None else origins[r][j]

    def run(self):
        """Returns {generated index: token} as committed, and the number of forwards."""
        ended = False
        for begin in range(0, self.length, self.block):
            slots = [s for s in range(begin, min(begin + self.block, self.length), self.k)]
            while slots:
                slots, eos = self.round(slots)
                ended = ended or eos
            if ended:
                break
        return {p - self.start: t for p, t in zip(self.positions[self.start:], self.tokens[self.start:])}, self.calls

    def round(self, slots):
        """One plan-and-infill iteration over the open slots; returns those left and whether EOS came."""
        k, places = self.k, lambda s: [self.start + s + j for j in range(self.k)]
        p = self.joint([self.mask] * (k * len(slots)), [q for s in slots for q in places(s)])
        self.kinds["mdm"] += 1
        # what was infilled last has been predicted but not fed
        self.positions_read["denoise"] += k * len(slots) + self.waiting
        self.waiting = 0
        draft = p.argmax(-1).reshape(-1, k)
        confidence = p.max(-1).reshape(-1, k)
        score = confidence[:, 0] if self.certainty == "first" else confidence.mean(1)
        if self.confidence_aware:
            chosen = [i for i in range(len(slots)) if score[i] > self.slot_threshold] or [int(score.argmax())]
        else:
            chosen = sorted(np.argsort(-score, kind="stable")[: self.slots_per_round].tolist())
        rows = [[places(slots[i]), list(draft[i])] for i in chosen]
        length = 1
        if self.confidence_aware:
            p = self.joint([t for _, ids in rows for t in ids], [q for pl, _ in rows for q in pl])
            self.kinds["global_verify"] += 1
            self.positions_read["verify"] += k * len(rows)
            ok = np.ones((len(rows), k), bool)
            for r, (_, ids) in enumerate(rows):
                ok[r, 0] = self.compat or confidence[chosen[r], 0] > self.token_threshold
                for j in range(1, k):
                    ok[r, j] = p[r * k + j - 1][ids[j]] > self.token_threshold
            flat = ok.reshape(-1)
            prefix = int(np.argmin(flat)) if not flat.all() else flat.size
            accepted = [t for _, ids in rows for t in ids][:prefix]
            if self.eos in accepted:
                r, j = divmod(accepted.index(self.eos), k)
                self.shares.append(k * (r + 1) / 2)
                self.commit([*rows[:r], [rows[r][0][: j + 1], rows[r][1][: j + 1]]], joint=True)
                cut = slots[chosen[r]]
                return [s for i, s in enumerate(slots) if s < cut and i not in chosen[:r]], True
            if prefix >= k:
                whole = prefix // k
                self.shares.append(k * whole / 2)
                self.commit(rows[:whole], joint=True)
                return [s for i, s in enumerate(slots) if i not in chosen[:whole]], False
            ok[:, 0] = True
            lengths = [int(np.argmin(o)) if not o.all() else k for o in ok]
            if self.completion == "redraft" or self.compat:
                return self.redraft(slots, chosen, rows, lengths)
            length = min(lengths)
        return self.infill(slots, chosen, rows, length)

    def infill(self, slots, chosen, rows, length):
        rows = [[pl, ids[:length]] for pl, ids in rows]
        origins = [[0] * length for _ in rows]
        whole, forwarded = lambda r: len(rows[r][1]) == self.k or self.eos in rows[r][1], False

        def settle():
            for r in range(len(rows)):
                if self.eos in rows[r][1]:
                    rows[r][1] = rows[r][1][: rows[r][1].index(self.eos) + 1]
                    del rows[r + 1:]
                    return

        settle()
        while not all(whole(r) for r in range(len(rows))):
            p = self.apart([[pl[: len(ids)], ids] for pl, ids in rows])
            self.positions_read["decode"] += len(rows) if forwarded else sum(len(ids) for _, ids in rows)
            forwarded = True
            for r in range(len(rows)):
                if not whole(r):
                    rows[r][1].append(int(p[r][-1].argmax()))
                    origins[r].append(1)
            settle()
        joint = not forwarded
        if self.kv == "recompute":
            self.recompute(rows)
            joint = True
        elif forwarded or not self.confidence_aware:
            self.waiting = len(rows)
        return self.close(slots, chosen, rows, joint, origins)

    def redraft(self, slots, chosen, rows, lengths):
        k, drafted, rounds = self.k, len(rows), 0
        while any(n < k for n in lengths):
            rounds += 1
            p = self.apart([[pl, ids[:n] + [self.mask] * (k - n)] for (pl, ids), n in zip(rows, lengths)])
            self.positions_read["draft"] += k * len(rows)
            self.positions_read["verify"] += k * len(rows)
            for r, n in enumerate(lengths):
                rows[r][1] = rows[r][1][:n] + [int(t) for t in p[r].argmax(-1)[n:]]
            p = self.apart(rows)
            for r, n in enumerate(lengths):
                length = min(n + 1, k)
                while length < k and p[r][length - 1][rows[r][1][length]] > self.token_threshold:
                    length += 1
                lengths[r] = max(n, length)
            for r in range(len(rows)):
                if self.eos in rows[r][1][: lengths[r]]:
                    del rows[r + 1:], lengths[r + 1:]
                    lengths[r] = k
                    break
        self.kinds["refine_draft"] += rounds
        self.kinds["refine_verify"] += rounds
        self.shares.append(k * drafted / (2 * rounds + 2))
        rows = [[pl, ids[: ids.index(self.eos) + 1] if self.eos in ids else ids] for pl, ids in rows]
        if self.kv == "recompute":
            self.recompute(rows)
        return self.close(slots, chosen, rows, self.kv == "recompute", [[0] * k for _ in rows])

    def recompute(self, rows):
        """One forward over what slots refined together now hold."""
        tokens = [t for _, ids in rows for t in ids]
        self.positions_read["refresh"] += len(tokens)
        self.joint(tokens, [q for pl, ids in rows for q in pl[: len(ids)]])

    def close(self, slots, chosen, rows, joint, origins):
        self.commit([[pl[: len(ids)], ids] for pl, ids in rows], joint, origins)
        gone = set(chosen if self.compat else chosen[: len(rows)])
        eos = self.eos in rows[-1][1]
        if eos and self.compat:  # the released code closes by row, not by slot
            return [s for i, s in enumerate(slots) if i not in gone and i < len(rows) - 1], True
        cut = slots[chosen[len(rows) - 1]] if eos else self.length + self.k
        return [s for i, s in enumerate(slots) if i not in gone and s < cut], eos
