"""The guide reads a round's drafts, a chunk at a time, until it rejects one in every row.

Letters: B batch, G generation capacity, W drafts of a chunk, D width of the drafter, V its vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax.decode import sampling, speculative
from dlm_jax.decode.guided.acceptance import UNMAPPED, Acceptance, Proposal
from dlm_jax.decode.guided.commits import GuideRule
from dlm_jax.decode.guided.model import GuidedScorer
from dlm_jax.decode.ledger import GUIDE, Counts
from dlm_jax.decode.queries import Queries, ask
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache


@struct.dataclass
class Drafts:
    """What there is to read.

    Attributes:
      hidden: (B, G, D) outputs of the drafter that predict the tokens from `length` on.
      length: (B,) int32 committed tokens.
      proposed: (B,) int32 how many of the outputs are drafts.
      forward: (B,) int32 forwards of the drafter.
    """

    hidden: Array
    length: Array
    proposed: Array
    forward: Array


@struct.dataclass
class Judge:
    """The parts of `Guided` that judge, and W, static."""

    accept: Acceptance
    rule: GuideRule
    sampler: Sampler
    width: int = struct.field(pytree_node=False)


@struct.dataclass
class Reading:
    """Carry of the chunks.

    Attributes:
      chunk: () int32 chunks read.
      alive: (B,) bool rows whose every draft was accepted so far, and that have more.
      agreed: (B,) int32 drafts accepted in a row.
      correction: (B,) int32 see `GuideRule.commits`.
      last: (B,) int32 token before the next draft, in the guide's ids.
      draft: (B, G) int32 drafts by number.
      read: (B, G) bool those that were read.
      cache: the guide's.
    """

    chunk: Array
    alive: Array
    agreed: Array
    correction: Array
    last: Array
    draft: Array
    read: Array
    cache: Cache
    counts: Counts


def read(score: GuidedScorer, request: Request, drafts: Drafts, state: Any, judge: Judge) -> Reading:
    """Returns what became of the drafts.

    Args:
      score: both models.
      request: the batch, as the drafter reads it.
      drafts: what there is to read.
      state: the decoder's, before this round.
      judge: how.
    """
    B, G = request.batch, request.capacity
    theirs = score.for_guide(request)
    newest = theirs.entry(state.length[:, None] - 1)
    start = Reading(
        chunk=jnp.int32(0), alive=~state.done, agreed=jnp.zeros(B, jnp.int32),
        correction=jnp.full(B, UNMAPPED, jnp.int32),
        last=jnp.take_along_axis(theirs.buffer(score.feed[state.canvas.tokens]), newest, axis=1)[:, 0],
        draft=state.draft, read=jnp.zeros((B, G), bool), cache=state.guide_cache, counts=state.counts)
    chunk = lambda reading: read_chunk(score, request, theirs, drafts, judge, reading)
    return chunk(start) if judge.width == G else jax.lax.while_loop(lambda r: jnp.any(r.alive), chunk, start)


def read_chunk(score: GuidedScorer, request: Request, theirs: Request, drafts: Drafts, judge: Judge, r: Reading
               ) -> Reading:
    """Reads W drafts of every row that is alive; `theirs` is the batch as the guide reads it."""
    W = judge.width
    within = jnp.broadcast_to(r.chunk * W + jnp.arange(W, dtype=jnp.int32), (request.batch, W))
    active = (within < drafts.proposed[:, None]) & r.alive[:, None]
    number = drafts.length[:, None] + within
    logits, draft = draw(score, request, drafts, judge.sampler, within, number)

    # the guide reads up to the token before each draft
    fed = jnp.concatenate([r.last[:, None], score.feed[draft[:, :-1]]], axis=1)
    hidden, cache = ask(score.guide, theirs, Queries(fed, number - 1, active, theirs.position(number - 1)), r.cache)
    proposal = Proposal(draft, logits, score.guide.head(hidden), score.to_draft)
    accepted = active & judge.accept.accepts(proposal)
    run = speculative.prefix_length(accepted)
    rejected = r.alive & (run < jnp.sum(active, axis=1))
    other = jnp.take_along_axis(proposal.choice(), jnp.minimum(run, W - 1)[:, None], axis=1)[:, 0]
    other = jnp.where(other == request.mask_id, UNMAPPED, other)  # a mask is no answer
    agreed, correction = r.agreed + run, jnp.where(rejected, other, r.correction)
    ended = jnp.any((draft == request.eos_id) & (jnp.arange(W) < run[:, None]), axis=1)
    alive = r.alive & ~rejected & ~ended & ((r.chunk + 1) * W < drafts.proposed)

    # what the guide has read for good is all but the newest token
    settled = jnp.where(alive, W, judge.rule.commits(agreed, correction)[0] - r.chunk * W)
    row, target = jnp.arange(request.batch)[:, None], jnp.where(active, number, request.capacity)
    return Reading(
        chunk=r.chunk + 1, alive=alive, agreed=agreed, correction=correction, last=score.feed[draft[:, -1]],
        draft=r.draft.at[row, target].set(draft, mode="drop"), read=r.read.at[row, target].set(True, mode="drop"),
        cache=cache.commit(jnp.where(r.alive, settled, 0)),
        counts=r.counts.add(GUIDE, jnp.sum(active, axis=1), r.alive))


def draw(score: GuidedScorer, request: Request, drafts: Drafts, sampler: Sampler, within: Array, number: Array
         ) -> tuple[Array, Array]:
    """Returns (B, W, V) float32 logits without the mask, and (B, W) int32 drafts.

    Args:
      score, request, drafts, sampler: see `read`.
      within: (B, W) int32 which of the outputs.
      number: (B, W) int32 number of each draft.
    """
    at = jnp.minimum(within, request.capacity - 1)
    logits = score.head(jnp.take_along_axis(drafts.hidden, at[..., None], axis=1))
    logits = jnp.where(jnp.arange(logits.shape[-1]) == request.mask_id, -jnp.inf, logits)
    return logits, sampler.draw(logits, sampling.draw_keys(request.keys, drafts.forward, number))
