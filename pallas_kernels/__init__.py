"""Pallas kernels for diffusion language models: one attention for every mask, and a two-stream gated delta rule."""
from pallas_kernels.attention.api import attention_problem, block_mask_attention
from pallas_kernels.attention.visibility import Visibility
from pallas_kernels.dispatch import use_backend
from pallas_kernels.gated_delta.api import two_stream_gated_delta
from pallas_kernels.gated_delta.short_conv import short_conv
from pallas_kernels.gated_delta.streams import Stream, TwoStreamOutput

__all__ = ["Stream", "TwoStreamOutput", "Visibility", "attention_problem", "block_mask_attention", "short_conv",
           "two_stream_gated_delta", "use_backend"]
