"""The mixture of experts of a layer as a thin Linen module; `nn.experts` owns the mathematics."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dlm_jax.models.owner import Owner
from dlm_jax.nn import experts
from dlm_jax.nn.products import matmul

_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


class MoE(Owner):
    """Experts of which each token is read by a few, and perhaps one that reads every token.

    Source: Qwen Team, "Qwen3" and "Qwen3-Next"; LLaDA-MoE (arXiv 2509.24389); LLaDA2.0 (arXiv 2512.15745).
    """

    @nn.compact
    def __call__(self, x):
        m, D = self.config.moe, self.config.hidden_size
        flat = x.reshape(-1, D)
        mixed = experts.mixture(
            flat, *self.route(flat), self.weight("gate_proj", (m.experts, D, m.width), ("experts", "embed", None)),
            self.weight("up_proj", (m.experts, D, m.width), ("experts", "embed", None)),
            self.weight("down_proj", (m.experts, m.width, D), ("experts", None, "embed")))
        if m.shared_width:
            gate = matmul(flat, self.weight("shared_gate_proj", (D, m.shared_width), ("embed", "mlp")))
            up = matmul(flat, self.weight("shared_up_proj", (D, m.shared_width), ("embed", "mlp")))
            shared = matmul(jax.nn.silu(gate) * up,
                            self.weight("shared_down_proj", (m.shared_width, D), ("mlp", "embed")))
            if m.shared_gate:
                shared *= jax.nn.sigmoid(flat @ self.weight("shared_gate", (D,), ("embed",)))[:, None]
            mixed += shared
        return mixed.reshape(x.shape)

    def route(self, flat):
        """Returns the weights and experts of (M, D) tokens, each (M, A); scores are float32 whatever the model is."""
        m = self.config.moe
        router = self.weight("router", (self.config.hidden_size, m.experts), ("embed", None))
        logits = flat.astype(jnp.float32) @ router.astype(jnp.float32)
        bias = None
        if m.bias is not None:  # moved by who trains the balance of experts, never by a gradient
            bias = self.param("expert_bias", nn.with_logical_partitioning(nn.initializers.zeros, (None,)), (m.experts,))
            bias = jax.lax.stop_gradient(bias.astype(jnp.float32))
        return experts.route(_SCORES[m.scores](logits), m.active, m.normalise, bias, weigh_bias=m.bias == "weight",
                             groups=m.groups, active_groups=m.active_groups, scale=m.scale)
