"""Models that decode block by block: shapes of the released checkpoints, and their released samplers' settings.

SDAR and WeDLM-8B continue Qwen3 (with a head of its own), Fast-dLLM v2 and WeDLM-7B Qwen2.5, Stable-DiffCoder
Seed-Coder, Nemotron-Labs-Diffusion Ministral 3, whose shapes these are. Every sampler here is a point of
`decode.BlockDiffusion`; those of mixtures of experts (`configs.experts`) stand here, too.

Efficient-DLM (arXiv 2512.14067) continues Qwen3, too, and has its tensors under the class EfficientDLM of model_type
edlm (as nace-ai/drex-dlm loads it). No shift, blocks of 32 and the threshold are its card's. That a prompt sees itself
whole and blocks are counted from its end is read off the same group's Nemotron generate with causal_context=False,
which takes the same arguments, and not off Efficient-DLM's own code, which we have not seen. Its training's blocks were
of 64 tokens.
"""

from configs.decoding import Decoding
from configs.flashdlm import GUIDERS
from dlm_jax import decode
from dlm_jax.models.config import TransformerConfig
from dlm_jax.models.shapes import Yarn

_SDAR = TransformerConfig(
    family="sdar", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=1e6, max_position_embeddings=32768, bos_token_id=151643,
    eos_token_id=151645, mask_token_id=151669, block_size=4)
_FAST = {name: model.replace(family="Fast_dLLM_Qwen", mask_token_id=151665, block_size=32)
         for name, model in GUIDERS.items()}
_NEMOTRON = TransformerConfig(
    family="nemotron_labs_diffusion", vocab_size=131072, hidden_size=4096, intermediate_size=14336, num_layers=34,
    num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-5, max_position_embeddings=262144,
    bos_token_id=1, eos_token_id=11, mask_token_id=100, block_size=32,
    yarn=Yarn(factor=16.0, original=16384, query_growth=0.1))
_EFFICIENT = _SDAR.replace(family="edlm", bos_token_id=None, eos_token_id=151643, mask_token_id=None, block_size=32)
MODELS = {
    "sdar_1_7b": _SDAR.replace(hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16),
    "sdar_4b": _SDAR.replace(hidden_size=2560, intermediate_size=9728),
    "sdar_8b": _SDAR,
    "fast_dllm_v2_1_5b": _FAST["qwen2_5_1_5b"],
    "fast_dllm_v2_7b": _FAST["qwen2_5_7b"],
    "nemotron_3b": _NEMOTRON.replace(hidden_size=3072, intermediate_size=9216, num_layers=26),
    "nemotron_8b": _NEMOTRON,
    "nemotron_14b": _NEMOTRON.replace(hidden_size=5120, intermediate_size=16384, num_layers=40),
    "stable_diffcoder_8b": TransformerConfig(
        family="stable-diffcoder", vocab_size=155136, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=5e5, max_position_embeddings=8192, bos_token_id=0,
        eos_token_id=2, mask_token_id=5, block_size=4, initializer_range=0.009882118),
    "efficient_dlm_4b": _EFFICIENT.replace(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "efficient_dlm_8b": _EFFICIENT,
    "wedlm_8b": _SDAR.replace(family="wedlm-qwen3", mask_token_id=151665, block_size=16),
    "wedlm_7b": GUIDERS["qwen2_5_7b"].replace(family="wedlm-qwen2", mask_token_id=151665, block_size=16),
}

_LLADA2 = dict(block_size=32, stop=decode.AfterBlock())
DECODING: dict[str, Decoding] = {
    "sdar": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.Enough(0.9, decode.Even(0)), stop=decode.AfterBlock(),
                                      closing="always", confidence=decode.Tempered(), temperature=1.0),
        said_by="card",
        source="SDAR's README: as many steps as a block has tokens, low_confidence_dynamic at 0.9; generate.py says "
               "0.85, JetEngine's rule takes the leftmost where too few are sure"),
    "sdar_entropy": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.EntropyBound(0.35), confidence=decode.Entropy(),
                                      stop=decode.AfterBlock()),
        said_by="code", source="JetEngine's entropy_bounded; the bound of its example"),
    "fast_dllm_v2": Decoding(
        decoder=decode.BlockDiffusion(sub_block=8, commit=decode.Threshold(0.9)), max_new_tokens=512, said_by="card",
        source="Fast-dLLM v2's card: sub-blocks of 8, threshold 0.9; the function's own default of 1 takes one token a "
               "forward"),
    "fast_dllm_v2_inner": Decoding(
        decoder=decode.BlockDiffusion(sub_block=8, inner=True, commit=decode.Threshold(0.9)), max_new_tokens=512,
        said_by="code", source="the same with use_block_cache"),
    "nemotron": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.Threshold(0.9)),
        said_by="code",
        source="Nemotron-Labs-Diffusion's generate, blocks of its config (32), a threshold of its argument; 0.9 is "
               "ours: by default it has none and takes one token a forward"),
    "nemotron_speculative": Decoding(
        decoder=decode.SelfSpeculation(), said_by="code",
        source="Nemotron-Labs-Diffusion's linear_spec_generate, threshold 0"),
    "stable_diffcoder": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.Quota(0), stop=decode.AfterBlock(), cut=True),
        said_by="code", source="Stable-DiffCoder's generate_block: as many steps as tokens, no threshold"),
    "efficient_dlm": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.Threshold(0.9), temperature=0.7), max_new_tokens=128,
        said_by="card", source="Efficient-DLM's card, its example: blocks of 32, threshold 0.9, temperature 0.7"),
    "wedlm": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.TopN(1), cut=True), said_by="code",
        source="WeDLM's generate_wedlm, whose threshold of 0 takes one token a forward; its engine's streaming window "
               "is another procedure"),
    "llada2": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.Enough(0.95, decode.Even(32)), **_LLADA2), said_by="code",
        source="LLaDA2.0's generate: blocks of 32, 32 steps, threshold 0.95, temperature 0"),
    "llada2_1": Decoding(
        decoder=decode.BlockDiffusion(commit=decode.Enough(0.7, decode.TopN(1)), editing=decode.Editing(0.5, 16),
                                      **_LLADA2), said_by="card",
        source="LLaDA2.1's threshold 0.7, editing 0.5, 16 passes; its function's own are 0.95 and 0.9, and --set "
               "replaces any of them"),
}
