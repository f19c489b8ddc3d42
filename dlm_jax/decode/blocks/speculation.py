"""Self-speculation of one model: it fills a block as a denoiser and keeps what it would have said token by token.

Letters: B batch, K block size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.decode import sampling
from dlm_jax.decode.ledger import DRAFT, Counts
from dlm_jax.decode.orthrus import Orthrus, State, forward
from dlm_jax.decode.parts import number, static
from dlm_jax.decode.protocol import Decoder, Needs, decoder
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache, Scorer


@decoder
class SelfSpeculation(Orthrus):
    """Drafts a block as a denoiser, and keeps the drafts that the same weights, read causally, agree with. An adapter
    that the parameters have (`models.lora`) is on in drafts alone.

    Greedy output equals `Autoregressive()` on the same model.

    Attributes:
      block_size: K, the newest token and K - 1 masks; None takes what the model was trained on.
      threshold: probability from which on a drafted token stays; masks that are left are drafted again, and where no
        draft is as sure the surest stays. 0 drafts once.
      sampler: of both; only greedy where the threshold is not 0, or what is kept would not be distributed as it should.

    Source: Nemotron-Labs-Diffusion, linear self-speculation.
    """

    needs = Needs(bidirectional=False, mask=True)
    block_size: int | None = static(None, least=2)
    threshold: float = number(0.0, most=1.0)
    sampler: Sampler = Sampler()

    def __post_init__(self):
        super().__post_init__()
        plain = all(isinstance(x, (int, float)) for x in (self.threshold, self.sampler.temperature))
        if plain and self.threshold and self.sampler.temperature:
            raise ValueError(f"threshold = {self.threshold} with temperature = {self.sampler.temperature}: drafts that "
                             "stay because they are sure are no fair draws; take threshold=0 or temperature=0")

    def check_model(self, config: Any) -> None:
        """See `Decoder.check_model`: a causal model that was trained to denoise, too."""
        Decoder.check_model(self, config)
        told = config.convention
        if told is None or (told.prompt, told.commit) != ("causal", "causal"):
            raise ValueError(f"SelfSpeculation needs a model that is both autoregressive and a denoiser, and nothing "
                             f"says so of this {config.family} one: decode it with "
                             f"{'Autoregressive' if told is None else 'BlockDiffusion'}")
        if (self.block_size or config.block_size or 0) < 2:
            raise ValueError(f"block_size = {self.block_size or config.block_size}: name one of at least 2, as in "
                             "SelfSpeculation(block_size=32)")

    def capacity(self, max_new_tokens: int) -> int:
        """See `Decoder.capacity`: the last block is whole."""
        return max_new_tokens + self.span

    def _width(self, score: Scorer, request: Request) -> int:
        return self.size(score)

    def _room(self, request: Request) -> Array:
        return jnp.where(request.max_new_tokens > 0, request.max_new_tokens + self.span, 0)

    def _drafts(self, score: Scorer, request: Request, state: State, place: Array, width: Array
                ) -> tuple[Array, Array, Cache, Counts]:
        """See `Orthrus._drafts`: passes until no row has a mask."""
        whole, shift = self._whole(request), score.noisy_shift or 0
        drafter = score.view("diffusion") if "diffusion" in score.views else score
        K = place.shape[1]

        def again(carry):
            drafts, masked, logits, cache, counts = carry
            active = jnp.any(masked, axis=1)
            counts = counts.add(DRAFT, width, active)
            block = jnp.concatenate([state.last[:, None], jnp.where(masked, request.mask_id, drafts)], axis=1)
            hidden, cache = forward(drafter, False, whole, place - 1, block, jnp.where(active, width, 0), cache)
            fresh = drafter.head(hidden[:, 1 - shift : K - shift])
            fresh = jnp.where(jnp.arange(fresh.shape[-1]) == request.mask_id, -jnp.inf, fresh)
            keys = sampling.draw_keys(request.keys, counts.after_prefill(), place[:, :-1])
            tokens = self.sampler.draw(fresh, keys)
            chance = jnp.take_along_axis(jax.nn.softmax(fresh, axis=-1), tokens[..., None], axis=-1)[..., 0]
            sure = masked & (chance >= self.threshold)
            best = masked & (jnp.arange(K - 1) == jnp.argmax(jnp.where(masked, chance, -1.0), axis=1)[:, None])
            stays = sure | (best & ~jnp.any(sure, axis=1, keepdims=True))
            return (jnp.where(stays, tokens, drafts), masked & ~stays, jnp.where(stays[..., None], fresh, logits),
                    cache, counts)

        drafts = jnp.full((request.batch, K - 1), request.mask_id, jnp.int32)
        masked = jnp.broadcast_to(~state.done[:, None], drafts.shape)
        logits = jnp.zeros((*drafts.shape, score.vocab_size), jnp.float32)
        drafts, _, logits, cache, counts = jax.lax.while_loop(
            lambda carry: jnp.any(carry[1]), again, (drafts, masked, logits, state.cache, state.counts))
        shaped = jax.lax.cond(self.sampler.warm, self.sampler.shaped, lambda x: x, logits)
        return drafts, shaped, cache, counts
