"""ReFusion: slots planned by diffusion, infilled autoregressively, every key and value reused."""

from dlm_jax.decode.refusion.decoder import ReFusion

__all__ = ["ReFusion"]
