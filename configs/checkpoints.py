"""Released diffusion checkpoints by hub id: their networks, how they are decoded by default, how that was tested."""

from __future__ import annotations

import dataclasses

from configs import block_diffusion, blocks, dream, experts, flashdlm, llada, orthrus
from configs.decoding import Decoding
from dlm_jax.conventions import Conventions
from dlm_jax.models.config import TransformerConfig

AUTHORS = "authors' code"  # tiny models of theirs: logits, and decoding where they decode differently
LOGITS = "their logits"  # their decoding over another body
NAMES = "names, shapes"
_QWEN3_0_6B = blocks.MODELS["sdar_8b"].replace(
    family="a2d-qwen3", hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_word_embeddings=True,
    block_size=None)
_QWEN2_5_0_5B = flashdlm.GUIDERS["qwen2_5_0_5b"].replace(
    family="a2d-qwen2", tie_word_embeddings=False, mask_token_id=151665)
_UNSEEN = "its own code was not seen: see configs/blocks.py; the mask is its config's, or mask_id=..."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoints of one network.

    Attributes:
      ids: hub ids.
      model: the network.
      decoding: how it is decoded by default.
      tested: how this library's reading of it was compared with the authors'.
      note: what else is to know.
    """

    ids: tuple[str, ...]
    model: TransformerConfig
    decoding: Decoding
    tested: str = AUTHORS
    note: str = ""


_SDAR = {"1.7B": ("JetLM/SDAR-1.7B-Chat",), "4B": ("JetLM/SDAR-4B-Chat", "Gen-Verse/TraDo-4B-Instruct"),
         "8B": ("JetLM/SDAR-8B-Chat", "Gen-Verse/TraDo-8B-Instruct", "Gen-Verse/TraDo-8B-Thinking")}


CHECKPOINTS = (
    *(Checkpoint(ids=ids, model=blocks.MODELS["sdar_" + size.lower().replace(".", "_")],
                 decoding=blocks.DECODING["sdar"]) for size, ids in _SDAR.items()),
    *(Checkpoint(ids=tuple(f"JetLM/SDAR-{size}-Chat-b{block}" for size in _SDAR),
                 model=blocks.MODELS["sdar_8b"].replace(block_size=block), decoding=blocks.DECODING["sdar"],
                 note=f"sizes as above, 8B shown; --set block_size={block} where a config does not say")
      for block in (8, 16, 32, 64)),
    Checkpoint(ids=("JetLM/SDAR-30B-A3B-Chat",), model=experts.MODELS["sdar_30b_a3b"], decoding=blocks.DECODING["sdar"],
               note="its config names neither mask nor block size: --set block_size=4"),
    Checkpoint(ids=("Efficient-Large-Model/Fast_dLLM_v2_1.5B",), model=blocks.MODELS["fast_dllm_v2_1_5b"],
               decoding=blocks.DECODING["fast_dllm_v2"]),
    Checkpoint(ids=("Efficient-Large-Model/Fast_dLLM_v2_7B",), model=blocks.MODELS["fast_dllm_v2_7b"],
               decoding=blocks.DECODING["fast_dllm_v2"]),
    *(Checkpoint(ids=(f"nvidia/Nemotron-Labs-Diffusion-{size}",), model=blocks.MODELS[f"nemotron_{size.lower()}"],
                 decoding=blocks.DECODING["nemotron"],
                 note="also Autoregressive() and SelfSpeculation(), the latter with its draft adapter")
      for size in ("3B", "8B", "14B")),
    *(Checkpoint(ids=(f"nvidia/Efficient-DLM-{size}",), model=blocks.MODELS[f"efficient_dlm_{size.lower()}"],
                 decoding=blocks.DECODING["efficient_dlm"], tested=NAMES, note=_UNSEEN) for size in ("4B", "8B")),
    *(Checkpoint(ids=(f"chiennv/Orthrus-Qwen3-{size}",), model=model, decoding=orthrus.DECODING["greedy"])
      for model, size in zip(orthrus.MODELS.values(), ("1.7B", "4B", "8B"), strict=True)),
    Checkpoint(ids=("ByteDance-Seed/Stable-DiffCoder-8B-Base", "ByteDance-Seed/Stable-DiffCoder-8B-Instruct"),
               model=blocks.MODELS["stable_diffcoder_8b"], decoding=blocks.DECODING["stable_diffcoder"]),
    Checkpoint(ids=("tencent/WeDLM-8B-Base", "tencent/WeDLM-8B-Instruct"), model=blocks.MODELS["wedlm_8b"],
               decoding=blocks.DECODING["wedlm"]),
    Checkpoint(ids=("tencent/WeDLM-7B-Base", "tencent/WeDLM-7B-Instruct"), model=blocks.MODELS["wedlm_7b"],
               decoding=blocks.DECODING["wedlm"]),
    Checkpoint(ids=("inclusionAI/LLaDA2.0-mini",), model=experts.MODELS["llada2_mini"],
               decoding=blocks.DECODING["llada2"]),
    Checkpoint(ids=("inclusionAI/LLaDA2.1-mini",), model=experts.MODELS["llada2_mini"],
               decoding=blocks.DECODING["llada2_1"]),
    Checkpoint(ids=("inclusionAI/LLaDA2.0-flash",), model=experts.MODELS["llada2_flash"],
               decoding=blocks.DECODING["llada2"]),
    Checkpoint(ids=("inclusionAI/LLaDA2.1-flash",), model=experts.MODELS["llada2_flash"],
               decoding=blocks.DECODING["llada2_1"]),
    Checkpoint(ids=("inclusionAI/LLaDA-MoE-7B-A1B-Base", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
               model=experts.MODELS["llada_moe_7b_a1b"], decoding=llada.DECODING["released"]),
    Checkpoint(ids=("radicalnumerics/RND1-Base-0910",), model=experts.MODELS["rnd1_30b_a3b"],
               decoding=dream.DECODING["released"], tested=NAMES),
    Checkpoint(ids=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
               model=llada.LLADA_8B, decoding=llada.DECODING["released"]),
    Checkpoint(ids=("Zigeng/dParallel-LLaDA-8B-instruct",), model=llada.LLADA_8B, decoding=llada.DECODING["dparallel"]),
    Checkpoint(ids=("d3LLM/d3LLM_LLaDA",), model=llada.LLADA_8B, decoding=llada.DECODING["d3llm"]),
    Checkpoint(ids=("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"), model=llada.ILLADA_8B,
               decoding=llada.DECODING["illada"], tested=NAMES),
    Checkpoint(ids=("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B",
                    "Dream-org/Dream-Coder-v0-Base-7B", "Dream-org/Dream-Coder-v0-Instruct-7B",
                    "apple/DiffuCoder-7B-Base", "apple/DiffuCoder-7B-Instruct", "apple/DiffuCoder-7B-cpGRPO"),
               model=dream.DREAM_7B, decoding=dream.DECODING["released"]),
    Checkpoint(ids=("Zigeng/dParallel_Dream_7B_Instruct",), model=dream.DREAM_7B,
               decoding=llada.DECODING["dparallel"], tested=LOGITS),
    Checkpoint(ids=("d3LLM/d3LLM_Dream", "d3LLM/d3LLM_Dream_Coder"), model=dream.DREAM_7B,
               decoding=llada.DECODING["d3llm"], tested=LOGITS),
    Checkpoint(ids=("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",), model=_QWEN3_0_6B,
               decoding=llada.DECODING["released"]),
    Checkpoint(ids=("dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",), model=_QWEN3_0_6B,
               decoding=block_diffusion.DECODING["released"]),
    Checkpoint(ids=("dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",), model=_QWEN2_5_0_5B,
               decoding=llada.DECODING["released"], tested=NAMES),
    Checkpoint(ids=("dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",), model=_QWEN2_5_0_5B,
               decoding=block_diffusion.DECODING["released"], tested=NAMES),
    Checkpoint(ids=("fredzzp/open-dcoder-0.5B",), decoding=dream.DECODING["released"], tested=NAMES,
               model=flashdlm.GUIDERS["qwen2_5_0_5b"].replace(conventions=Conventions(logits="shifted")),
               note="its config is plain Qwen2's: load it with config={'conventions': Conventions(logits='shifted'), "
                    "'mask_token_id': ...}, or add diffusion_conventions and mask_token_id to its config.json"),
)
