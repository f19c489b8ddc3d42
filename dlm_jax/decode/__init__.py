"""Decoders: frozen dataclasses of their papers' hyperparameters, run by `generate` and `stream`."""

from dlm_jax.decode.api import Event, Generation, generate, stream
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.ledger import Ledger
from dlm_jax.decode.lossless import check_lossless
from dlm_jax.decode.orthrus import Orthrus
from dlm_jax.decode.refusion import ReFusion

# by the names launchers accept
DECODERS = {"autoregressive": Autoregressive, "orthrus": Orthrus, "refusion": ReFusion}

__all__ = ["DECODERS", "Autoregressive", "Event", "Generation", "Ledger", "Orthrus", "ReFusion", "check_lossless",
           "generate", "stream"]
