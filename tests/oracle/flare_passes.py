"""Runs the single passes of the FLARE model set: logits, caches after every accepted count, rules of verification."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.decode import ExactTruncated, Sampler, SoftmaxArgmax, TruncatedArgmax, parts, speculative
from dlm_jax.decode import request as requests
from dlm_jax.decode.flare import ar_trust, policies, tiles
from dlm_jax.decode.queries import prefill
from tests.oracle.flare_decode import by_model, compared, states

ROOM = 16  # tokens of a window, padding included
POLICIES = {"Exact-Truncated": ExactTruncated(), "Softmax-Argmax": SoftmaxArgmax(),
            "Truncated-Argmax": TruncatedArgmax()}


@functools.partial(jax.jit, static_argnums=0)
def _passed(model, params, request, tokens, advance, read):
    """Returns the logits of a prefix' last token and of a window behind it, and the cache after both."""
    score = model.scorer(params)
    last, cache, _ = prefill(score, request, ROOM)
    hidden, cache = ar_trust.forward(score, request, jnp.zeros_like(advance), tokens, advance, read, cache)
    return score.head(last)[0, 0], score.head(hidden)[0], cache


def passed(network, prefix: list[int], clean: list[int], noisy: list[int], mask_id: int = 0):
    """Runs clean, then noisy tokens behind a prefix; see `_passed`. Returns the request, too."""
    request = requests.make([prefix], max_new_tokens=ROOM, capacity=32, mask_id=mask_id)
    tokens = np.zeros((1, ROOM), np.int32)
    tokens[0, : len(clean) + len(noisy)] = [*clean, *noisy]
    count = lambda x: np.array([len(x)], np.int32)
    last, logits, cache = _passed(*network, request, tokens, count(clean), count(noisy))
    return last, logits[: len(clean) + len(noisy)], cache, request


def probe(folder: Path, cases: dict, arrays: dict) -> Iterator[tuple[str, float]]:
    """Yields errors of denoise passes, commit passes and windows."""
    for network, members in by_model(folder, cases["denoise"]):
        for case in members:
            of = lambda name, case=case: arrays[f"{case['case']}__{name}"]
            last, noisy, *_ = passed(network, case["prefix"], [], case["block"])
            yield from compared(case, "prefix", last, of("logits_prefix_last"))
            yield from compared(case, "denoise", noisy, of("logits_noisy"))
            _, clean, *_ = passed(network, case["prefix"], case["block"], [])
            yield from compared(case, "commit", clean[-1], of("logits_commit_last"))
            if f"{case['case']}__logits_noisy_causal" in arrays:
                yield from compared(case, "causal", clean, of("logits_noisy_causal"))
    for network, members in by_model(folder, cases["window"]):
        for case in members:
            clean = [case["anchor"], *case["drafts"]]
            _, logits, *_ = passed(network, case["prefix"], clean, [case["mask_id"]] * case["n_mask"])
            yield from compared(case, "clean rows", logits[: len(clean)], arrays[f"{case['case']}__logits_clean"])
            yield from compared(case, "noisy rows", logits[len(clean) :], arrays[f"{case['case']}__logits_noisy"])


def state_commit(folder: Path, cases: list[dict], arrays: dict) -> Iterator[tuple[str, float]]:
    """Yields errors of what caches hold after a window of which each count of tokens is accepted."""
    for network, members in by_model(folder, cases):
        kinds = network[0].config.pattern
        for case in members:
            T, P = len(case["window"]), len(case["prefix"])
            _, logits, cache, request = passed(network, case["prefix"], case["window"], [0] * 3)
            yield from compared(case, "logits", logits[:T], arrays[f"{case['case']}__logits"])
            entries = np.r_[:P, request.prompt_capacity + np.arange(T)]
            for layer in case["full_layers"]:
                member = cache.members[layer % len(kinds)]
                for name in ("keys", "values"):
                    ours = getattr(member, name)[layer // len(kinds), 0][:, entries]
                    theirs = arrays[f"{case['case']}__layer{layer}_{name}"]
                    yield from compared(case, f"layer {layer} {name}", ours, theirs)
            for accepted in range(T + 1):
                now = {f"{case['case']}__layer{layer}_{one}": arrays[f"{case['case']}__layer{layer}_{one}s"][accepted]
                       for layer in case["linear_layers"] for one in ("recurrent_state", "conv_tail")}
                yield from states(network, cache.commit(jnp.array([accepted])), case, now)


class _Logits:
    """A scorer whose hidden states are logits."""

    def __init__(self, size: int):
        self.vocab_size, self.head = size, lambda logits: logits


@jax.jit
def _laws(sampler, rows):
    """Returns the log probabilities of (1, R, V) logits under a sampler."""
    return tiles.law(tiles.Rows(_Logits(rows.shape[-1]), rows), sampler)[0].log(rows)


def verify_rules(folder: Path, cases: list[dict], arrays: dict) -> Iterator[tuple[str, float]]:
    """Yields errors of truncated laws, chances of drafts, corrections and tails, and wrong accepted counts."""
    del folder
    for case in cases:
        of = lambda name, case=case: arrays[f"{case['case']}__{name}"]
        check = lambda name, ours, theirs, case=case: compared({**case, "model": ""}, name, ours[0], theirs)
        full, K = Sampler(case["temperature"], case["top_k"], case["top_p"]), case["K"]
        rows = jnp.concatenate([of("logits_clean"), of("logits_noisy")])[None]
        for name, policy in POLICIES.items():
            known = name.lower().replace("-", "_")
            law = _laws(parts.traced(policies.of_sampler(policy, full)), rows)
            p, q = law[:, : K + 1], law[:, K + 1 :]
            for which, ours in (("p_trunc", p), ("q_trunc", q)) if policy.truncates else (("p_full", p),):
                yield from check(which, jnp.exp(ours), of(which))
            drafts = jnp.asarray(of(f"{known}__drafts"))[None]
            if not (policy.draws and case["temperature"]) and (rows[:, K + 1 :].argmax(-1) != drafts).any():
                yield f"{case['case']} {name}: other drafts", 0.0
            pick = lambda x, drafts=drafts: jnp.take_along_axis(x[:, :K], drafts[..., None], axis=-1)[..., 0]
            chance = policies.chance(policy, pick(p), pick(q))
            yield from check(f"{name} chance", chance, of(f"{known}__accept_prob"))
            accepted = int(speculative.prefix_length(of("u")[None] <= chance)[0])
            if accepted != case["policies"][name]["accepted"]:
                yield f"{case['case']} {name}: another count", 0.0
            left = policies.left(policy, p[:, :K], q, jnp.arange(case["V"]) == drafts[..., None])
            left = left / jnp.maximum(left.sum(-1, keepdims=True), 1e-30)
            some = of(f"{known}__correction").sum(-1, keepdims=True) > 0  # p = q leaves nothing but rounding
            yield from check(f"{name} correction", jnp.where(some, left, 0), of(f"{known}__correction"))
            tail = left[:, accepted] if accepted < K else jnp.exp(p[:, K])
            yield from check(f"{name} tail", tail, of(f"{known}__tail"))
