"""Shapes of the parts that some layers have: the delta rule, experts, stretched rotary embeddings."""

from __future__ import annotations

import dataclasses
import math


def check_sizes(owner, names: tuple[str, ...]) -> None:
    """Raises ValueError where a field is less than 1."""
    for name in names:
        if getattr(owner, name) < 1:
            raise ValueError(f"{name} = {getattr(owner, name)}: must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Shape of a gated delta rule mixer.

    Attributes:
      key_heads: J. value_heads: H, a multiple of J; value head h reads key head h // (H / J).
      key_dim: E, width of a query or key head. value_dim: F, width of a value head.
      taps: tokens the short convolution reads, its own included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    def __post_init__(self):
        check_sizes(self, ("key_heads", "value_heads", "key_dim", "value_dim", "taps"))
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads = {self.value_heads} is not a multiple of key_heads = {self.key_heads}; "
                             "every key head serves the same number of value heads")


# what a mixture of experts may say, and what it means
SCORES = ("softmax", "sigmoid")
BIASES = (None, "selection", "weight")
LAYOUTS = ("each", "stacked", "paired")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Shape of a mixture of experts.

    Attributes:
      experts: how many there are. active: how many read each token.
      width: of each expert. shared_width: of the expert that reads every token, 0 where there is none.
      shared_gate: a gate says how much of that expert a token takes.
      scores: of `SCORES`; what a router's logits become, over all experts.
      normalise: weights of a token's experts are divided by their sum.
      bias: what a bias per expert is added to: the scores that experts are chosen by, or those and their weights, too.
      groups: experts in a row that are chosen together; the `active_groups` best ones, by their two best experts, stay.
      scale: factor on the weights, unitless.
      layout: how checkpoints store the experts of a layer, of `LAYOUTS`: each by itself, or one tensor a projection,
        gates and ups apart or in pairs; see `io.names`.
    """

    experts: int
    active: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    scores: str = "softmax"
    normalise: bool = True
    bias: str | None = None
    groups: int = 1
    active_groups: int = 1
    scale: float = 1.0
    layout: str = "each"

    def __post_init__(self):
        check_sizes(self, ("experts", "active", "width", "groups", "active_groups"))
        for name, accepted in (("scores", SCORES), ("bias", BIASES), ("layout", LAYOUTS)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} = {getattr(self, name)!r} of a mixture of experts: accepted are {accepted}")
        if self.shared_width < 0 or (self.shared_gate and not self.shared_width):
            raise ValueError(f"shared_width = {self.shared_width}: expected the width of the shared expert, "
                             "or 0 for none and then shared_gate = False")
        if self.experts % self.groups or (self.groups > 1 and self.experts < 2 * self.groups):
            raise ValueError(f"{self.experts} experts in groups = {self.groups}: expected groups of one size, "
                             "of 2 or more (their two best experts count)")
        if self.active_groups > self.groups:
            raise ValueError(f"active_groups = {self.active_groups} of groups = {self.groups}: expected at most all")
        within = self.experts // self.groups * self.active_groups
        if self.active > within:
            raise ValueError(f"active = {self.active}: a token cannot be read by more than all {within} experts"
                             f"{' of its groups' if within < self.experts else ''}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale = {self.scale} of a mixture of experts: must be a positive number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """A rotary embedding that was stretched to a longer context.

    Attributes:
      factor: how much longer, unitless. original: tokens of the context before.
      fast, slow: turns within it from which on, and up to which, a dimension is left alone, or slowed down whole.
      magnitude: factor on what has turned, unitless.
      query_growth: how fast queries grow with the logarithm of the position, unitless; 0 not at all.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float = 1.0
    query_growth: float = 0.0

    def __post_init__(self):
        check_sizes(self, ("factor", "original"))
        if not 0 < self.slow <= self.fast < math.inf or not 0 < self.magnitude < math.inf:
            raise ValueError(f"slow = {self.slow}, fast = {self.fast}, magnitude = {self.magnitude}: expected positive "
                             "numbers, slow the smaller one")
        if not 0 <= self.query_growth < math.inf:
            raise ValueError(f"query_growth = {self.query_growth}: must be 0 or a positive number")


def parts(kind: str) -> tuple[str, str]:
    """Returns mixer and MLP of a kind of layer: "gated_delta+moe" names both, "attention" has the plain "mlp"."""
    mixer, _, mlp = kind.partition("+")
    return mixer, mlp or "mlp"
