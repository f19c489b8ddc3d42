"""Runs the decoding folders of the FLARE model set: both decoders' traces, and AR-Trust rounds with given drafts.

Ids, drafts and counts are exact. Compared less, by rule: our answer ends with the forward that settles it, so of its
last block passes may be missing, and that block's commit pass is.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.decode import ARTrust, DiffusionTrust, Each, Runner


@functools.lru_cache(maxsize=4)
def load(folder: Path):
    """Returns (model, params) of a checkpoint."""
    return dlm_jax.load(folder)


def by_model(folder: Path, cases: list[dict], *fields: str) -> Iterator[tuple[tuple, list[dict]]]:
    """Yields ((model, params), cases) of equal fields, each case once."""
    groups = collections.defaultdict(list)
    for case in cases:
        groups[case["model"], *(json.dumps(case[field]) for field in fields)].append(case)
    for (name, *_), members in groups.items():
        yield load(folder.parent.parent / name), members


def _started(network, decoder, cases: list[dict]):
    runner = Runner(*network, decoder)
    return runner, runner.start(runner.request(
        [case["prompt"] for case in cases], max_new_tokens=[case["max_new_tokens"] for case in cases],
        eos_id=-1 if cases[0]["eos_id"] is None else cases[0]["eos_id"], mask_id=cases[0]["mask_id"],
        prompt_capacity=32, capacity=48))


def _seen(rows):
    return jax.tree.map(np.asarray, rows.state.replace(cache=None))


def diffusion_trust(folder: Path, cases: list[dict], _: dict) -> Iterator[tuple[str, float]]:
    """Yields what differs from recorded Diffusion-Trust decodes, seeded and not."""
    for network, members in by_model(folder, cases, "block_size", "S_step", "gamma", "eos_id"):
        for first, recorded in (("seed", members), ("judged", [case["no_seed"] for case in members])):
            case = members[0]
            decoder = DiffusionTrust(block_size=case["block_size"], steps=case["S_step"],
                                     thresholds=Each(tuple(case["gamma"])), first=first)
            runner, rows = _started(network, decoder, members)
            passes = [[[]] for _ in members]
            while not rows.done.all():
                before, rows = _seen(rows), runner.step(rows)
                after = _seen(rows)
                for row in np.flatnonzero(~before.done[: len(members)]):
                    if before.open[row].any():
                        filled = np.flatnonzero(before.open[row] & ~after.open[row])
                        passes[row][-1].append((filled.tolist(), after.block[row][filled].tolist()))
                    else:
                        passes[row].append([])
            out = runner.read(rows, range(len(members)))
            for row, want in enumerate(recorded):
                if want is None:
                    continue
                name = f"{case['model']} {first} {members[row]['prompt']}"
                if out.tokens[row].tolist() != want["expected_new_ids"]:
                    yield f"{name}: other ids", 0.0
                theirs = [[(step["offsets"], step["tokens"]) for step in block] for block in want["trace"]]
                ours, last = passes[row][:-1], passes[row][-1]
                begun = theirs[len(ours)][: len(last)] if len(theirs) == len(ours) + 1 else None
                if ours != theirs[: len(ours)] or last != begun:
                    yield f"{name}: other passes", 0.0
                if out.ledger.forwards["commit"][row] != want["forwards"]["commit"] - 1:
                    yield f"{name}: other commit passes", 0.0
        yield "", 0.0


def ar_trust(folder: Path, cases: list[dict], _: dict) -> Iterator[tuple[str, float]]:
    """Yields what differs from recorded AR-Trust decodes, in every reading."""
    for network, members in by_model(folder, cases, "N", "eos_id"):
        _, fresh = _started(network, ARTrust(horizon=members[0]["N"]), members)
        for reading in sorted({reading for case in members for reading in case["readings"]}):
            on_reject, cold_start = reading.split(":")
            runner = Runner(*network, ARTrust(horizon=members[0]["N"], on_reject=on_reject, cold_start=cold_start))
            rows = jax.tree.map(jnp.copy, fresh)  # a prefill for all readings, whose steps use it up
            rounds = [[] for _ in members]
            while not rows.done.all():
                before, rows = _seen(rows), runner.step(rows)
                after = _seen(rows)
                for row in np.flatnonzero(~before.done[: len(members)]):
                    held = after.drafts[row][: after.held[row]].tolist()
                    rounds[row].append((int(before.held[row]), int(after.accepted[row]), held))
            out = runner.read(rows, range(len(members)))
            for row, case in enumerate(members):
                want, name = case["readings"].get(reading), f"{case['model']} N={case['N']} {reading} {case['prompt']}"
                if out.tokens[row].tolist() != case["expected_new_ids"]:
                    yield f"{name}: other ids", 0.0
                if want is None:
                    continue
                theirs = list(zip(want["K"], want["accepted"], want["drafts_held_next"], strict=True))
                if rounds[row] != theirs:
                    yield f"{name}: other rounds", 0.0
                if out.ledger.after_prefill()[row] != want["forwards"]["window"]:
                    yield f"{name}: other windows", 0.0
        yield "", 0.0


def forced(folder: Path, cases: list[dict], arrays: dict) -> Iterator[tuple[str, float]]:
    """Yields what differs from rounds whose drafts came from elsewhere, and errors of the states at the end."""
    for network, members in by_model(folder, cases, "N"):
        for case in members:
            runner = Runner(*network, ARTrust(horizon=case["N"]))
            rows = runner.start(runner.request(
                [case["prompt"]], max_new_tokens=48, eos_id=-1, mask_id=case["mask_id"]))
            said = [int(rows.state.last[0])]
            for number, one in enumerate(case["rounds"]):
                drafts = jnp.asarray([one["drafts"]], jnp.int32)
                held = jnp.full(1, drafts.shape[1], jnp.int32)
                rows = runner.step(type(rows)(rows.request, rows.state.replace(drafts=drafts, held=held)))
                until = int(rows.state.length[0])
                emitted = np.asarray(rows.state.canvas.tokens)[0, len(said) : until].tolist()
                said += emitted
                if (int(rows.state.accepted[0]), emitted) != (one["accepted"], one["emitted"]):
                    yield f"{case['case']} round {number}: {emitted}", 0.0
            if said != case["expected_new_ids"] or said[0] != case["first_token"]:
                yield f"{case['case']}: other ids", 0.0
            yield from states(network, rows.state.cache, case, arrays)
        yield "", 0.0


def states(network, cache, case: dict, arrays: dict) -> Iterator[tuple[str, float]]:
    """Yields errors of the states and convolution inputs that a cache of one row holds, updates put off included."""
    kinds = network[0].config.pattern
    for layer in case.get("linear_layers", ()):
        if f"{case['case']}__layer{layer}_recurrent_state" not in arrays:
            continue
        state, tail = cache.members[layer % len(kinds)].layer(layer // len(kinds)).settled()
        flat = np.concatenate([np.asarray(x)[0].reshape(x.shape[1], -1) for x in tail], axis=1).T
        theirs = arrays[f"{case['case']}__layer{layer}_conv_tail"][:, -flat.shape[1]:]
        yield from compared(case, f"layer {layer} inputs", flat, theirs)
        yield from compared(case, f"layer {layer} state", np.asarray(state)[0],
                            arrays[f"{case['case']}__layer{layer}_recurrent_state"])


def compared(case: dict, name: str, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yields the largest error, and what is beyond the tolerance of the case's model."""
    error = np.abs(np.asarray(ours) - theirs)
    beyond = error > (5e-4 if "rough" in case["model"] else 2e-4) + 1e-4 * np.abs(theirs)
    yield f"{case['case']} {name}: off by {error.max():.3g}" if beyond.any() else "", float(error.max())
