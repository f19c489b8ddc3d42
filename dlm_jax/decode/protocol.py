"""What a decoder is: hyperparameters, what it needs of a model, `init` and `step`; a base supplies the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from dlm_jax.decode.parts import Part
from dlm_jax.decode.request import Request
from dlm_jax.decode.sampling import Sampler
from dlm_jax.scoring import Cache, Scorer

_SHORT = [field.name for field in dataclasses.fields(Sampler)]


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a decoder needs of a model.

    Attributes:
      bidirectional: whether tokens see the whole row by default, or those up to themselves; None for either.
      mask: whether drafts are made from a mask token.
      masked_canvas: whether masks stand on the canvas, so that the mask must be no EOS.
      dual: whether a second view drafts (Orthrus).
      guide: whether a second model judges the drafts (`guided.join`).
      recurrent: whether layers that keep a state are told what each forward is to them; else they are refused.
    """

    bidirectional: bool | None
    mask: bool = False
    masked_canvas: bool = False
    dual: bool = False
    guide: bool = False
    recurrent: bool = False


class Decoder(Part):
    """A decoding procedure: a frozen dataclass of its paper's hyperparameters, made by `decoder`.

    `init` prefills, `step` runs one round for every row that is not done (one forward; a draft and its verification
    are two), and the state carries at least `canvas`, `counts` and `done` (B,); its other arrays lead with B, too, and
    what a model keeps is a `scoring.Cache`. The compiled loop, the streaming loop and the plain Python loop are all
    made from the same `step`.
    """

    needs: ClassVar[Needs]
    lossless: ClassVar[bool] = False  # greedy answers are those of `Autoregressive`; such a decoder can `replay`

    def init(self, score: Scorer, request: Request) -> Any:
        """Returns the state after prefill."""
        raise NotImplementedError(f"{type(self).__name__} has no init(score, request)")

    def step(self, score: Scorer, request: Request, state: Any) -> Any:
        """Returns the state one round later."""
        raise NotImplementedError(f"{type(self).__name__} has no step(score, request, state)")

    def replay(self, score: Scorer, request: Request, start: Array, tokens: Array, size: Array, cache: Cache
               ) -> tuple[Array, Cache]:
        """Runs the forward that committed some tokens again; `Cache.commit` must follow.

        Args:
          score, request: of the batch.
          start: (B,) int32 number of the first token, the newest one before those were committed.
          tokens: (B, K) int32 that token and what follows it, `span` of them.
          size: (B,) int32 how many of them are read, 0 for rows that have none.
          cache: of what precedes them.

        Returns:
          (B, K, D) hidden states, and the cache.
        """
        raise NotImplementedError(f"{type(self).__name__} has no replay(score, request, start, tokens, size, cache)")

    @property
    def span(self) -> int:
        """Tokens that a forward commits at most."""
        return 1

    def provisional(self, state: Any) -> tuple[Array, Array]:
        """Returns (B, G) tokens and a (B, G) bool mask of the latest drafts, which may come to nothing."""
        return state.canvas.tokens, jnp.zeros(state.canvas.tokens.shape, bool)

    @property
    def guided(self) -> bool:
        """Whether it asks a guide beside the drafter."""
        return self.needs.guide

    def lanes(self, state: Any) -> Array | None:
        """Returns (B, G) int32 the lane that wrote each token, -1 for none; None for decoders without lanes."""
        del state
        return None

    def record(self, state: Any) -> dict[str, Array]:
        """Returns what else there is to tell of rows, name -> (B, ...); `Generation.record` holds it."""
        del state
        return {}

    def reading(self, tokenizer: Any) -> "Decoder":
        """Returns the decoder with what it leaves to the tokenizer taken from it."""
        del tokenizer
        return self

    def fitted(self, config: Any) -> "Decoder":
        """Returns the decoder with what it leaves to the model taken from its config."""
        del config
        return self

    def capacity(self, max_new_tokens: int) -> int:
        """Returns the canvas length G needed for that many tokens."""
        return max_new_tokens

    def check_model(self, config: Any) -> None:
        """Raises ValueError for a model that the procedure is not made for."""
        name = type(self).__name__
        if self.guided and not hasattr(config, "guide"):
            raise ValueError(f"{name} needs a guide beside the drafter: model, params = dlm_jax.decode.join(model, "
                             "params, guide_model, guide_params, vocabulary_map)")
        if self.needs.bidirectional not in (None, config.bidirectional):
            kinds = {True: "bidirectional", False: "causal"}
            fix = ("decode it with Autoregressive, or make a masked-diffusion model of it (launch.convert_weights "
                   "to-diffusion) and train that") if self.needs.bidirectional else (
                       f"decode it with a masked-diffusion decoder ({_decoder_of(config)})")
            raise ValueError(f"{name} needs a {kinds[self.needs.bidirectional]} model, this {config.family} one is "
                             f"{kinds[config.bidirectional]}: {fix}")
        if self.needs.bidirectional and config.convention.prompt == "block-causal":
            raise ValueError(f"{name} shows tokens the whole row, and those of this {config.family} model see no block "
                             "behind their own: decode it with BlockDiffusion")
        if self.needs.bidirectional is False and config.shift != 1:
            raise ValueError(f"{name} takes next tokens from outputs, those of this {config.family} model are a "
                             f"token's own: decode it with {_decoder_of(config)}")
        if self.needs.dual and not config.dual:
            raise ValueError(f"{name} drafts with a second view and this {config.family} model has one: make a dual "
                             "model of it (launch.convert_weights to-orthrus, or dlm_jax.init_from_ar) and train that, "
                             "or decode it with Autoregressive")

        if not self.needs.recurrent and getattr(config, "recurrent", False):
            raise ValueError(f"{name} reads tokens in an order of its own, or again, and this {config.family} model "
                             "has recurrent layers, whose state would keep what it tried: decode it with "
                             "Autoregressive, ARTrust or DiffusionTrust")

    def doubt(self, config: Any) -> str | None:
        """Returns what to expect of a model that may not be trained for the procedure; None where nothing says so."""
        del config
        return None

    def check_request(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, eos_id: int | None, mask_id: int | None
    ) -> None:
        """Raises ValueError for prompts, lengths or special ids that the procedure cannot work with.

        Args:
          prompts: token ids of each row.
          limits: (B,) tokens to generate.
          eos_id, mask_id: None for none.
        """
        del prompts, limits
        if self.needs.mask and mask_id is None:
            raise ValueError(f"{type(self).__name__} drafts from a mask token and the model's config names none: "
                             "pass mask_id, or convert the checkpoint (launch.convert_weights adds one)")
        if self.needs.masked_canvas and mask_id == eos_id:
            raise ValueError(f"mask_id = eos_id = {mask_id}: the mask must be a token of its own")


def _decoder_of(config: Any) -> str:
    """Returns the name of the decoder that reads a diffusion model as it was taught."""
    told = config.convention
    return "MaskedDiffusion" if told is None or (told.prompt, told.commit) == ("full", "none") else "BlockDiffusion"


def decoder(cls: type) -> type:
    """Makes a decoder of a class with annotated fields, all given by keyword.

    Where it has a field `sampler`, that of a `Sampler` may be given in its place: `Autoregressive(temperature=0.7)` is
    `Autoregressive(sampler=Sampler(temperature=0.7))`.
    """
    made = struct.dataclass(cls, kw_only=True)
    if "sampler" not in {field.name for field in dataclasses.fields(made)}:
        return made
    plain = made.__init__

    @functools.wraps(plain)
    def __init__(self, **fields):
        short = {name: fields.pop(name) for name in _SHORT if name in fields}
        if short:
            fields["sampler"] = dataclasses.replace(fields.get("sampler", made.sampler), **short)
        plain(self, **fields)

    made.__init__ = __init__
    return made


def refuse_masks(prompts: Sequence[Sequence[int]], mask_id: int, literal: bool) -> None:
    """Raises ValueError for a prompt that holds the mask, unless it is asked for as literal text.

    Args:
      prompts: token ids.
      mask_id: of the mask token.
      literal: the decoder's `literal_mask`.
    """
    for i, prompt in enumerate(prompts):
        if not literal and mask_id in prompt:
            raise ValueError(f"prompt {i} holds the mask token {mask_id}, which the model takes for a token to "
                             "come: remove it, or set literal_mask to keep it as it is")
