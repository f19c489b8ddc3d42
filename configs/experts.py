"""Shapes of public diffusion checkpoints with mixtures of experts.

As their config.json has them: LLaDA2.0-mini, which LLaDA2.1-mini shares, LLaDA2.0-flash (that of Ling-flash-2.0, from
which it was trained), SDAR-30B-A3B, RND1-Base-0910 and LLaDA-MoE-7B-A1B. Special ids that they leave out are those of
their tokenizers.
"""

import dataclasses

from dlm_jax.models.config import MoE, TransformerConfig

_MINI = TransformerConfig(
    family="llada2_moe", vocab_size=157184, hidden_size=2048, intermediate_size=5120, num_layers=20, num_heads=16,
    num_kv_heads=4, head_dim=128, rope_theta=6e5, partial_rotary_factor=0.5, pad_token_id=156892, eos_token_id=156892,
    mask_token_id=156895, block_size=32, pattern=("attention", *("attention+moe",) * 19), moe=MoE(
        experts=256, active=8, width=512, shared_width=512, scores="sigmoid", bias="selection", groups=8,
        active_groups=4, scale=2.5))
_SDAR = TransformerConfig(
    family="sdar_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32,
    num_kv_heads=4, head_dim=128, rope_theta=1e6, bos_token_id=151643, eos_token_id=151643, mask_token_id=151669,
    block_size=4, pattern=("attention+moe",), moe=MoE(experts=128, active=8, width=768))
MODELS = {
    "llada2_mini": _MINI,
    "llada2_flash": _MINI.replace(
        hidden_size=4096, intermediate_size=9216, num_layers=32, num_heads=32,
        pattern=("attention", *("attention+moe",) * 31),
        moe=dataclasses.replace(_MINI.moe, width=1024, shared_width=1024)),
    "sdar_30b_a3b": _SDAR,
    "rnd1_30b_a3b": _SDAR.replace(
        family="rnd1", max_position_embeddings=40960, bos_token_id=None, eos_token_id=151645, pad_token_id=151643,
        block_size=None),
    "llada_moe_7b_a1b": TransformerConfig(
        family="llada_moe", vocab_size=157184, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=16,
        num_kv_heads=16, head_dim=128, rope_theta=5e4, rms_norm_eps=1e-5, max_position_embeddings=8192,
        pad_token_id=156892, eos_token_id=156892, mask_token_id=156895, pattern=("attention+moe",),
        moe=MoE(experts=64, active=8, width=1024, normalise=False)),
}
