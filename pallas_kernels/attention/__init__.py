"""Block-mask attention: masks, tile lists, reference, XLA form and kernels."""
