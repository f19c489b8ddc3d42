"""FLARE: one checkpoint, two ways to decode it. `ARTrust` trusts its clean stream, `DiffusionTrust` its noisy one."""

from dlm_jax.decode.flare.ar_trust import ARTrust
from dlm_jax.decode.flare.diffusion_trust import DiffusionTrust
from dlm_jax.decode.flare.policies import DraftPolicy, ExactTruncated, SoftmaxArgmax, TruncatedArgmax
from dlm_jax.decode.flare.schedules import Constant, Each, Thresholds

__all__ = ["ARTrust", "Constant", "DiffusionTrust", "DraftPolicy", "Each", "ExactTruncated", "SoftmaxArgmax",
           "Thresholds", "TruncatedArgmax"]
