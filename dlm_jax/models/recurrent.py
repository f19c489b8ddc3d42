"""The gated delta rule mixer as a thin Linen module; `nn.gated_delta` owns the mathematics.

Letters: B batch, T tokens, C wanted outputs, D width, J key heads, H value heads, E key width, F value width, X taps.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.shard_alike import shard_alike

from dlm_jax.models.config import TransformerConfig
from dlm_jax.models.owner import Owner, chosen
from dlm_jax.nn import gated_delta, recurrent_cache
from dlm_jax.nn.gated_delta import Channels, Stream
from dlm_jax.nn.products import matmul, merge, project
from dlm_jax.scoring import Pass, Streams, Window


def _log_rates(key, shape, dtype=jnp.float32) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1e-3, 16.0))


class GatedDelta(Owner):
    """Projections, short convolution, gates, delta rule and gated norm of one layer.

    Attributes:
      form: of attention layers; the delta rule picks its own by platform.

    Source: Yang et al., "Gated Delta Networks"; FLARE, Sec. 3 (streams and windows).
    """

    form: str = "auto"

    @nn.compact
    def __call__(self, x, told: Pass, cache, layer, context, wanted):
        """Mixes (B, T, D) tokens.

        Args:
          x: (B, T, D) normalised activations.
          told: see `Pass`; visibility and positions say nothing here.
          cache: a `RecurrentCache` that is read and advanced, or None.
          layer: () int32 index into it.
          context: a `RecurrentCache` of this layer alone, that is only read; or None.
          wanted: (B, C) int32 tokens whose outputs are computed; None for all.

        Returns:
          (B, C, D) outputs, and the cache.

        Raises:
          ValueError: a schedule that does not fit the pass.
        """
        s, D = self.config.gated_delta, self.config.hidden_size
        of_keys, of_values = (s.key_heads, s.key_dim), (s.value_heads, s.value_dim)
        shapes = Channels(of_keys, of_keys, of_values)
        names = Channels("kv_heads", "kv_heads", "heads")
        raw = Channels(*(project(x, self.weight(f"{of}_proj", (D, *shape), ("embed", axis, None)))
                         for of, shape, axis in zip(Channels._fields, shapes, names)))
        taps = nn.initializers.uniform(2 * s.taps ** -0.5)
        centred = lambda *args: taps(*args) - s.taps ** -0.5
        filters = Channels(*(self.weight(f"{of}_conv", (*shape, s.taps), (axis, None, None), centred)
                             for of, shape, axis in zip(Channels._fields, shapes, names)))
        a, b = (matmul(x, self.weight(f"{of}_proj", (D, s.value_heads), ("embed", "heads"))) for of in "ab")
        g, beta = gated_delta.gates(a, b, self.weight("a_log", (s.value_heads,), ("heads",), _log_rates),
                                    self.weight("dt_bias", (s.value_heads,), ("heads",), nn.initializers.ones))
        if cache is None and context is None and not isinstance(told.recurrence, Window):
            out = _streams(told.recurrence or Streams(), raw, g, beta, filters)
        else:
            out, cache = _advance(told, raw, g, beta, filters, cache, layer, context)
        z = project(chosen(x, wanted), self.weight("z_proj", (D, *of_values), ("embed", "heads", None)))
        scale = self.weight("out_norm", (s.value_dim,), (None,), nn.initializers.ones)
        out = gated_delta.gated_norm(_chosen_heads(out, wanted), z, scale, self.config.rms_norm_eps)
        weight = self.weight("o_proj", (*of_values, D), ("heads", None, "embed"))
        return merge(out, weight), cache

    @staticmethod
    def init_cache(config: TransformerConfig, params, batch: int, capacity: int, dtype, window: int = 0
                   ) -> recurrent_cache.RecurrentCache:
        """Returns an empty cache; heads lie on the devices where the weights that make them lie.

        Args:
          config: of the model.
          params: of this mixer, with a leading axis of layers or without.
          batch, capacity: B, S.
          dtype: of raw convolution inputs.
          window: tokens of a pass that may be undone.
        """
        del config
        weights = Channels(*(params[f"{of}_conv"] for of in Channels._fields))
        filters = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[-3:], w.dtype), weights)
        heads = jax.tree.map(lambda w: jax.lax.stop_gradient(w.reshape(-1, *w.shape[-3:])[..., 0, 0]), weights)
        layers = heads.k.shape[0]
        empty = recurrent_cache.init(layers, batch, capacity, max(window, 1), filters, dtype)

        def place(zeros, axis, heads):  # zeros say nothing about devices, see `Attention.init_cache`
            like = heads.reshape(layers, *(heads.shape[1] if i == axis else 1 for i in range(1, zeros.ndim)))
            return shard_alike(zeros, jnp.broadcast_to(like, zeros.shape).astype(zeros.dtype))[0]

        k, u, g = empty.writes
        return empty.replace(
            state=place(empty.state, 2, heads.v),
            inputs=jax.tree.map(lambda zeros, of: place(zeros, 3, of), empty.inputs, heads),
            writes=gated_delta.Writes(place(k, 3, heads.k), place(u, 3, heads.v), place(g, 3, heads.v)))


def _chosen_heads(x: Array, wanted: Array | None) -> Array:
    """Returns the (B, C, H, F) tokens `wanted` of (B, T, H, F)."""
    return chosen(x.reshape(*x.shape[:2], -1), wanted).reshape(x.shape[0], -1, *x.shape[2:])


def _streams(told: Streams, raw: Channels, g: Array, beta: Array, filters: Channels) -> Array:
    return gated_delta.streams(raw, g, beta, filters, views=told.views, block_size=told.block_size,
                               documents=told.documents, causal=told.causal)


def _advance(told: Pass, raw: Channels, g: Array, beta: Array, filters: Channels, cache, layer, context):
    """Runs a pass over a kept state; returns (B, T, H, F) outputs and the cache."""
    if isinstance(told.recurrence, Streams):
        raise ValueError("a pass over a cache was told the Streams of a training row; tell recurrent layers of it by "
                         "a Window, or by None")
    if cache is None and told.recurrence is None:
        raise ValueError("a pass that only reads the cache says nothing of what recurrent layers read; give it "
                         "recurrence=Window(advance, read)")
    B, T = g.shape[:2]
    before = recurrent_cache.init(1, B, 0, 1, filters, raw.k.dtype).layer(0) if cache is None else cache.layer(layer)
    before = before if context is None else context
    window = told.recurrence
    if window is None:
        advance, block = jnp.sum(told.slots < cache.capacity, axis=1, dtype=jnp.int32), None
    else:
        advance, block = window.advance, window.read
    state, tail = before.settled()
    x, _ = gated_delta.convolve(raw, filters, tail=tail)
    stream = Stream(*x, g, beta)
    undone = window is not None and window.tentative
    deferred = cache is not None and (undone or T <= before.window)
    if T <= gated_delta.SHORT or deferred:
        out, writes = gated_delta.read(state, stream, advance, jnp.zeros_like(advance) if block is None else block)
    else:
        out, after = gated_delta.read_long(state, stream, advance, block)
    if cache is None:
        return out, None
    if deferred:
        return out, cache.at(layer, recurrent_cache.keep(before, state, tail, raw, writes, advance))
    if T <= gated_delta.SHORT:
        after = gated_delta.write(state, writes, advance)
    return out, cache.at(layer, recurrent_cache.settle(before, after, tail, raw, advance))
