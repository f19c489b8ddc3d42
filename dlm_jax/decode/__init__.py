"""Decoders: frozen dataclasses of their papers' hyperparameters, run by `generate` and `stream`."""

from dlm_jax.decode.api import Event, Generation, generate, stream
from dlm_jax.decode.autoregressive import Autoregressive
from dlm_jax.decode.ledger import Ledger
from dlm_jax.decode.refusion import ReFusion

DECODERS = {"autoregressive": Autoregressive, "refusion": ReFusion}  # by the names launchers accept

__all__ = ["DECODERS", "Autoregressive", "Event", "Generation", "Ledger", "ReFusion", "generate", "stream"]
