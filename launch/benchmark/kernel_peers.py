"""Single-stream gated delta rule kernels of other projects, timed beside ours where they are installed."""

from __future__ import annotations

from typing import Any, Callable

import jax
import numpy as np

from pallas_kernels import Stream


def flash_linear_attention(clean: Stream) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Returns a call of flash-linear-attention's chunk kernel, forward and backward, and how to wait for it.

    Args:
      clean: arrays (B, T, ...), bfloat16 q, k, v; queries and keys of unit norm, log gates.

    Raises:
      ImportError: torch or flash-linear-attention is missing.
      RuntimeError: PyTorch sees no CUDA device.
    """
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device")

    def tensor(array: jax.Array):
        kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[array.dtype.name]
        return torch.tensor(np.asarray(array, np.float32), device="cuda").to(kind).requires_grad_()

    inputs = [tensor(a) for a in clean]
    ones = torch.ones_like(inputs[2])

    @torch.enable_grad()  # whatever the process has switched off
    def run():
        q, k, v, g, beta = inputs
        out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=q.shape[-1] ** -0.5)
        return out, torch.autograd.grad(out, inputs, ones)

    return run, lambda _: torch.cuda.synchronize()


PEERS = {"flash-linear-attention": flash_linear_attention}
