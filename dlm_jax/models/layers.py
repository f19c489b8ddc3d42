"""The layers of a stack as thin Linen modules: they own parameters, `dlm_jax.nn` owns the mathematics.

A layer is a mixer of `MIXERS`, which lets tokens read each other, and an MLP of `MLPS`.

Letters: B batch, T tokens, C wanted outputs (T where all are), S cache entries, D width, N query heads, K KV heads,
H head dim, F MLP width, L layers of one kind.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.shard_alike import shard_alike

from dlm_jax.models.config import TransformerConfig, parts
from dlm_jax.models.moe import MoE
from dlm_jax.models.owner import Owner, chosen
from dlm_jax.models.recurrent import GatedDelta
from dlm_jax.nn import cache as kv_cache
from dlm_jax.nn.attention import attention
from dlm_jax.nn.products import matmul, merge, project
from dlm_jax.nn.rope import apply_rope, query_growth, yarn_frequencies
from dlm_jax.scoring import Pass

VIEWS = {"ar": "attention", "diffusion": "attention_diffusion"}  # and the module whose parameters it uses


class Attention(Owner):
    """Projections, q/k norm, RoPE, cache and attention of one layer.

    Attributes:
      form: see `nn.attention.attention`.
    """

    form: str = "auto"

    @nn.compact
    def __call__(self, x, told: Pass, cache, layer, context, wanted):
        """Mixes (B, T, D) tokens.

        Args:
          x: (B, T, D) normalised activations.
          told: see `Pass`.
          cache: a `KVCache` that is written to and read, or None.
          layer: () int32 index into it.
          context: keys and values of this layer alone, each (B, K, S, H), that are only read; or None.
          wanted: (B, C) int32 tokens whose outputs are computed; None for all.

        Returns:
          (B, C, D) outputs, and the cache.
        """
        c = self.config
        D, N, K, H = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        asked = told if wanted is None else told.take(wanted)
        width = 2 * H if c.gated_attention else H  # a query, and the gate of what it returns
        q = project(chosen(x, wanted), self.weight("q_proj", (D, N, width), ("embed", "heads", None)))
        q, gate = q[..., :H], q[..., H:]
        k = project(x, self.weight("k_proj", (D, K, H), ("embed", "kv_heads", None)))
        v = project(x, self.weight("v_proj", (D, K, H), ("embed", "kv_heads", None)))
        if c.qkv_bias:
            zeros = nn.initializers.zeros
            q = q + self.weight("q_bias", (N, H), ("heads", None), zeros)
            k = k + self.weight("k_bias", (K, H), ("kv_heads", None), zeros)
            v = v + self.weight("v_bias", (K, H), ("kv_heads", None), zeros)
        if c.qk_norm:
            q, k = self.normed(q, self.norm_scale("q_norm", H)), self.normed(k, self.norm_scale("k_norm", H))
        if c.clip_qkv is not None:
            q, k, v = (jnp.clip(x, -c.clip_qkv, c.clip_qkv) for x in (q, k, v))
        q, k = self.turned(q, asked.positions), self.turned(k, told.positions)
        if c.yarn is not None and c.yarn.query_growth:
            grown = query_growth(asked.positions, c.yarn.original, c.yarn.query_growth)
            q = (q * grown[..., None, None]).astype(q.dtype)
        if cache is not None and told.visibility.key_length > cache.capacity:  # the entries as they were, then these
            context = jax.tree.map(lambda x: x[layer], cache)
            cache = kv_cache.write(cache, layer, told.slots, k, v)
        elif cache is not None:
            cache = kv_cache.write(cache, layer, told.slots, k, v)
            k, v = (x.astype(q.dtype) for x in kv_cache.read(cache, layer))
        if context is not None:
            k, v = kv_cache.extended(context, k, v)
        cached = cache is not None and context is None  # and lies with heads first
        out = attention(q, k, v, asked.visibility, form=self.form, heads_first=cached)
        out = out * jax.nn.sigmoid(gate) if c.gated_attention else out
        weight = self.weight("o_proj", (N, H, D), ("heads", None, "embed"))
        out = merge(out, weight)
        return out + self.weight("o_bias", (D,), (None,), nn.initializers.zeros) if c.o_bias else out, cache

    def turned(self, x, positions):
        """Returns (B, T, N, H) heads rotated by their (B, T) positions."""
        c, turning, magnitude = self.config, None, 1.0
        if c.yarn is not None:
            turning = yarn_frequencies(c.rotary_dim, c.rope_theta, c.yarn.factor, c.yarn.original, c.yarn.fast,
                                       c.yarn.slow)
            magnitude = c.yarn.magnitude
        return apply_rope(x, positions, c.rope_theta, c.rotary_dim, turning, magnitude)

    @staticmethod
    def init_cache(config: TransformerConfig, params, batch: int, capacity: int, dtype, window: int = 0
                   ) -> kv_cache.KVCache:
        """Returns an empty cache; heads lie on the devices where the weights that make keys of them lie.

        Args:
          config: of the model.
          params: of this mixer, with a leading axis of layers or without.
          batch, capacity: B, S.
          dtype: of keys and values.
          window: tokens of a pass that may be undone; rank hides them, so nothing is kept.
        """
        del window
        weight = params["k_proj"]  # ([L,] D, K, H)
        head = jax.lax.stop_gradient(weight.reshape(-1, *weight.shape[-3:])[:, 0])[:, None, :, None]
        # zeros say nothing about devices: left alone, every device would hold every head
        place = lambda zeros: shard_alike(zeros, jnp.broadcast_to(head, zeros.shape).astype(zeros.dtype))[0]
        return jax.tree.map(place, kv_cache.init(
            head.shape[0], batch, capacity, config.num_kv_heads, config.head_dim, dtype))


class MLP(Owner):
    """SwiGLU feed-forward of one layer."""

    @nn.compact
    def __call__(self, x):
        D, F = self.config.hidden_size, self.config.intermediate_size
        gate = matmul(x, self.weight("gate_proj", (D, F), ("embed", "mlp")))
        up = matmul(x, self.weight("up_proj", (D, F), ("embed", "mlp")))
        return matmul(jax.nn.silu(gate) * up, self.weight("down_proj", (F, D), ("mlp", "embed")))


# what a kind of `TransformerConfig.pattern` may name, see `config.parts`
MIXERS = {"attention": Attention, "gated_delta": GatedDelta}
MLPS = {"mlp": MLP, "moe": MoE}


class Layer(Owner):
    """One pre-norm layer.

    Attributes:
      kind: of its mixer and MLP, see `config.parts`.
      view: which attention set of a dual model runs, a key of `VIEWS`.
      form: see `Attention`.
    """

    kind: str = "attention"
    view: str = "ar"
    form: str = "auto"

    @property
    def mixer(self) -> str:
        """Name of the mixer that runs, in the parameter tree."""
        mixer, _ = parts(self.kind)
        return VIEWS[self.view] if mixer == "attention" else mixer

    @nn.compact
    def __call__(self, x, told: Pass, cache, layer, context=None, wanted=None):
        """Returns (B, C, D) activations and the cache; arguments as `Attention`'s, `x` before normalisation."""
        c = self.config
        mixing, mlp = parts(self.kind)
        mixer = lambda name: MIXERS[mixing](c, self.dtype, form=self.form, name=name)
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        normed = self.normed(x, self.norm_scale("input_norm", c.hidden_size))
        arguments = (normed, told, cache, layer, context, wanted)
        if c.dual and self.is_initializing():  # the other view's parameters exist as well
            for name in sorted({*VIEWS.values()} - {self.mixer}):
                mixer(name)(*arguments)
        mixed, cache = mixer(self.mixer)(*arguments)
        x = chosen(x, wanted) + mixed
        normed = self.normed(x, self.norm_scale("post_attention_norm", c.hidden_size))
        return x + MLPS[mlp](c, self.dtype, name=mlp)(normed), cache
