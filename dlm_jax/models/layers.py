"""The layers of a stack as thin Linen modules: they own parameters, `dlm_jax.nn` owns the mathematics.

A layer is a mixer (attention, or another kind of `MIXERS`), which lets tokens read each other, and an MLP.

Letters: B batch, T tokens, C wanted outputs (T where all are), S cache entries, D width, N query heads, K KV heads,
H head dim, F MLP width, L layers of one kind.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.shard_alike import shard_alike

from dlm_jax.models.config import TransformerConfig
from dlm_jax.nn import cache as kv_cache
from dlm_jax.nn.attention import attention
from dlm_jax.nn.norms import rms_norm
from dlm_jax.nn.rope import apply_rope
from dlm_jax.scoring import Pass

VIEWS = {"ar": "attention", "diffusion": "attention_diffusion"}  # and the module whose parameters it uses


class Owner(nn.Module):
    """A module that creates parameters with logical axis names."""

    config: TransformerConfig
    dtype: Any = None  # computation dtype; None computes in the parameters' own

    def weight(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init=None) -> Array:
        init = init or nn.initializers.normal(self.config.initializer_range)
        value = self.param(name, nn.with_logical_partitioning(init, axes), shape)
        return value if self.dtype is None else value.astype(self.dtype)

    def ones(self, name: str, size: int) -> Array:
        return self.weight(name, (size,), (None,), nn.initializers.ones)


def chosen(x: Array, wanted: Array | None) -> Array:
    """Returns the (B, C, D) tokens `wanted` of (B, T, D); all of them for None."""
    return x if wanted is None else jnp.take_along_axis(x, wanted[..., None], axis=1)


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
        heads = lambda x, w: (x @ w.reshape(D, -1)).reshape(*x.shape[:2], *w.shape[1:])  # plain products: no copies
        asked = told if wanted is None else told.take(wanted)
        q = heads(chosen(x, wanted), self.weight("q_proj", (D, N, H), ("embed", "heads", None)))
        k = heads(x, self.weight("k_proj", (D, K, H), ("embed", "kv_heads", None)))
        v = heads(x, self.weight("v_proj", (D, K, H), ("embed", "kv_heads", None)))
        if c.qkv_bias:
            zeros = nn.initializers.zeros
            q = q + self.weight("q_bias", (N, H), ("heads", None), zeros)
            k = k + self.weight("k_bias", (K, H), ("kv_heads", None), zeros)
            v = v + self.weight("v_bias", (K, H), ("kv_heads", None), zeros)
        if c.qk_norm:
            q = rms_norm(q, self.ones("q_norm", H), c.rms_norm_eps)
            k = rms_norm(k, self.ones("k_norm", H), c.rms_norm_eps)
        q, k = apply_rope(q, asked.positions, c.rope_theta), apply_rope(k, told.positions, c.rope_theta)
        if cache is not None:
            cache = kv_cache.write(cache, layer, told.slots, k, v)
            k, v = (x.astype(q.dtype) for x in kv_cache.read(cache, layer))
        if context is not None:
            k, v = kv_cache.extended(context, k, v)
        out = attention(q, k, v, asked.visibility, form=self.form)
        weight = self.weight("o_proj", (N, H, D), ("heads", None, "embed"))
        return out.reshape(*out.shape[:2], N * H) @ weight.reshape(N * H, D), cache

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


MIXERS = {"attention": Attention}  # what a name of `TransformerConfig.pattern` may be


class MLP(Owner):
    """SwiGLU feed-forward of one layer."""

    @nn.compact
    def __call__(self, x):
        D, F = self.config.hidden_size, self.config.intermediate_size
        gate = x @ self.weight("gate_proj", (D, F), ("embed", "mlp"))
        up = x @ self.weight("up_proj", (D, F), ("embed", "mlp"))
        return (jax.nn.silu(gate) * up) @ self.weight("down_proj", (F, D), ("mlp", "embed"))


class Layer(Owner):
    """One pre-norm layer.

    Attributes:
      kind: of its mixer, a key of `MIXERS`.
      view: which attention set of a dual model runs, a key of `VIEWS`.
      form: see `Attention`.
    """

    kind: str = "attention"
    view: str = "ar"
    form: str = "auto"

    @property
    def mixer(self) -> str:
        """Name of the mixer that runs, in the parameter tree."""
        return VIEWS[self.view] if self.kind == "attention" else self.kind

    @nn.compact
    def __call__(self, x, told: Pass, cache, layer, context=None, wanted=None):
        """Returns (B, C, D) activations and the cache; arguments as `Attention`'s, `x` before normalisation."""
        c = self.config
        mixer = lambda name: MIXERS[self.kind](c, self.dtype, form=self.form, name=name)
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        normed = rms_norm(x, self.ones("input_norm", c.hidden_size), c.rms_norm_eps)
        arguments = (normed, told, cache, layer, context, wanted)
        if c.dual and self.is_initializing():  # the other view's parameters exist as well
            for name in sorted({*VIEWS.values()} - {self.mixer}):
                mixer(name)(*arguments)
        mixed, cache = mixer(self.mixer)(*arguments)
        x = chosen(x, wanted) + mixed
        normed = rms_norm(x, self.ones("post_attention_norm", c.hidden_size), c.rms_norm_eps)
        return x + MLP(c, self.dtype, name="mlp")(normed), cache
