"""The dense stack as thin Linen modules: they own parameters, `dlm_jax.nn` owns the mathematics.

One stack serves every family of `config.FAMILIES`. A dual model (Orthrus) has two attention sets in every layer and
runs one of them, its view; embedding, norms, MLPs and head are shared.

Letters: B batch, T query tokens, S keys, D width, N query heads, K KV heads, H head dim, F MLP width,
V vocabulary, L layers. By default all layers are one scanned module, so a parameter below `layers` has a leading L;
unrolled, they are modules `layers_0`, `layers_1`, ... of their own (`build.unroll`).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.models.config import TransformerConfig
from dlm_jax.nn import cache as kv_cache
from dlm_jax.nn.attention import attention
from dlm_jax.nn.norms import rms_norm
from dlm_jax.nn.rope import apply_rope


class _Owner(nn.Module):
    """A module that creates parameters with logical axis names."""

    config: TransformerConfig
    dtype: Any = None  # computation dtype; None computes in the parameters' own

    def weight(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init=None) -> Array:
        init = init or nn.initializers.normal(self.config.initializer_range)
        value = self.param(name, nn.with_logical_partitioning(init, axes), shape)
        return value if self.dtype is None else value.astype(self.dtype)

    def ones(self, name: str, size: int) -> Array:
        return self.weight(name, (size,), (None,), nn.initializers.ones)


VIEWS = {"ar": "attention", "diffusion": "attention_diffusion"}  # and the module whose parameters it uses


class Attention(_Owner):
    """Projections, q/k norm, RoPE, cache and attention of one layer."""

    @nn.compact
    def __call__(self, x, positions, visibility, cache, layer, slots, context):
        c = self.config
        D, N, K, H = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        B, T, _ = x.shape
        heads = lambda w: (x @ w.reshape(D, -1)).reshape(B, T, *w.shape[1:])  # plain matrix products: no copies
        q = heads(self.weight("q_proj", (D, N, H), ("embed", "heads", None)))
        k = heads(self.weight("k_proj", (D, K, H), ("embed", "kv_heads", None)))
        v = heads(self.weight("v_proj", (D, K, H), ("embed", "kv_heads", None)))
        if c.qkv_bias:
            zeros = nn.initializers.zeros
            q = q + self.weight("q_bias", (N, H), ("heads", None), zeros)
            k = k + self.weight("k_bias", (K, H), ("kv_heads", None), zeros)
            v = v + self.weight("v_bias", (K, H), ("kv_heads", None), zeros)
        if c.qk_norm:
            q = rms_norm(q, self.ones("q_norm", H), c.rms_norm_eps)
            k = rms_norm(k, self.ones("k_norm", H), c.rms_norm_eps)
        q, k = apply_rope(q, positions, c.rope_theta), apply_rope(k, positions, c.rope_theta)
        if cache is not None:
            cache = kv_cache.write(cache, layer, slots, k, v)
            k, v = (x.astype(q.dtype) for x in kv_cache.read(cache, layer))
        if context is not None:
            k, v = kv_cache.extended(context, k, v)
        out = attention(q, k, v, visibility).reshape(B, T, N * H)
        return out @ self.weight("o_proj", (N, H, D), ("heads", None, "embed")).reshape(N * H, D), cache


class MLP(_Owner):
    """SwiGLU feed-forward of one layer."""

    @nn.compact
    def __call__(self, x):
        D, F = self.config.hidden_size, self.config.intermediate_size
        gate = x @ self.weight("gate_proj", (D, F), ("embed", "mlp"))
        up = x @ self.weight("up_proj", (D, F), ("embed", "mlp"))
        return (jax.nn.silu(gate) * up) @ self.weight("down_proj", (F, D), ("mlp", "embed"))


class Block(_Owner):
    """One pre-norm layer; the carry is (activations, cache), so that the cache is updated in place."""

    view: str = "ar"

    @nn.compact
    def __call__(self, carry, layer, positions, visibility, slots, context=None):
        x, cache = carry
        c = self.config
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        normed = rms_norm(x, self.ones("input_norm", c.hidden_size), c.rms_norm_eps)
        arguments = (normed, positions, visibility, cache, layer, slots, context)
        if c.dual and self.is_initializing():  # the other view's parameters exist as well
            for name in sorted({*VIEWS.values()} - {VIEWS[self.view]}):
                Attention(c, self.dtype, name=name)(*arguments)
        mixed, cache = Attention(c, self.dtype, name=VIEWS[self.view])(*arguments)
        x = x + mixed
        normed = rms_norm(x, self.ones("post_attention_norm", c.hidden_size), c.rms_norm_eps)
        return (x + MLP(c, self.dtype, name="mlp")(normed), cache), None


class Transformer(_Owner):
    """Embedding, L scanned layers, final norm and head.

    Attributes:
      config: the shape.
      dtype: computation dtype, None for the parameters' own.
      remat: recompute each layer in the backward pass instead of storing its activations.
      scan: whether the layers are stacked and scanned; it compiles one layer instead of L.
      view: which attention set of a dual model runs, a key of `VIEWS`.
    """

    remat: bool = False
    scan: bool = True
    view: str = "ar"

    def __call__(self, tokens, positions, visibility, cache=None, slots=None):
        """Returns logits and the cache; touches every parameter, so `init` goes through here."""
        hidden, cache = self.hidden(tokens, positions, visibility, cache, slots)
        return self.head(hidden), cache

    def setup(self):
        c = self.config
        self.embed = self.weight("embed", (c.vocab_size, c.hidden_size), ("vocab", "embed"))
        if not c.tie_word_embeddings:
            self.lm_head = self.weight("lm_head", (c.vocab_size, c.hidden_size), ("vocab", "embed"))
        self.final_norm = self.ones("final_norm", c.hidden_size)
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        if not self.scan:
            self.layers = [block(c, self.dtype, view=self.view) for _ in range(c.num_layers)]
            return
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, 0),
            length=c.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(c, self.dtype, view=self.view)

    def hidden(self, tokens, positions, visibility, cache=None, slots=None):
        """Returns (B, T, D) hidden states after the final norm, and the cache; see `types.Scorer.hidden`."""
        x = jnp.take(self.embed, tokens, axis=0)
        # a cache that is only read is an input of every layer, not a carry: the backward pass stores no copies of it
        context, cache = (cache, None) if slots is None else (None, cache)
        if self.scan:
            layer = jnp.arange(self.config.num_layers)
            (x, cache), _ = self.layers((x, cache), layer, positions, visibility, slots, context)
        else:
            caches = [None] * len(self.layers) if cache is None else list(cache)
            for i, block in enumerate(self.layers):
                own = None if context is None else jax.tree.map(lambda a: a[0], context[i])
                (x, caches[i]), _ = block((x, caches[i]), 0, positions, visibility, slots, own)
            cache = None if cache is None else tuple(caches)
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps), cache if context is None else context

    def head(self, hidden):
        """Returns (..., V) float32 logits of (..., D) hidden states."""
        table = self.embed if self.config.tie_word_embeddings else self.lm_head
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)

    def scorer(self, params):
        """Returns the `types.Scorer` of these parameters; call it inside the function that is compiled."""
        from dlm_jax.models.build import BoundScorer  # build imports this module

        return BoundScorer(self, params)
