"""The mixture of experts of a layer as a thin Linen module; `nn.experts` owns the mathematics."""

from __future__ import annotations

import flax.linen as nn
import jax

from dlm_jax.models.owner import Owner
from dlm_jax.nn import experts


class MoE(Owner):
    """Experts of which each token is read by a few, and one that reads every token, as much as its gate says.

    Source: Qwen Team, "Qwen3-Next" (ultra-sparse mixture with a shared expert).
    """

    @nn.compact
    def __call__(self, x):
        m, D = self.config.moe, self.config.hidden_size
        flat = x.reshape(-1, D)
        weights, chosen = experts.route(flat @ self.weight("router", (D, m.experts), ("embed", None)), m.active,
                                        m.normalise)
        mixed = experts.mixture(
            flat, weights, chosen, self.weight("gate_proj", (m.experts, D, m.width), ("experts", "embed", None)),
            self.weight("up_proj", (m.experts, D, m.width), ("experts", "embed", None)),
            self.weight("down_proj", (m.experts, m.width, D), ("experts", None, "embed")))
        gate = flat @ self.weight("shared_gate_proj", (D, m.shared_width), ("embed", "mlp"))
        up = flat @ self.weight("shared_up_proj", (D, m.shared_width), ("embed", "mlp"))
        shared = (jax.nn.silu(gate) * up) @ self.weight("shared_down_proj", (m.shared_width, D), ("mlp", "embed"))
        opened = jax.nn.sigmoid(flat @ self.weight("shared_gate", (D,), ("embed",)))
        return (mixed + opened[:, None] * shared).reshape(x.shape)
