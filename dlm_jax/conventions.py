"""How a diffusion language model was taught to be asked: five facts that its weights do not tell."""

from __future__ import annotations

import dataclasses

ACCEPTED = {
    "prompt": ("full", "causal", "block-causal"),
    "logits": ("same", "shifted"),
    "grid": ("absolute", "anchored"),
    "seed": ("mask", "autoregressive"),
    "commit": ("none", "block-bidirectional", "causal")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conventions:
    """What a decoder must know of a model besides its network.

    Attributes:
      prompt: what a token of the prompt sees: the prompt ("full"), what precedes it ("causal"), or whole blocks up to
        its own ("block-causal").
      logits: whether a mask's own output says what it stands for ("same"), or the one before it ("shifted").
      grid: whether blocks are counted from the row's first token ("absolute"), so that a prompt may end within one, or
        from the first token behind the prompt ("anchored").
      seed: whether a block begins with a mask, or with the token that the pass which committed the block before it
        predicts next ("autoregressive").
      commit: how a finished block is run once more for its keys and values, each token seeing its block
        ("block-bidirectional") or what precedes it ("causal"); "none" where every forward reads the whole row: by
        blocks, or, where the prompt is causal, known tokens first and the masks behind them, all causally.
    """

    prompt: str = "full"
    logits: str = "same"
    grid: str = "anchored"
    seed: str = "mask"
    commit: str = "none"

    def __post_init__(self):
        for name, accepted in ACCEPTED.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r}: accepted are {accepted}")
        if self.seed == "autoregressive" and self.commit == "none":
            raise ValueError("seed = 'autoregressive' with commit = 'none': the pass that commits a block gives the "
                             f"next one's seed; name one of {ACCEPTED['commit'][1:]}, or take seed = 'mask'")

    @property
    def shift(self) -> int:
        """A mask's token is predicted by the output so many places before it."""
        return int(self.logits == "shifted")

    def replace(self, **changes: str) -> "Conventions":
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
