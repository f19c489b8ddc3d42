"""AsyncLane for one row in plain Python: lists of lanes, a dictionary for a cache, one lane at a time.

It decodes scripted cases (`tests.oracle.scripted_model`) and tells everything that the stored ones do, in their format.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

WORD = (1 << 32) - 1


def mix(a: int) -> int:
    a &= WORD
    a = (a ^ (a >> 16)) * 0x7FEB352D & WORD
    a = (a ^ (a >> 15)) * 0x846CA68B & WORD
    return a ^ (a >> 16)


class Model:
    """One row's function: the value of a token, and the logits of a query that sees a context."""

    def __init__(self, script: dict, vocab: dict, profiles: dict):
        self.script, self.vocab, self.pick = script, vocab, profiles[script["profile"]]
        self.tokens, self.levels = dict(script["token"]), dict(script["level"])

    def value(self, position: int, token: int) -> int:
        return mix(mix(self.script["seed"] + 0x9E3779B9 * (position + 1)) + token)

    def logits(self, query: int, context: int) -> np.ndarray:
        j, V = query + self.script["shift"], self.vocab["size"]
        h = mix(mix(self.script["seed"] ^ (0x85EBCA6B * (j + 1) & WORD)) + (context if self.script["context"] else 0))
        a = self.tokens.get(j, self.pick[h & 255])
        coarse = self.levels.get(j, 4 + (h >> 8) % 60)
        found = np.zeros(V)
        found[[self.vocab["mask"], *self.vocab["eos"]]] = -100.0
        chance = lambda steps: (steps * 64 + j % 64 + 0.5) / 4096
        if a not in self.vocab["eos"]:
            found[a] = math.log(chance(coarse) * (V - 4) / (1 - chance(coarse)))
            return found
        b, c2, c = 1 + (h >> 20) % (self.vocab["ordinary"] - 1), chance(4 + (h >> 14) % 60), chance(32 + coarse // 2)
        found[b] = math.log(c2 * (V - 4) / (1 - c2))
        found[a] = math.log(c * (V - 4 + math.exp(found[b])) / (1 - c))
        return found


@dataclasses.dataclass
class Lane:
    id: int
    role: str
    start: int
    length: int
    parent: int
    group: int
    state: str = "active"
    t: int = 0
    first: int = 0
    last: int = 0
    how: str = "open"
    v: int = 0


class Reference:
    """Decodes one case; `expected` holds what came of it."""

    def __init__(self, case: dict, rules: dict, vocab: dict, profiles: dict):
        self.hp, self.rule, self.eos, self.mask = case["hp"], rules[case["rule"]], set(case["eos"]), vocab["mask"]
        self.model = Model(case["model"], vocab, profiles)
        self.P, self.L, self.shift = len(case["prompt"]), case["hp"]["max_new_tokens"], case["model"]["shift"]
        self.x = [*case["prompt"], *[self.mask] * self.L]
        self.cache: dict[int, int] = {}
        self.lanes = [Lane(0, "gen", 0, min(self.hp["block_size"], self.L), -1, 0)]
        self.groups, self.t, self.events, self.splits = 0, 0, [], []
        self.counts = dict.fromkeys((
            "prefill", "iterations", "groups", "refresh", "reuse", "calls", "merged_calls", "lane_forwards",
            "query_positions", "fork_pairs", "splits", "forks_refused", "drafts", "commits", "eos_suppressed",
            "max_active"), 0)
        self.expected = self.decode()

    # --- the model

    def compact(self) -> tuple[int, dict[int, np.ndarray]]:
        reach = max(lane.start + self.valid(lane) for lane in self.lanes)
        length = min(self.P + self.L, self.P + reach + self.hp["margin"])
        self.cache.update({q: self.model.value(q, self.x[q]) for q in range(length)})
        return length, self.full_view(length)

    def full_view(self, length: int) -> dict[int, np.ndarray]:
        context = sum(self.model.value(q, self.x[q]) for q in range(length)) & WORD
        return {q: self.model.logits(q, context) for q in range(length)}

    def window(self, lane: Lane) -> tuple[dict[int, np.ndarray], int]:
        hp, begin = self.hp, self.P + lane.start
        w = hp["lookahead"] if lane.role == "gen" or hp["refine_lookahead"] else 0
        first, stop = max(begin - self.shift, 0), min(self.P + self.L, begin + lane.length + w)
        context = sum(self.cache[q] for q in range(first))
        context += sum(self.model.value(q, self.x[q]) for q in range(first, stop))
        return {q: self.model.logits(q, context & WORD) for q in range(first, stop)}, stop

    # --- the rules

    def z(self, lane: Lane) -> list[int]:
        return self.x[self.P + lane.start : self.P + lane.start + lane.length]

    def valid(self, lane: Lane) -> int:
        for i, token in enumerate(self.z(lane)):
            if token == self.mask or token in self.eos:
                return i
        return lane.length

    def is_boundary(self, position: int) -> bool:
        """Whether the delimiter at a row position closes what comes before it."""
        rule, x = self.rule, self.x
        before = x[position - 1] if position else None
        after = x[position + 1] if position + 1 < len(x) else None
        if rule["numeric_rule"] != "off" and x[position] in rule["numeric_delimiters"]:
            left = before is not None and (before == self.mask or before in rule["digit_end"])
            right = after is not None and (after == self.mask or after in rule["digit_start"])
            if left and (right or rule["numeric_rule"] == "left"):
                return False
        depth = quotes = 0
        for token in x[self.P : position + 1]:
            if token != self.mask:
                depth = max(0, depth - rule["close"].count(token)) + rule["open"].count(token)
                quotes += token in rule["quote"]
        incomplete = before is not None and (before == self.mask or before in rule["no_fork_after"])
        return depth == 0 and quotes % 2 == 0 and not (rule["no_fork_after"] and incomplete)

    def split(self, lane: Lane) -> int:
        z, K, found = self.z(lane), self.rule["interval"], 0
        if K:
            fits = K <= lane.length and z[K - 1] != self.mask and not self.eos & set(z[:K])
            return K if fits else 0
        for i, token in enumerate(z):
            if token in self.eos:
                break
            if token in self.rule["delimiters"] and self.is_boundary(self.P + lane.start + i):
                found = i + 1
        return found

    # --- the loop

    def decode(self) -> dict:
        hp, cached = self.hp, self.hp["cache"] == "lane"
        early = None
        if cached:
            length, early = self.compact()
            self.counts["prefill"], self.counts["calls"], self.counts["merged_calls"] = 1, 1, 1
            self.counts["query_positions"] += length
            self.events.append({"t": 0, "kind": "prefill", "length": length})
            early = (length, early) if hp["reuse_prefill"] else None
        while any(lane.state == "active" for lane in self.lanes):
            if hp["max_iterations"] and self.t >= hp["max_iterations"]:
                break
            self.iterate(cached, early)
            early = None
        return self.told()

    def iterate(self, cached: bool, early: tuple | None) -> None:
        hp, counts = self.hp, self.counts
        self.t += 1
        active = [lane for lane in self.lanes if lane.state == "active"]
        event, fresh, refreshed = {"t": self.t, "lanes": [], "then": []}, None, 0
        if cached and hp["refresh_interval"] and self.t > 1 and (self.t - 1) % hp["refresh_interval"] == 0:
            refreshed, fresh = self.compact()
            for name in ("refresh", "calls", "merged_calls"):
                counts[name] += 1
            counts["query_positions"] += refreshed
            event["refresh"] = refreshed
        reused = early if early else (refreshed, fresh) if fresh is not None and hp["reuse_refresh_logits"] else None
        outputs, own = {}, []
        for lane in active:
            if not cached:
                outputs[lane.id] = self.full_view(self.P + self.L), min(
                    self.P + self.L, self.P + lane.start + lane.length + hp["lookahead"])
            elif reused and self.P + lane.start + lane.length <= reused[0]:
                stop = min(self.P + self.L, self.P + lane.start + lane.length + hp["lookahead"], reused[0])
                outputs[lane.id] = reused[1], stop
            else:
                outputs[lane.id] = self.window(lane)
                own.append(lane)
                counts["query_positions"] += len(outputs[lane.id][0])
        if not cached:
            counts["query_positions"] += self.P + self.L
        counts["merged_calls"] += bool(own) or not cached
        counts["calls"] += len({lane.group for lane in own}) if cached else 1  # one for lanes of a group together
        counts["lane_forwards"] += len(own)
        groups = {lane.group for lane in active}
        counts["groups"] += len(groups) if cached else 1
        counts["reuse"] += len(groups - {lane.group for lane in own}) if cached else 0
        written = {
            q: self.model.value(q, self.x[q]) for lane in own if lane.role == "gen" or hp["prefix_state"] == "live"
            for q in range(self.P + lane.start, self.P + lane.start + lane.length)}
        for lane in active:
            event["lanes"].append(self.transfer(lane, *outputs[lane.id]))
            lane.t, lane.first = lane.t + 1, lane.first or self.t
        self.cache.update(written)
        counts["iterations"], counts["max_active"] = self.t, max(counts["max_active"], len(active))
        for lane in active:
            event["then"] += self.advance(lane, outputs[lane.id][0])
        self.events.append(event)

    def output(self, outputs: dict, position: int) -> np.ndarray:
        return outputs[max(position - self.shift, 0)]

    def transfer(self, lane: Lane, outputs: dict, stop: int) -> list:
        hp, begin = self.hp, self.P + lane.start
        sure = {}
        for q in range(begin, begin + lane.length):
            if self.x[q] == self.mask:
                logits = self.output(outputs, q).copy()
                raw = int(np.argmax(logits))
                if lane.role == "ref":
                    logits[list(self.eos)] = -np.inf
                weight = np.exp(logits - logits.max())
                sure[q] = weight.max() / weight.sum(), int(np.argmax(logits)), raw
        order = sorted(sure, key=lambda q: (-sure[q][0], q))
        if hp["commit"] == "top_n":
            chosen = order[: hp["top_n"]]
        else:
            chosen = [q for q in order if sure[q][0] >= hp["threshold"]] or order[:1]
        ahead = {}
        for q in range(begin + lane.length, stop if lane.role == "gen" else 0):
            if self.x[q] == self.mask:
                logits = self.output(outputs, q)
                weight, token = np.exp(logits - logits.max()), int(np.argmax(logits))
                if weight.max() / weight.sum() >= hp["tau_future"] and token not in self.eos:
                    ahead[q] = token
        chosen = sorted(chosen)
        for q in chosen:
            self.x[q] = sure[q][1]
            self.counts["eos_suppressed"] += lane.role == "ref" and sure[q][2] in self.eos
        for q, token in ahead.items():
            self.x[q] = token
        self.counts["commits"] += len(chosen)
        self.counts["drafts"] += len(ahead)
        return [lane.id, [q - self.P for q in chosen], [sure[q][1] for q in chosen],
                [q - self.P for q in ahead], list(ahead.values())]

    def advance(self, lane: Lane, outputs: dict) -> list:
        hp, full = self.hp, self.mask not in self.z(lane)
        spent = lane.t >= (hp["steps"] or hp["block_size"])
        if lane.role == "ref":
            if not (full or spent):
                return []
            self.end(lane, "complete" if full else "exhausted")
            waits = self.lanes[lane.id + 1]
            if waits.state == "waiting":
                waits.state = "active"
                return [["finish", lane.id, lane.how], ["wake", waits.id]]
            return [["finish", lane.id, lane.how]]
        then, p = [], 0 if hp["mode"] == "blockwise" else self.split(lane)
        filled = sum(token != self.mask for token in self.z(lane))
        goes = lane.start + p
        if (p and filled >= hp["rho_min"] * lane.length and lane.t >= hp["t_min"] and goes < self.L
                and not (hp["eos_frontier"] == "stop" and self.x[self.P + goes] in self.eos)):
            unfinished = sum(other.state != "done" for other in self.lanes)
            if hp["mode"] == "commit_and_advance" or unfinished + 1 <= hp["lane_capacity"]:
                return [self.fork(lane, p, outputs)]
            then.append(["refused", lane.id, p])
            self.counts["forks_refused"] += 1
        if not (full or spent):
            return then
        lane.v, how = self.valid(lane), "complete" if full else "exhausted"
        goes = lane.start + lane.v
        if lane.v == 0 or goes >= self.L or (hp["eos_frontier"] == "stop" and self.x[self.P + goes] in self.eos):
            self.end(lane, "stop")
            return [*then, ["stop", lane.id, lane.v, how]]
        self.end(lane, "spawn")
        self.groups += 1
        new = self.add("gen", goes, min(hp["block_size"], self.L - goes), lane)
        return [*then, ["spawn", lane.id, lane.v, how, new.id, new.start, new.length]]

    def fork(self, lane: Lane, p: int, outputs: dict) -> list:
        hp, goes = self.hp, lane.start + p
        self.groups += 1
        self.splits.append(p)
        length = min(hp["block_size"], self.L - goes)
        if hp["continuation_length"] == "remainder" and p < lane.length:
            length = lane.length - p
        if hp["mode"] == "commit_and_advance":
            holes = [q for q in range(self.P + lane.start, self.P + goes) if self.x[q] == self.mask]
            for q in holes:
                logits = self.output(outputs, q).copy()
                logits[list(self.eos)] = -np.inf
                self.x[q] = int(np.argmax(logits))
            self.counts["splits"] += 1
            self.counts["commits"] += len(holes)
            self.end(lane, "commit")
            lane.v = p
            new = self.add("gen", goes, length, lane)
            return ["commit", lane.id, p, [q - self.P for q in holes], [self.x[q] for q in holes], new.id, new.start,
                    new.length]
        self.counts["fork_pairs"] += 1
        self.end(lane, "fork")
        refines, new = self.add("ref", lane.start, p, lane), self.add("gen", goes, length, lane)
        new.state = "waiting" if hp["mode"] == "coupled" else "active"
        return ["fork", lane.id, p, refines.id, new.id, new.start, new.length]

    def end(self, lane: Lane, how: str) -> None:
        lane.state, lane.how, lane.last = "done", how, self.t

    def add(self, role: str, start: int, length: int, parent: Lane) -> Lane:
        self.lanes.append(Lane(len(self.lanes), role, start, length, parent.id, self.groups))
        return self.lanes[-1]

    # --- what is told

    def collect(self, lane: Lane) -> list[int]:
        """Depth first: the prefix, then what comes behind it."""
        children = [other for other in self.lanes if other.parent == lane.id]
        z = self.z(lane)
        if lane.how == "fork":
            return [token for child in children for token in self.collect(child)]
        if lane.how in ("spawn", "commit"):
            return [*z[: lane.v], *self.collect(children[0])]
        stops = {self.mask} | (self.eos if lane.role == "gen" else set())
        return z[: next((i for i, token in enumerate(z) if token in stops), len(z))]

    def told(self) -> dict:
        last = next(lane for lane in reversed(self.lanes) if lane.role == "gen")
        at = self.P + last.start + self.valid(last)
        pairs = [(r, self.lanes[r.id + 1]) for r in self.lanes if r.role == "ref"]
        measured = [(r, c) for r, c in pairs if r.last and c.first]
        leads = [r.last - c.first for r, c in measured]
        overlap = [max(0, min(r.last, c.last or self.t) - c.first) / max(1, r.last - r.first) for r, c in measured]
        mean = lambda numbers: sum(numbers) / len(numbers) if numbers else 0.0
        ids, counts = self.collect(self.lanes[0]), self.counts
        counts["nfe"] = counts["prefill"] + counts["groups"] + counts["refresh"] - counts["reuse"]
        return {
            "ids": ids, "ended_with_eos": at < len(self.x) and self.x[at] in self.eos, "canvas": self.x[self.P :],
            "events": self.events, "counts": {**counts, "tokens": len(ids)},
            "lanes": [[a.id, a.role, a.start, a.length, a.parent, a.group, a.t, a.first, a.last, a.how, a.v]
                      for a in self.lanes],
            "diagnostics": {
                "pairs_measured": len(measured), "average_lead": mean(leads),
                "positive_lead_ratio": mean([lead > 0 for lead in leads]), "overlap_ratio": mean(overlap),
                "split_quartiles": np.percentile(self.splits, (25, 50, 75)).tolist() if self.splits else [],
                "splits": self.splits}}
