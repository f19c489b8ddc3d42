"""Block diffusion from an autoregressive checkpoint: sizes for a CPU and of a fine-tuning run.

The model is what `launch.convert_weights to-diffusion --shift 0` makes of the checkpoint. All numbers are ours, and
nobody has run the larger size.
"""

from configs import tiny
from configs.decoding import Decoding
from configs.experiment import POD, Experiment
from configs.refusion import QWEN3_8B
from dlm_jax import decode, objectives
from dlm_jax.train.config import TrainConfig

EXPERIMENTS = {
    "sft_8b": Experiment(
        model=QWEN3_8B.replace(family="a2d-qwen3", block_size=32), length=1024, epochs=3.0, train=TrainConfig(
            objective=objectives.BlockDiffusion(block_size=32), steps=10_000, batch_size=256, learning_rate=1e-5,
            warmup_steps=100, **POD)),
    "tiny": Experiment(
        model=tiny.MODEL.replace(family="a2d-qwen3", block_size=8), length=160,
        train=tiny.train(objectives.BlockDiffusion(block_size=8), 2e-3)),
}

DECODING: dict[str, Decoding] = {
    "released": Decoding(decoder=decode.block_diffusion(block_length=32, steps=256), said_by="code",
                         source="BD3-LM's released sampler; lengths are ours"),
    "parallel": Decoding(decoder=decode.block_diffusion(block_length=32, commit=decode.Threshold(0.9)),
                         source="the same, with the threshold of Fast-dLLM, Sec. 4.1"),
}
