"""Layouts spelled with the rule's integers, for tests of the kernels: packed rows, orders inside a block, windows."""
import jax.numpy as jnp

from pallas_kernels.attention import visibility
from pallas_kernels.attention.visibility import NONE, Visibility, by_rank, run_bounds, token_index


def two_stream(documents, size, views=1, token_causal=True, causal_noise=False) -> Visibility:
    """Blocks of `size` tokens from each document's start; causal noise sees its own block up to itself."""
    documents = jnp.asarray(documents)
    index, (first, _) = token_index(*documents.shape), run_bounds(documents)
    inside = (index - first) % size
    return visibility.two_stream(
        jnp.where(documents >= 0, index - inside, NONE), documents, views, token_causal, causal_noise)


def packed(documents, both_ways=False) -> Visibility:
    """Every token sees its document's past, or all of it; negative documents are padding."""
    documents = jnp.asarray(documents)
    (first, last), index, valid = run_bounds(documents), token_index(*documents.shape), documents >= 0
    return by_rank(first, jnp.where(valid, last if both_ways else index, NONE), jnp.where(valid, index, NONE))


def window(prefix, capacity, verify, draft) -> Visibility:
    """[verify, draft] queries over [cache, verify keys, draft keys]: verify is causal, draft sees all and itself."""
    prefix = jnp.asarray(prefix)[:, None]
    rows = len(prefix)
    cache, step, noise = (token_index(rows, n) for n in (capacity, verify, draft))
    none = lambda n: jnp.full((rows, n), NONE, jnp.int32)
    limit = jnp.concatenate([prefix + step, prefix + verify - 1 + 0 * noise], 1)
    group_q = jnp.concatenate([none(verify), 0 * noise], 1)
    group_k = jnp.concatenate([none(capacity + verify), 0 * noise], 1)
    rank = jnp.concatenate([jnp.where(cache < prefix, cache, NONE), prefix + step, none(draft)], 1)
    return Visibility(0 * limit, limit, group_q, 0 * limit, rank, group_k, 0 * rank)


def blocks_over_context(context, limits, size) -> Visibility:
    """Blocks of `size` queries over [context keys, block keys]: the context up to a limit, and the own block."""
    limits = jnp.asarray(limits, jnp.int32)
    none = jnp.full((len(limits), context), NONE, jnp.int32)
    block = token_index(*limits.shape) // size
    rank = jnp.concatenate([token_index(len(limits), context), 0 * limits + NONE], 1)
    group_k = jnp.concatenate([none, block], 1)
    return Visibility(0 * limits, limits, block, 0 * limits, rank, group_k, 0 * rank)
