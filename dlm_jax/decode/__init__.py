"""Decoders: frozen dataclasses of their papers' hyperparameters, made of parts, run by `generate` and `stream`."""

from dlm_jax.decode import masked
from dlm_jax.decode.answers import Generation
from dlm_jax.decode.api import generate, stream
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.canvas import Canvas
from dlm_jax.decode.events import Event
from dlm_jax.decode.ledger import Ledger
from dlm_jax.decode.lossless import check_lossless
from dlm_jax.decode.masked import *  # noqa: F403
from dlm_jax.decode.masked import MaskedDiffusion
from dlm_jax.decode.orthrus import Orthrus
from dlm_jax.decode.parts import number, static, whole
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.refusion import ReFusion
from dlm_jax.decode.runner import Runner
from dlm_jax.decode.sampling import Sampler

DECODERS = {  # by the names launchers accept
    "autoregressive": Autoregressive, "masked": MaskedDiffusion, "orthrus": Orthrus, "refusion": ReFusion}

# the classes that fields of decoders may hold, by name
PARTS = {"Sampler": Sampler} | {
    name: part for name in masked.__all__ if isinstance(part := getattr(masked, name), type)}

__all__ = [
    "DECODERS", "PARTS", "Autoregressive", "Canvas", "Decoder", "Event", "Generation", "Ledger", "Needs", "Orthrus",
    "ReFusion", "Runner", "Sampler", "check_lossless", "decoder", "generate", "number", "static", "stream", "whole",
    *masked.__all__]
