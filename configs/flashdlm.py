"""FlashDLM: the guides' shapes and Table 11. Nothing here is trained; the prompts are `dlm_jax.evals.prompts`'."""

from configs.decoding import Decoding
from dlm_jax import decode
from dlm_jax.models.config import TransformerConfig

_QWEN2_5_3B = TransformerConfig(
    family="qwen2", vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16,
    num_kv_heads=2, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
    max_position_embeddings=32768, bos_token_id=151643, eos_token_id=151645)
GUIDERS = {  # Qwen2.5-Instruct
    "qwen2_5_0_5b": _QWEN2_5_3B.replace(
        hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, head_dim=64),
    "qwen2_5_1_5b": _QWEN2_5_3B.replace(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12),
    "qwen2_5_3b": _QWEN2_5_3B,
    "qwen2_5_7b": _QWEN2_5_3B.replace(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
        tie_word_embeddings=False),
}

# Table 11. Its "Block Cache Size" is what is frozen at once, its "Block Length" what LLaDA decodes at a time, its
# "Speculation Block Size" what a forward of the guide reads. It names no commit rules.
_FREECACHE = "FlashDLM, Table 11; commit rule of the released sampler"
DECODING: dict[str, Decoding] = {
    "dream_freecache": Decoding(decoder=decode.free_cache_dream(steps=0, block_length=256), source=_FREECACHE),
    "llada_freecache": Decoding(
        decoder=decode.free_cache(steps=0, block_length=64, cache=decode.Free(block_length=256)), source=_FREECACHE),
    "guided": Decoding(decoder=decode.guided.flash_dlm(), max_new_tokens=1024,
                       source="FlashDLM, Table 11 and Algorithm 1"),
    "guided_relaxed": Decoding(decoder=decode.guided.flash_dlm_relaxed(), max_new_tokens=1024,
                               source="FlashDLM, Table 11 and C.4"),
    "guided_released": Decoding(decoder=decode.guided.flash_dlm_released(), max_new_tokens=1024,
                                source="FlashDLM's released assisted decoding; length of Table 11"),
    "guided_released_relaxed": Decoding(decoder=decode.guided.flash_dlm_released_relaxed(), max_new_tokens=1024,
                                        source="FlashDLM's released topk_relative decoding; length of Table 11"),
}
