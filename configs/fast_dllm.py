"""Fast-dLLM's settings (its Sec. 4.1): LLaDA and Dream as they are, with caches and parallel commits."""

from configs.decoding import Decoding
from dlm_jax import decode


def _decoding(decoder: decode.MaskedDiffusion) -> Decoding:
    return Decoding(decoder=decoder, max_new_tokens=256, source="Fast-dLLM, Sec. 4.1; ends at the first EOS")


DECODING: dict[str, Decoding] = {name: _decoding(decoder) for name, decoder in {
    "llada_parallel": decode.fast_dllm(cache=decode.NoCache(), stop=decode.Fill()),
    "llada_prefix": decode.fast_dllm(cache=decode.Prefix(), stop=decode.Fill()),
    "llada_dual": decode.fast_dllm(stop=decode.Fill()),
    "llada_dual_factor": decode.fast_dllm(threshold=None, factor=1.0, stop=decode.Fill()),
    "dream_prefix": decode.fast_dllm_dream(cache=decode.Prefix(), stop=decode.Fill()),
    "dream_dual": decode.fast_dllm_dream(stop=decode.Fill()),
}.items()}
