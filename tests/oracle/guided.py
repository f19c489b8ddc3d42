"""Guided-diffusion cases (`kind` guided) of the masked-diffusion format; see `tests.oracle.masked`.

A case names the released rule, acceptance test and drafter cache, and the ids, forwards of both models, lengths of
the drafter's forwards and tokens of every step that they gave.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import dlm_jax
from dlm_jax.decode.guided import (
    Aggressive, Agreed, BlockBoundary, Exact, Guided, Relative, Sliding, Speculative, TopK, join)
from dlm_jax.decode.masked import NoCache, Prompt
from tests.oracle.masked import Folder, Outcome

CACHES = {
    "full_recompute": lambda given: NoCache(),
    "prompt_cache": lambda given: Prompt(),
    "aggressive_aligned": lambda given: Aggressive(),
    "sliding_aligned": lambda given: Sliding(given["sliding_window_size"]),
    "block_boundary_aligned": lambda given: BlockBoundary(given["block_size"]),
}
TESTS = {
    "deterministic": lambda given: Exact(),
    "topk": lambda given: TopK(given["acceptance_top_k"]),
    "topk_relative": lambda given: Relative(given["acceptance_top_k"], given["top_p"]),
}
RULES = {"assisted": Agreed(), "speculative": Speculative()}


@functools.lru_cache(maxsize=1)
def _joined(folder: Folder) -> tuple[Any, Any]:
    return join(*folder.model, *folder.guider)


def settings(case: dict) -> tuple[Guided, dict[str, int]]:
    """Returns the decoder and the limits of a case.

    Raises:
      KeyError: a rule, cache or acceptance test that this library has no name for.
    """
    given = {"acceptance_top_k": 5, "verify_batch_size": 32, **case["params"]}  # the released defaults
    chunk = given["verify_batch_size"]
    decoder = Guided(
        rule=RULES[case["rule"]], accept=TESTS[given["sampling_strategy"]](given), cache=CACHES[case["cache"]](given),
        verify_batch_size=0 if chunk >= given["max_new_tokens"] else chunk)
    eos = given["eos_token_id"] if case["rule"] == "assisted" else -1  # the released speculative rule never sees it
    return decoder, {"max_new_tokens": given["max_new_tokens"], "eos_id": eos, "mask_id": given["mask_id"]}


def run(folder: Folder, case: dict) -> Outcome:
    """Decodes a case; ids, forwards of both models, window lengths and tokens a step must be the same."""
    decoder, limits = settings(case)
    pair, params = _joined(folder)
    out = dlm_jax.generate(pair, params, case["prompt_ids"], decoder, **limits)
    wrong = [f"{name} {value} is not {want}" for row in range(len(case["prompt_ids"]))
             for name, value, want in compare(out, row, case) if value != want]
    return Outcome(", ".join(wrong))


def compare(out: dlm_jax.decode.Generation, row: int, case: dict) -> list[tuple[str, Any, Any]]:
    """Returns name, ours and theirs of everything that is compared in a row of a case."""
    tokens, at = out.tokens[row].tolist(), out.committed_at[row]
    missing = case["params"]["max_new_tokens"] - len(tokens)
    ids = case["prompt_ids"][row] + tokens + [case["params"]["eos_token_id"]] * missing
    forwards, positions = out.ledger.forwards, out.ledger.positions
    return [
        ("expected_ids", ids, case["expected_ids"][row]),
        ("nfe_drafter", int(forwards["draft"][row]), case["nfe_drafter"]),
        ("nfe_guider", int(forwards["guide"][row]), case["nfe_guider"]),
        ("drafter_forward_lengths, summed", int(positions["draft"][row]), sum(case["drafter_forward_lengths"])),
        ("unmasked_per_step", np.bincount(at[at > 0])[1:].tolist(), case["unmasked_per_step"]),
        ("eos_fill", missing > 0, case["eos_fill"]),
    ]


RUNNERS = {"guided": run}
