"""The views and the decoding of an `orthrus_*`-format folder: `ar`, `diff{j}` and `generate` cases.

`ar__*` is a plain causal pass. `diff{j}__*`: a block behind the AR cache of `prefix_ids`, seen by the diffusion view
(`diffusion_logits`), and the block it proposes, seen by the AR view (`verify_logits`). `generate` lists prompts with
ids, steps (drafts, accepted drafts) and calls.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.decode import Orthrus, Runner
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass


def check_views(model, params, cases: dict[str, dict[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (name, ours, theirs) of every array of the `ar` and `diff{j}` cases."""
    yield "ar logits", dlm_jax.forward(model, params, cases["ar"]["input_ids"]), cases["ar"]["logits"]
    for name, fields in cases.items():
        if not name.startswith("diff"):
            continue
        drafted, verified = _block(model, params, *(jnp.asarray(fields[key], jnp.int32) for key in (
            "prefix_ids", "block_ids", "position_ids", "proposed_block")))
        yield f"{name} diffusion logits", drafted, fields["diffusion_logits"]
        yield f"{name} verify logits", verified, fields["verify_logits"]
        proposed = np.concatenate([fields["block_ids"][:, :1], np.argmax(drafted, -1)[:, :-1]], axis=1)
        yield f"{name} proposed block", proposed, fields["proposed_block"]


@functools.partial(jax.jit, static_argnums=0)
def _block(model, params, prefix, block, positions, proposed):
    """Returns the logits of both views of a block behind a prefix; the diffusion view only reads the cache."""
    score, (B, P), n = model.scorer(params), prefix.shape, block.shape[1]
    index = jnp.broadcast_to(jnp.arange(P + n, dtype=jnp.int32), (B, P + n))
    before, own = index[:, :P], index[:, P:]
    cache = score.init_cache(B, P)
    _, cache = score.hidden(prefix, Pass(before, vis.causal(jnp.ones((B, P), bool)), before), cache)
    view = score.view("diffusion")
    hidden, _ = view.hidden(block, Pass(positions, vis.by_rank(own * 0, own * 0 + P + n, index)), cache)
    drafted = view.head(hidden)
    hidden, _ = score.hidden(proposed, Pass(positions, vis.by_rank(own * 0, own, index)), cache)
    return drafted, score.head(hidden)


def check_generate(model, params, cases: list[dict]) -> Iterator[str]:
    """Yields what differs from the recorded decodes; rows of one block size run as a ragged batch."""
    groups = collections.defaultdict(list)
    for number, case in enumerate(cases):
        groups[case["block_size"], case["eos_id"]].append((number, case))
    longest = max(len(case["prompt"]) for case in cases)
    room = max(case["max_new_tokens"] for case in cases)
    for (block_size, eos_id), members in groups.items():
        decoder, rows = Orthrus(block_size=block_size), [case for _, case in members]
        runner = Runner(model, params, decoder)
        batch = runner.start(runner.request(
            [case["prompt"] for case in rows], max_new_tokens=[case["max_new_tokens"] for case in rows],
            eos_id=-1 if eos_id is None else eos_id, prompt_capacity=longest, capacity=room))
        seen = lambda batch: jax.tree.map(np.asarray, batch.state.replace(cache=None))
        rounds = [seen(batch)]
        while not batch.done.all():
            batch = runner.step(batch)
            rounds.append(seen(batch))
        final = runner.read(batch, range(len(rows)), room)
        for row, (number, case) in enumerate(members):
            ids = [*case["prompt"], *final.tokens[row].tolist()]
            for mode in ("diffusion", "ar"):
                if ids != case[f"expected_ids_{mode}_mode"]:
                    yield f"generate {number}: other ids than {mode} mode"
            calls = {"draft": case["calls_diffusion"], "verify": case["calls_verify"], "prefill": 1}
            if any(final.ledger.forwards[kind][row] != count for kind, count in calls.items()):
                yield f"generate {number}: other numbers of calls"
            if case["calls_total_diffusion_mode"] != sum(calls.values()):
                yield f"generate {number}: {case['calls_total_diffusion_mode']} calls in all"
            steps = [step for before, step in zip(rounds, rounds[1:]) if not before.done[row]]
            found = [(step.drafts[row][step.drafted[row] < batch.request.capacity].tolist(), int(step.accepted[row]))
                     for step in steps]
            if found != [(step["draft_tokens"], step["accepted_drafts"]) for step in case["steps"]]:
                yield f"generate {number}: other drafts or acceptance lengths"
            if [accepted for _, accepted in found] != case["acceptance"]:
                yield f"generate {number}: acceptance lengths"


def run(model, params, facts: dict, cases: dict[str, dict[str, np.ndarray]], atol: float
        ) -> tuple[list[str], float, str]:
    """Runs the three kinds; returns failures, the largest error and a sentence."""
    failed, worst, arrays = [], 0.0, 0
    for name, ours, theirs in check_views(model, params, cases):
        error = np.abs(np.asarray(ours) - theirs)
        worst, arrays = max(worst, float(error.max())), arrays + 1
        if not np.all(error <= atol + 1e-4 * np.abs(theirs)):
            failed.append(f"{name}: off by {error.max():.3g}")
    failed += check_generate(model, params, facts["generate"])
    tokens = sum(sum(case["acceptance"]) for case in facts["generate"])
    return failed, worst, f"{arrays} view arrays, {len(facts['generate'])} decodes ({tokens} accepted drafts)"


