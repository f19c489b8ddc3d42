"""FlashDLM's settings, each named by where it stands.

Lengths of answers are the caller's: Table 11 gives 1024 tokens.
"""

from __future__ import annotations

from typing import Any

from dlm_jax.decode.guided.acceptance import Relative, Relaxed
from dlm_jax.decode.guided.decoder import Guided
from dlm_jax.decode.masked.caches import Free, Prompt


def flash_dlm(**changes: Any) -> Guided:
    """Returns Table 11, "FreeCache + Guided Unmasking", with exact matches; `TopK(2)` and `TopK(5)` are of Table 7.

    Args:
      changes: other fields of `Guided`.
    """
    return Guided(**{"cache": Free(block_length=256), "verify_batch_size": 32, **changes})


def flash_dlm_relaxed(*, tau: float = 0.5, **changes: Any) -> Guided:
    """Returns Table 11 with the relaxed rule of C.4.

    Args:
      tau: "Guidance Confidence Threshold".
      changes: other fields of `Guided`.
    """
    return flash_dlm(**{"accept": Relaxed(tau), **changes})


def flash_dlm_released(**changes: Any) -> Guided:
    """Returns the released script's "assisted" decoding: the drafter's cache of the prompt, exact matches.

    Args:
      changes: other fields of `Guided`.
    """
    return Guided(**{"cache": Prompt(), "verify_batch_size": 32, **changes})


def flash_dlm_released_relaxed(*, top_k: int = 5, share: float = 0.95, **changes: Any) -> Guided:
    """Returns the released script's relaxed decoding ("topk_relative").

    Args:
      top_k: the sampler's own default, which the evaluator leaves; the helper's signature says 2.
      share: the evaluator's `top_p`, which is used for this; the helper's signature says 0.5.
      changes: other fields of `Guided`.
    """
    return flash_dlm_released(**{"accept": Relative(top_k, share), **changes})
