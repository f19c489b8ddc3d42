"""Shape and family of a transformer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from dlm_jax.conventions import Conventions
from dlm_jax.models.shapes import GatedDelta, MoE, Yarn, check_sizes, parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What all models of a family have in common.

    Attributes:
      architecture: class name in config.json.
      aliases: further class names of the same network.
      model_type: in config.json, None for the family's own name.
      mark: a field of config.json that is set, and tells it from others of its model type and class.
      qk_norm: queries and keys are normalised per head before RoPE, unless a model says otherwise.
      qkv_bias: the q, k and v projections carry a bias, unless a model says otherwise.
      conventions: of a diffusion model; None where every token sees those up to itself and predicts the next.
      block_size, mask_token_id, eos_token_id: of the released checkpoints, where their configs do not say; left out
        where the vocabulary does not hold the mask.
      renamed: fields of ours under the family's own names.
      stretched: checkpoints may say how their rotary embedding was stretched (`Yarn`).
      dual: a second attention set in every layer, the diffusion view.
      gated_attention: q_proj also makes a gate per query head, whose sigmoid scales what the head returns.
      centred_norms: scales of norms are stored less one.
    """

    architecture: str
    aliases: tuple[str, ...] = ()
    model_type: str | None = None
    mark: str | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    conventions: Conventions | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stretched: bool = False
    dual: bool = False
    gated_attention: bool = False
    centred_norms: bool = False


_SHIFTED = Conventions(logits="shifted")
_BLOCKS = Conventions(prompt="block-causal", grid="absolute", commit="block-bidirectional")

FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM", qk_norm=True, gated_attention=True, centred_norms=True),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM", qk_norm=True, gated_attention=True, centred_norms=True),
    "orthrus": Family(architecture="OrthrusLM", qk_norm=True, dual=True),
    "orthrus-qwen2": Family(architecture="OrthrusQwen2LM", qkv_bias=True, dual=True),
    "llada": Family(architecture="LLaDAModelLM", conventions=Conventions()),
    "Dream": Family(architecture="DreamModel", qkv_bias=True, conventions=_SHIFTED),
    "a2d-qwen3": Family(architecture="A2DQwen3LMHeadModel", qk_norm=True, conventions=Conventions()),
    "a2d-qwen2": Family(architecture="A2DQwen2LMHeadModel", qkv_bias=True, conventions=Conventions()),
    "a2d-llama": Family(architecture="A2DLlamaLMHeadModel", conventions=Conventions()),
    "illada": Family(
        architecture="ILLaDAForCausalLM", conventions=Conventions(), mask_token_id=5, eos_token_id=2),
    "edlm": Family(
        architecture="EfficientDLM", qk_norm=True, conventions=Conventions(commit="block-bidirectional")),
    "sdar": Family(architecture="SDARForCausalLM", qk_norm=True, conventions=_BLOCKS, mask_token_id=151669),
    "Fast_dLLM_Qwen": Family(
        architecture="Fast_dLLM_QwenForCausalLM", qkv_bias=True, block_size=32, mask_token_id=151665,
        conventions=_BLOCKS.replace(logits="shifted", seed="autoregressive"), renamed={"block_size": "bd_size"}),
    "nemotron_labs_diffusion": Family(
        architecture="NemotronLabsDiffusionModel", stretched=True, block_size=32, mask_token_id=100,
        conventions=Conventions(prompt="causal", seed="autoregressive", commit="causal")),
    "wedlm-qwen3": Family(
        architecture="WeDLMForCausalLM", model_type="wedlm", mark="qk_norm", qk_norm=True, block_size=16,
        mask_token_id=151665, conventions=Conventions(prompt="causal")),
    "wedlm-qwen2": Family(
        architecture="WeDLMForCausalLM", model_type="wedlm", mark="attention_bias", qkv_bias=True, block_size=16,
        mask_token_id=151665, conventions=Conventions(prompt="causal")),
    "llama": Family(architecture="LlamaForCausalLM"),
    "stable-diffcoder": Family(
        architecture="StableDiffcoderForCausalLM", aliases=("SeedDiffcoderForCausalLM",), model_type="llama",
        block_size=4, mask_token_id=5, conventions=_BLOCKS),
    "sdar_moe": Family(architecture="SDARMoeForCausalLM", qk_norm=True, conventions=_BLOCKS, mask_token_id=151669),
    "rnd1": Family(architecture="RND1LM", qk_norm=True, conventions=_SHIFTED, mask_token_id=151669),
    "llada_moe": Family(
        architecture="LLaDAMoEModelLM", aliases=("LLaDAMoEModel",), model_type="llada", mark="num_experts",
        qk_norm=True, conventions=Conventions(), mask_token_id=156895),
    "llada2_moe": Family(
        architecture="LLaDA2MoeModelLM", qk_norm=True, block_size=32, mask_token_id=156895, eos_token_id=156892,
        conventions=_BLOCKS.replace(commit="none")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm transformer stack; every field is static.

    Attributes:
      family: a key of `FAMILIES`.
      vocab_size: V. hidden_size: D. intermediate_size: MLP width.
      num_layers: L. num_heads: N query heads. num_kv_heads: K, a divisor of N. head_dim: H, even.
      rope_theta: rotary base. rms_norm_eps: added to mean squares.
      tie_word_embeddings: the head is the embedding.
      initializer_range: standard deviation of fresh weights.
      max_position_embeddings: longest position the checkpoint was made for, tokens; generation refuses more.
      bos_token_id, eos_token_id, pad_token_id, mask_token_id: special ids, None where unknown.
      block_size: tokens of the blocks a dual, block-diffusion or FLARE model was trained on, None where unknown.
      noisy_shift: of a causal model that was trained to denoise, too (FLARE): 1 where the output before a mask says
        what it stands for, 0 where its own does; None where nothing says that it was.
      pattern: kinds of the layers that repeat, each a key of `layers.MIXERS`, or one with a key of `layers.MLPS`
        ("attention+moe"); a stack is num_layers / len(pattern) periods.
      partial_rotary_factor: share of a head's width that RoPE turns, its first dimensions.
      yarn: how the rotary embedding was stretched, None where it was not.
      gated_delta, moe: shapes of such layers, None where the pattern has none.
      logit_shift: in place of the family's shift, for a bidirectional model (0 or 1); None keeps the family's.
      conventions: in place of the family's; None keeps them.
      qk_norm: whether queries and keys are normalised per head before RoPE; None takes the family's.
      qkv_bias: whether the q, k and v projections carry a bias; None takes the family's.
      o_bias: whether attention's output projection carries one.
      clip_qkv: largest absolute value of what q, k and v projections (and norms) make; None for any.
    """

    family: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    logit_shift: int | None = None
    noisy_shift: int | None = None
    conventions: Conventions | None = None
    pattern: tuple[str, ...] = ("attention",)
    partial_rotary_factor: float = 1.0
    yarn: Yarn | None = None
    gated_delta: GatedDelta | None = None
    moe: MoE | None = None
    qk_norm: bool | None = None
    qkv_bias: bool | None = None
    o_bias: bool = False
    clip_qkv: float | None = None

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"model family {self.family!r} is not supported; accepted: {sorted(FAMILIES)}")
        for name in ("qk_norm", "qkv_bias"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(FAMILIES[self.family], name))
        check_sizes(self, ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                            "num_kv_heads", "max_position_embeddings"))
        if not self.pattern or self.num_layers % len(self.pattern):
            raise ValueError(f"num_layers = {self.num_layers} is not a multiple of the {len(self.pattern)} layers of "
                             f"pattern {self.pattern}: a stack is whole periods of one layer or more")
        for name in ("gated_delta", "moe"):
            if getattr(self, name) is None and any(name in parts(kind) for kind in self.pattern):
                raise ValueError(f"pattern {self.pattern} has {name} layers and {name} = None: give their shape")
        for name in ("rope_theta", "rms_norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a positive number")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"initializer_range = {self.initializer_range}: must be 0 or a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}; "
                "every KV head serves the same number of query heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: rotary embedding needs an even number of at least 2")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"partial_rotary_factor = {self.partial_rotary_factor} of head_dim = {self.head_dim}: "
                             "must turn an even number of dimensions, at least 2 and at most all")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} = {value} lies outside the vocabulary of {self.vocab_size} ids")
        if self.clip_qkv is not None and not 0 < self.clip_qkv < math.inf:
            raise ValueError(f"clip_qkv = {self.clip_qkv}: must be a positive number, or None")
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: must be at least 1")
        if self.noisy_shift is not None and (self.noisy_shift not in (0, 1) or self.bidirectional):
            raise ValueError(f"noisy_shift = {self.noisy_shift} for family {self.family!r}: expected 0 or 1, and only "
                             "for a causal family; a bidirectional one has logit_shift")
        if self.logit_shift is not None and (self.logit_shift not in (0, 1) or not self.bidirectional):
            raise ValueError(f"logit_shift = {self.logit_shift} for family {self.family!r}: expected 0 or 1, and only "
                             "for a bidirectional family; a causal model always predicts the next token")

    @property
    def num_periods(self) -> int:
        """How often `pattern` repeats."""
        return self.num_layers // len(self.pattern)

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return any(parts(kind)[0] != "attention" for kind in self.pattern)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def convention(self) -> Conventions | None:
        """How the model was taught to denoise; None where nothing says that it was."""
        told = self.conventions or FAMILIES[self.family].conventions
        if told is None and self.noisy_shift is not None:  # FLARE
            told = Conventions(prompt="causal", seed="autoregressive", commit="causal")
        shift = self.noisy_shift if self.logit_shift is None else self.logit_shift
        return told if told is None or shift is None else told.replace(logits="shifted" if shift else "same")

    @property
    def bidirectional(self) -> bool:
        """Whether tokens see some that follow them by default, not only those up to themselves."""
        return self.convention is not None and self.convention.prompt != "causal"

    @property
    def shift(self) -> int:
        """The output at index i predicts the token at i + shift; of a model that does both, its autoregressive one."""
        told = self.convention
        return 1 if told is None or (told.prompt, told.seed) == ("causal", "autoregressive") else told.shift

    @property
    def dual(self) -> bool:
        """Whether every layer has a second attention set, the diffusion view."""
        return FAMILIES[self.family].dual

    @property
    def gated_attention(self) -> bool:
        """Whether q_proj also makes a gate for what each query head returns."""
        return FAMILIES[self.family].gated_attention

    @property
    def centred_norms(self) -> bool:
        """Whether scales of norms are stored less one."""
        return FAMILIES[self.family].centred_norms

    def replace(self, **changes) -> "TransformerConfig":
        """Returns a copy with some fields changed; another family brings its own norms and biases."""
        for name in ("qk_norm", "qkv_bias") if changes.get("family", self.family) != self.family else ():
            if getattr(self, name) == getattr(FAMILIES[self.family], name):
                changes.setdefault(name, None)
        return dataclasses.replace(self, **changes)
