"""Dream-7B: its shape, the released fine-tuning run, the released sampler's settings, and a size for a CPU.

Dream continues Qwen2.5-7B: its outputs predict the next token, as those of the checkpoint it comes from
(`launch.convert_weights to-diffusion`). Rate, rows a step and length are those of the released fine-tuning script; its
weighting by context (CART) is not here, and warm-up, schedule and epochs are ours. Nobody has run it at this size.
"""

from configs import tiny
from configs.decoding import Decoding
from configs.experiment import POD, Experiment
from configs.flashdlm import GUIDERS
from dlm_jax import decode, objectives
from dlm_jax.train.config import TrainConfig

DREAM_7B = GUIDERS["qwen2_5_7b"].replace(
    family="Dream", max_position_embeddings=131072, bos_token_id=151643, eos_token_id=151643, pad_token_id=151643,
    mask_token_id=151666)

EXPERIMENTS = {
    "sft_7b": Experiment(
        model=DREAM_7B, length=2048, epochs=3.0, train=TrainConfig(
            objective=objectives.MaskedDiffusion(normalisation="token"),
            steps=9_375,  # 3 epochs of the paper's 1.8M pairs; `epochs` recomputes it for the rows there are
            batch_size=576, learning_rate=2e-6, warmup_steps=100, **POD)),
    "tiny": Experiment(
        model=tiny.MODEL.replace(family="a2d-qwen3", logit_shift=1), length=160,
        train=tiny.train(objectives.MaskedDiffusion(normalisation="token"), 2e-3)),
}

DECODING: dict[str, Decoding] = {
    "released": Decoding(decoder=decode.dream(steps=512, alg="entropy", temperature=0.2, top_p=0.95),
                         max_new_tokens=512, said_by="code", source="Dream's released diffusion_generate, its example"),
}
