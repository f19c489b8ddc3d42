"""The rows of the paper's tables as points of `AsyncLane`; each takes further fields of it, which replace its own."""

from __future__ import annotations

from typing import Any

from dlm_jax.decode.asynclane.boundary import Boundary
from dlm_jax.decode.asynclane.caches import Compact
from dlm_jax.decode.asynclane.decoder import AsyncLane
from dlm_jax.decode.masked.caches import NoCache
from dlm_jax.decode.masked.commit import TopN


def blockwise(**changes: Any) -> AsyncLane:
    """Returns the block-wise sampler of Table 3: no lane forks, no cache, nothing ahead, a token a forward."""
    return AsyncLane(**{"mode": "blockwise", "cache": NoCache(), "lookahead": 0, "commit": TopN(1), **changes})


def coupled(boundary: Boundary | str, **changes: Any) -> AsyncLane:
    """Returns Boundary-aware Coupled of Table 3: a continuation waits until its prefix is refined."""
    return AsyncLane(**{"boundary": boundary, "mode": "coupled", **changes})


def commit_and_advance(boundary: Boundary | str, **changes: Any) -> AsyncLane:
    """Returns Commit-and-Advance of Table 3: a prefix is committed at its boundary, and never refined."""
    return AsyncLane(**{"boundary": boundary, "mode": "commit_and_advance", **changes})


def without_lookahead(boundary: Boundary | str, **changes: Any) -> AsyncLane:
    """Returns AsyncLane of Table 5 that reads and drafts nothing ahead."""
    return AsyncLane(**{"boundary": boundary, **changes, "lookahead": 0})


def without_reuse(boundary: Boundary | str, **changes: Any) -> AsyncLane:
    """Returns AsyncLane of Table 5 whose refreshes are for the cache alone."""
    cache = changes.pop("cache", Compact()).replace(reuse_refresh_logits=False)
    return AsyncLane(**{"boundary": boundary, "cache": cache, **changes})


def without_both(boundary: Boundary | str, **changes: Any) -> AsyncLane:
    """Returns AsyncLane of Table 5 without lookahead and without reuse."""
    return without_reuse(boundary, **{**changes, "lookahead": 0})
