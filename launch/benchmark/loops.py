"""The same forward by other means: the bare model, its matrix products alone, and eager PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass


def bare_loop(model: Any, batch: int, tokens: int, capacity: int, forwards: int):
    """Returns a compiled function of params that calls the model `forwards` times on these shapes."""
    position = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    rank = jnp.broadcast_to(jnp.arange(capacity), (batch, capacity))

    @jax.jit
    def run(params):
        score = model.scorer(params)

        def body(_, carry):
            cache, ids = carry
            rule = vis.by_rank(jnp.zeros_like(position), position, rank)
            hidden, cache = score.hidden(ids, Pass(position, rule, position), cache)
            return cache, jnp.argmax(score.head(hidden), axis=-1).astype(jnp.int32)

        start = (score.init_cache(batch, capacity), jnp.zeros((batch, tokens), jnp.int32))
        return jax.lax.fori_loop(0, forwards, body, start)[1]

    return run


def floor_loop(config: Any, batch: int, tokens: int, capacity: int, forwards: int):
    """Returns a compiled function of unrolled params that does only the matrix products of such a call."""
    c = config
    N, K, H, D = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size

    @jax.jit
    def run(params, memory):
        layers = [params[f"layers_{i}"] for i in range(c.num_layers)]

        def body(_, x):
            first = x
            for w, kv in zip(layers, memory):
                a, m = w["attention"], w["mlp"]
                q = x @ a["q_proj"].reshape(D, N * H)
                kv_new = x @ a["k_proj"].reshape(D, K * H) + x @ a["v_proj"].reshape(D, K * H)
                q = q.reshape(batch, tokens, K, N // K, H)
                logits = jnp.einsum("btkgh,bksh->bkgts", q, kv)
                seen = jnp.einsum("bkgts,bksh->btkgh", logits, kv).reshape(-1, N * H)
                x = x + seen @ a["o_proj"].reshape(N * H, D) + jnp.sum(kv_new, axis=1, keepdims=True)
                x = x + ((x @ m["gate_proj"]) * (x @ m["up_proj"])) @ m["down_proj"]
            logits = x @ params["embed"].T
            return first + 1e-30 * jnp.max(logits, axis=1, keepdims=True)

        return jax.lax.fori_loop(0, forwards, body, jnp.full((batch * tokens, D), 1e-3))

    memory = [jnp.full((batch, K, capacity, H), 1e-6) for _ in range(c.num_layers)]
    return lambda params: run(params, memory)


def eager_call(folder: str, batch: int, tokens: int, capacity: int):
    """Returns a function that makes one cached call of that shape in eager PyTorch, None without torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache
    except ImportError:
        return None
    torch.set_grad_enabled(False)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    past = DynamicCache(config=network.config)
    context = capacity - tokens
    network(input_ids=torch.ones((batch, context), dtype=torch.long), past_key_values=past, use_cache=True)
    ids = torch.ones((batch, tokens), dtype=torch.long)
    place = torch.arange(context, capacity)[None].expand(batch, -1)

    def call():
        network(input_ids=ids, position_ids=place, past_key_values=past, use_cache=True).logits.argmax(-1)
        past.crop(-tokens)

    return call
