"""Fast-dLLM's settings (its Sec. 4.1): LLaDA and Dream as they are, with caches and parallel commits."""

_LLADA = dict(max_new_tokens=256, block_length=32)
_DREAM = dict(_LLADA, first_token=True, tempered=True)  # the pass that opens a block commits its first token alone

# in the names of `generate` and `decode.MaskedDiffusion`
DECODING: dict[str, dict] = {
    "llada_parallel": dict(_LLADA, rule="threshold", threshold=0.9),
    "llada_prefix": dict(_LLADA, rule="threshold", threshold=0.9, cache="prefix"),
    "llada_dual": dict(_LLADA, rule="threshold", threshold=0.9, cache="dual"),
    "llada_dual_factor": dict(_LLADA, rule="factor", factor=1.0, cache="dual"),
    "dream_prefix": dict(_DREAM, rule="threshold", threshold=0.9, cache="prefix"),
    "dream_dual": dict(_DREAM, rule="threshold", threshold=0.9, cache="dual"),
}
