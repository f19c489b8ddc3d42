"""AsyncLane: a schedule of lanes over masked diffusion, so that the past is refined while the future advances."""

from dlm_jax.decode.asynclane.boundary import Boundary
from dlm_jax.decode.asynclane.caches import Compact
from dlm_jax.decode.asynclane.decoder import AsyncLane
from dlm_jax.decode.asynclane.delimiters import (
    BOUNDARIES, code_boundary, interval_boundary, math_boundary, punctuation_boundary)
from dlm_jax.decode.asynclane.diagnostics import Diagnostics, Lane, diagnose, history, model_calls
from dlm_jax.decode.asynclane.guide import GuideAgrees
from dlm_jax.decode.asynclane.presets import (
    blockwise, commit_and_advance, coupled, without_both, without_lookahead, without_reuse)
from dlm_jax.decode.guided.acceptance import Exact, Relative, TopK

__all__ = [
    "BOUNDARIES", "AsyncLane", "Boundary", "Compact", "Diagnostics", "Exact", "GuideAgrees", "Lane", "Relative", "TopK",
    "blockwise", "code_boundary", "commit_and_advance", "coupled", "diagnose", "history", "interval_boundary",
    "math_boundary", "model_calls", "punctuation_boundary", "without_both", "without_lookahead", "without_reuse"]
