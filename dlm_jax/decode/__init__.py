"""Decoders: frozen dataclasses of their papers' hyperparameters, made of parts, run by `generate` and `stream`."""

from dlm_jax.conventions import Conventions
from dlm_jax.decode import asynclane, flare, guided, masked
from dlm_jax.decode.answers import Generation
from dlm_jax.decode.api import generate, stream
from dlm_jax.decode.asynclane import AsyncLane
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.blocks import BlockDiffusion, Editing, SelfSpeculation, Thinking
from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.events import Event
from dlm_jax.decode.flare import *  # noqa: F403
from dlm_jax.decode.flare import ARTrust, DiffusionTrust
from dlm_jax.decode.guided import Guided, join
from dlm_jax.decode.ledger import Ledger
from dlm_jax.decode.lossless import check_lossless
from dlm_jax.decode.masked import *  # noqa: F403
from dlm_jax.decode.masked import MaskedDiffusion
from dlm_jax.decode.orthrus import Orthrus
from dlm_jax.decode.parts import number, static, whole
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.refusion import ReFusion
from dlm_jax.decode.request import Pair
from dlm_jax.decode.runner import Runner
from dlm_jax.decode.sampling import Sampler

DECODERS = {  # by the names launchers accept
    "ar_trust": ARTrust, "asynclane": AsyncLane, "autoregressive": Autoregressive, "blocks": BlockDiffusion,
    "diffusion_trust": DiffusionTrust, "guided": Guided, "masked": MaskedDiffusion, "orthrus": Orthrus,
    "refusion": ReFusion, "self_speculation": SelfSpeculation}

__all__ = [
    "DECODERS", "AsyncLane", "Autoregressive", "BlockDiffusion", "Canvas", "Conventions", "Decoder", "Editing", "Event",
    "Generation", "Guided", "Ledger", "Needs", "Orthrus", "Pair", "ReFusion", "Runner", "Sampler", "SelfSpeculation",
    "Thinking", "asynclane", "check_lossless", "decoder", "generate", "guided", "join", "number", "static", "stream",
    "whole", *flare.__all__, *masked.__all__]
