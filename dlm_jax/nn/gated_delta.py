"""Gated delta rule layers as functions: gates, short convolution, training streams, passes over a kept state.

A state S (E, F) of a head is read by a query and written by a token, in this order: S <- e^g S, then
S <- S + k (beta (v - k S)), then o = s q S. A pass of few tokens never forms the states between them: what token t
corrects, u_t = beta_t (v_t - k_t S_before), is a row of the triangular system

    (I + A) U = beta V - beta e^G K S,    A = strict_lower(beta K K^T e^(G_i - G_j)),

and the state after token e, read by q, is q S_e = e^(G_e) q S + sum_(j <= e) (q . k_j) e^(G_e - G_j) u_j. Causal tokens
and a block that is read at its end differ in e alone, and the state after any number of tokens is one sum over their
(k, u, g): a pass that may be undone keeps those few numbers instead of states.

Letters: B batch, W noisy views, T tokens, J key heads, H value heads, E key width, F value width, X taps.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.nn import devices
from dlm_jax.types import HEADS, ROWS
from pallas_kernels import Stream, short_conv, two_stream_gated_delta
from pallas_kernels.gated_delta.chunk import inverse_with_gradient

SHORT = 64  # tokens of a pass over a kept state that are solved as one triangular system
CHUNK = 64  # tokens of a chunk of longer ones


class Channels(NamedTuple):
    """What the short convolution runs over: its inputs, its filters, or the inputs of earlier tokens.

    Attributes:
      q, k: (..., J, E), filters (J, E, X).
      v: (..., H, F), filters (H, F, X); the last tap multiplies the token itself.
    """

    q: Array
    k: Array
    v: Array


class Writes(NamedTuple):
    """What tokens write to a state.

    Attributes:
      k: (B, T, J, E) keys. u: (B, T, H, F) corrections. g: (B, T, H) log gates; zeros leave the state as it is.
    """

    k: Array
    u: Array
    g: Array


def gates(a: Array, b: Array, log_rate: Array, bias: Array) -> tuple[Array, Array]:
    """Returns (..., H) float32 log gates, at most 0, and write strengths in (0, 1).

    Args:
      a, b: (..., H) projections.
      log_rate: (H,) natural logarithm of the decay rate.
      bias: (H,) added to `a`.

    Source: Yang et al., "Gated Delta Networks", Sec. 3 (the gate of Mamba-2).
    """
    a, b, log_rate, bias = (x.astype(jnp.float32) for x in (a, b, log_rate, bias))
    return -jnp.exp(log_rate) * jax.nn.softplus(a + bias), jax.nn.sigmoid(b)


@functools.partial(jax.checkpoint, static_argnums=3)  # float32 copies of a row are made again, not stored
def gated_norm(x: Array, gate: Array, weight: Array, epsilon: float) -> Array:
    """Divides a head by its root mean square, scales it, and multiplies it by silu(gate).

    Args:
      x, gate: (..., F).
      weight: (F,) plain scale.
      epsilon: added to the mean square.

    Returns:
      (..., F) in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    scaled = (normed.astype(x.dtype) * weight.astype(x.dtype)).astype(jnp.float32)
    return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def _unit(x: Array) -> Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def convolve(x: Channels, filters: Channels, noisy: Channels | None = None, *, tail: Channels | None = None,
             block_size: int = 1, documents: Array | None = None) -> tuple[Channels, Channels | None]:
    """Runs the short convolution and silu, and gives queries and keys unit length.

    Args:
      x: (B, T, ...) inputs.
      filters: one a channel.
      noisy: (B, W, T, ...) inputs of noisy views, whose lags read clean tokens before their block; or None.
      tail: (B, X - 1, ...) inputs before token 0, oldest first; None for zeros.
      block_size: tokens of a block.
      documents: (B, T) int32; no lag reaches across a change of number.

    Returns:
      What the delta rule reads, of the inputs and of the noisy views.
    """
    @functools.partial(jax.checkpoint, static_argnums=0)  # cheap, and several times the size of what it is made from
    def one(unit, x, weight, noisy, tail):
        flat = lambda a: None if a is None else a.reshape(*a.shape[:-2], -1)
        weight = weight.reshape(-1, weight.shape[-1])[:, ::-1]
        made = short_conv(flat(x), weight, flat(noisy), block_size=block_size, documents=documents, state=flat(tail))
        made = [None if a is None else jax.nn.silu(a).reshape(like.shape) for a, like in zip(made, (x, noisy))]
        return [None if a is None else _unit(a) for a in made] if unit else made

    nothing = (None,) * 3
    clean, views = zip(*map(one, (True, True, False), x, filters, noisy or nothing, tail or nothing))
    return Channels(*clean), None if noisy is None else Channels(*views)


def streams(x: Channels, g: Array, beta: Array, filters: Channels, *, views: int = 0, block_size: int = 1,
            documents: Array | None = None, causal: bool = False) -> Array:
    """Runs a training row: a clean stream and noisy views seeded from it, from raw channels to what heads return.

    Args:
      x: (B, T, ...) raw channels of [clean | view 1 | ...], T = (1 + views) L.
      g, beta: (B, T, H) float32.
      filters: of the short convolution.
      views, block_size, documents, causal: see `scoring.Streams`.

    Returns:
      (B, T, H, F) in the channels' dtype.

    Raises:
      ValueError: a row that is not 1 + views streams, or documents that do not fit the blocks.
    """
    tokens = g.shape[1]
    if tokens % (1 + views):
        raise ValueError(f"a row of {tokens} tokens is not a clean stream and {views} views of the same length; "
                         f"expected a multiple of {1 + views}")
    length = tokens // (1 + views)
    first = lambda a: a[:, :length]
    rest = lambda a: a[:, length:].reshape(a.shape[0], views, length, *a.shape[2:])
    clean, noisy = jax.tree.map(first, x), jax.tree.map(rest, x) if views else None
    clean, noisy = convolve(clean, filters, noisy, block_size=block_size, documents=documents)
    clean = Stream(*clean, first(g), first(beta))
    noisy = Stream(*noisy, rest(g), rest(beta)) if views else None
    out, noisy_out, _ = _delta(clean, noisy, documents, None, block_size, causal)
    return out if noisy is None else jnp.concatenate([out, noisy_out.reshape(*out.shape[:1], -1, *out.shape[2:])], 1)


def _delta(clean: Stream, noisy: Stream | None, documents, state, block_size: int = 1, causal: bool = False):
    """The kernels' op on each device's own rows and heads, or its XLA form where devices cannot share it so."""
    chunk = block_size * max(1, CHUNK // block_size)
    shared = devices.can_share(clean.q, clean.q.shape[0], clean.q.shape[2])
    run = lambda clean, noisy, documents, state: two_stream_gated_delta(
        clean, noisy, documents=documents, initial_state=state, block_size=block_size, chunk_size=chunk, causal=causal,
        backend=None if shared else "xla")[:3]
    if not shared:
        return run(clean, noisy, documents, state)
    P = jax.P
    of_clean, of_noisy, of_state = P(ROWS, None, HEADS), P(ROWS, None, None, HEADS), P(ROWS, HEADS)
    return devices.share(run, (clean, noisy, documents, state), (of_clean, of_noisy, P(ROWS), of_state),
                         (of_clean, of_noisy, of_state))


def _between(g: Array) -> Array:
    """(B, T, H) log gates to their (B, H, T, T) sums over j < t <= i; no differences of sums, which would cancel."""
    lower = jnp.tri(g.shape[1], dtype=g.dtype)
    rows = lower * jnp.swapaxes(g, 1, 2)[:, :, None]  # (B, H, i, t): the gates up to i
    return jnp.einsum("bhit,tj->bhij", rows, jnp.tri(g.shape[1], k=-1, dtype=g.dtype), precision="highest")


def _of_heads(x: Array, heads: int) -> Array:
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def read(state: Array, x: Stream, advance: Array, block: Array) -> tuple[Array, Writes]:
    """Reads a pass of few tokens: some go on from the state, a block after them is read at its end.

    Args:
      state: (B, H, E, F) before the pass.
      x: the pass, (B, T, ...); its padding, which stands last, is not read.
      advance: (B,) int32 tokens that go on, each reading the state after itself.
      block: (B,) int32 tokens of the block after them, each reading the state after the block.

    Returns:
      (B, T, H, F) outputs in v's dtype, zeros at padding, and what all T tokens would write.
    """
    acc, (tokens, heads) = state.dtype, x.v.shape[1:3]
    dot = functools.partial(jnp.einsum, precision="highest")
    index = jnp.arange(tokens)
    count = (advance + block)[:, None]
    live = (index < count)[..., None]
    g, beta = (jnp.where(live, a.astype(acc), 0) for a in (x.g, x.beta))
    q, k, v = (_of_heads(a.astype(acc), heads) for a in (x.q, x.k, x.v))
    until = jnp.where(index < advance[:, None], index, jnp.maximum(count - 1, 0))  # the token whose state is read
    between = _between(g)
    total = jnp.cumsum(g, axis=1)

    held = dot("bthe,bhef->bthf", jnp.concatenate([k, q], axis=1), state)
    beta_rows = jnp.swapaxes(beta, 1, 2)[..., None]
    below = jnp.tri(tokens, k=-1, dtype=bool)
    system = jnp.where(below, beta_rows * dot("bihe,bjhe->bhij", k, k) * jnp.exp(jnp.where(below, between, 0)), 0)
    invert = jax.vmap(jax.vmap(lambda a: inverse_with_gradient(a, tokens)))
    wanted = beta[..., None] * (v - jnp.exp(total)[..., None] * held[:, :tokens])
    u = dot("bhij,bjhf->bihf", invert(system), wanted)

    sees = index <= until[..., None]  # (B, T, T)
    reach = jnp.take_along_axis(between, until[:, None, :, None], axis=2)
    weight = jnp.where(sees[:, None], jnp.exp(jnp.where(sees[:, None], reach, 0)), 0)
    out = jnp.exp(jnp.take_along_axis(total, until[..., None], axis=1))[..., None] * held[:, tokens:]
    out = out + dot("bhij,bjhf->bihf", dot("bihe,bjhe->bhij", q, k) * weight, u)
    out = jnp.where(live[..., None], q.shape[-1] ** -0.5 * out, 0)
    return out.astype(x.v.dtype), Writes(x.k.astype(acc), u, g)


def write(state: Array, writes: Writes, count: Array) -> Array:
    """Returns the (B, H, E, F) state after the first tokens of `writes`, bit for bit itself after none.

    Args:
      state: (B, H, E, F) before them.
      writes: of T tokens.
      count: (B,) int32 tokens that write.
    """
    kept = (jnp.arange(writes.g.shape[1]) < count[:, None])[..., None]
    g = jnp.where(kept, writes.g, 0)
    later = jnp.flip(jnp.cumsum(jnp.flip(g[:, 1:], 1), axis=1), 1)  # sum over the tokens after each
    later = jnp.concatenate([later, jnp.zeros_like(g[:, :1])], axis=1)
    weight = jnp.where(kept, jnp.exp(later), 0)[..., None]
    keys = _of_heads(writes.k, state.shape[1])
    added = jnp.einsum("bthe,bthf->bhef", keys, weight * writes.u, precision="highest")
    return jnp.exp(jnp.sum(g, axis=1))[..., None, None] * state + added


def read_long(state: Array, x: Stream, advance: Array, block: Array | None) -> tuple[Array, Array]:
    """`read` and `write` of a pass of any length, chunk by chunk.

    Args:
      state, x, advance, block: see `read`; None where no row has a block.

    Returns:
      (B, T, H, F) outputs, anything at padding, and the (B, H, E, F) state after the tokens that go on.
    """
    index = jnp.arange(x.g.shape[1])

    def only(start, stop):
        live = ((index >= start[:, None]) & (index < stop[:, None]))[..., None]
        return x._replace(g=jnp.where(live, x.g, 0), beta=jnp.where(live, x.beta, 0))

    out, _, after = _delta(only(jnp.zeros_like(advance), advance), None, None, state)
    if block is None:
        return out, after
    _, _, end = _delta(only(advance, advance + block), None, None, after)
    q = _of_heads(x.q.astype(end.dtype), x.v.shape[2])
    at_end = q.shape[-1] ** -0.5 * jnp.einsum("bthe,bhef->bthf", q, end, precision="highest")
    return jnp.where((index < advance[:, None])[..., None, None], out, at_end.astype(out.dtype)), after
