"""Fast-dLLM's settings (its Sec. 4.1): LLaDA and Dream as they are, with caches and parallel commits."""

from configs.decoding import Decoding
from dlm_jax import decode


def _decoding(decoder: decode.MaskedDiffusion) -> Decoding:
    return Decoding(decoder=decoder, max_new_tokens=256, source="Fast-dLLM, Sec. 4.1; ends at the first EOS")


DECODING: dict[str, Decoding] = {name: _decoding(decoder) for name, decoder in {
    "llada_parallel": decode.fast_dllm(cache="none", early_stop="fill"),
    "llada_prefix": decode.fast_dllm(cache="prefix", early_stop="fill"),
    "llada_dual": decode.fast_dllm(cache="dual", early_stop="fill"),
    "llada_dual_factor": decode.fast_dllm(cache="dual", threshold=None, factor=1.0, early_stop="fill"),
    "dream_prefix": decode.fast_dllm_dream(cache="prefix", early_stop="fill"),
    "dream_dual": decode.fast_dllm_dream(cache="dual", early_stop="fill"),
}.items()}
