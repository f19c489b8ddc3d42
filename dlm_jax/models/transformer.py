"""A stack of layers: embedding, periods of named layer kinds, final norm and head.

One stack serves every family of `config.FAMILIES`. A dual model (Orthrus) has two attention sets in every layer and
runs one of them, its view; embedding, norms, MLPs and head are shared.

A period is the run of layer kinds that repeats (`TransformerConfig.pattern`). By default all periods are one scanned
module, so a parameter below `layers` leads with their number; where a period has several layers, each stands below a
name of its own, `layers/layer_0`. Unrolled (`build.unroll`), layers are modules `layers_0`, `layers_1`, ...

Letters: B batch, T tokens, C wanted outputs, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dlm_jax.models.layers import Layer
from dlm_jax.models.owner import ADAPTER, Owner, chosen
from dlm_jax.models.scorer import BoundScorer
from dlm_jax.nn import products
from dlm_jax.scoring import Pass

_STRIPS, _ROWS = 32, 16  # of the head's table, see `Transformer.head_tile`
FEW = 4  # a scanned stack compiles its last period apart where one output in so many is wanted, or fewer


class Period(Owner):
    """The layers that repeat; its carry is (activations, cache), so that the cache is updated in place.

    Attributes:
      view, form: see `Layer`.
    """

    view: str = "ar"
    form: str = "auto"

    def setup(self):
        """Makes the layers of a period."""
        self.layer = [Layer(self.config, self.dtype, kind, self.view, self.form) for kind in self.config.pattern]
        if len(self.layer) == 1:  # the period is its layer, in the parameter tree too
            nn.share_scope(self, self.layer[0])

    def __call__(self, carry, index, told, contexts, wanted=None):
        x, caches = carry
        last = len(self.layer) - 1
        for place, layer in enumerate(self.layer):
            x, member = layer(
                x, told, None if caches is None else caches.members[place], index,
                None if contexts is None else contexts[place], wanted if place == last else None)
            caches = None if caches is None else caches.at(place, member)
        return (x, caches), None


class Transformer(Owner):
    """Embedding, periods of layers, final norm and head.

    Attributes:
      config: the shape.
      dtype: computation dtype, None for the parameters' own.
      remat: recompute each period in the backward pass instead of storing its activations.
      scan: whether the periods are stacked and scanned; it compiles one instead of all.
      view: which attention set of a dual model runs, a key of `layers.VIEWS`.
      attention_form: how every layer computes attention, see `nn.attention.attention`.
    """

    remat: bool = False
    scan: bool = True
    view: str = "ar"
    attention_form: str = "auto"

    def __call__(self, tokens, told: Pass, cache=None, wanted=None):
        """Returns logits and the cache; touches every parameter, so `init` goes through here."""
        hidden, cache = self.hidden(tokens, told, cache, wanted)
        return self.head(hidden), cache

    def setup(self):
        """Makes the embedding, the stack, the last norm and, where it is not the embedding, the head."""
        c = self.config
        self.embed = self.weight("embed", (c.vocab_size, c.hidden_size), ("vocab", "embed"))
        if not c.tie_word_embeddings:
            self.lm_head = self.weight("lm_head", (c.vocab_size, c.hidden_size), ("vocab", "embed"))
        self.final_norm = self.norm_scale("final_norm", c.hidden_size)
        optional_remat = lambda module: nn.remat(module, prevent_cse=False) if self.remat else module
        if not self.scan:
            layer = optional_remat(Layer)
            self.layers = [layer(c, self.dtype, kind, self.view, self.attention_form)
                           for kind in c.pattern * c.num_periods]
            return
        self.layers = nn.scan(
            optional_remat(Period),
            variable_axes={"params": 0, ADAPTER: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, 0),
            length=c.num_periods,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(c, self.dtype, self.view, self.attention_form)

    def hidden(self, tokens, told: Pass, cache=None, wanted=None):
        """Returns hidden states after the final norm, and the cache; see `scoring.Scorer.hidden`."""
        x = jnp.take(self.embed, tokens, axis=0)
        # a cache that is only read is an input of every layer, not a carry: the backward pass stores no copies of it
        context, cache = (cache, None) if told.slots is None else (None, cache)
        if not self.scan:
            x, cache = self._unrolled(x, told, cache, context, wanted)
        elif wanted is None or tokens.shape[1] < FEW * wanted.shape[1]:
            members = None if context is None else context.members
            (x, cache), _ = self.layers((x, cache), jnp.arange(self.config.num_periods), told, members)
            x = chosen(x, wanted)
        else:
            x, cache = self._last_apart(x, told, cache, context, wanted)
        return self.normed(x, self.final_norm), cache if context is None else context

    def _unrolled(self, x, told, cache, context, wanted):
        for i, layer in enumerate(self.layers):
            own = None if context is None else jax.tree.map(lambda a: a[0], context.members[i])
            x, member = layer(x, told, None if cache is None else cache.members[i], 0, own,
                              wanted if i + 1 == len(self.layers) else None)
            cache = None if cache is None else cache.at(i, member)
        return x, cache

    def _last_apart(self, x, told, cache, context, wanted):
        """Runs a scanned stack whose last period computes the wanted outputs only; not for gradients."""
        c = self.config
        stacked = {name: tree["layers"] for name, tree in self.variables.items() if "layers" in tree}
        period = Period(c, self.dtype, self.view, self.attention_form, parent=None)

        def run(index, carry, wanted=None):
            of = lambda tree: jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)
            members = None if context is None else of(context.members)
            return period.apply(of(stacked), carry, index, told, members, wanted)[0]

        carry = jax.lax.fori_loop(0, c.num_periods - 1, run, (x, cache))
        return run(c.num_periods - 1, carry, wanted)

    def head(self, hidden):
        """Returns (..., V) float32 logits of (..., D) hidden states."""
        return products.logits(hidden, self.embed if self.config.tie_word_embeddings else self.lm_head)

    def head_tile(self, hidden, index, count: int):
        """Returns (..., U) float32 logits of a part of the vocabulary, and their ids; see `scoring.Scorer.head_tile`.

        A tile takes as much of each of several strips of the table, so that devices which share its rows have as much
        of every tile. Strips and tiles are whole registers of 16 rows where the vocabulary is: a view, no copy.
        """
        table = self.embed if self.config.tie_word_embeddings else self.lm_head
        V, D = table.shape
        strips = math.gcd(V // _ROWS, _STRIPS) if V % _ROWS == 0 else 1
        length = V // strips
        size = min(length, -(-length // (count * _ROWS)) * _ROWS)
        start = jnp.minimum(index * size, length - size)  # the last tile begins within the one before it
        part = jax.lax.dynamic_slice_in_dim(table.reshape(strips, length, D), start, size, axis=1)
        place = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), (strips, size))
        ids = place + length * jnp.arange(strips, dtype=jnp.int32)[:, None]
        logits = products.logits(hidden, part.reshape(strips * size, D))
        return jnp.where(place.reshape(-1) >= index * size, logits, -jnp.inf), ids.reshape(-1)

    def scorer(self, params: Any):
        """Returns the `scoring.Scorer` of these parameters; call it inside the function that is compiled."""
        return BoundScorer(self, params)
