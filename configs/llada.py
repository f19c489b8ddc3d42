"""LLaDA-8B as its paper trained it (Sec. 2.2, 2.3 and A.1), its released sampler's settings, and a size for a CPU.

Pre-training saw 2.3 T tokens in rows of 4,096, 1,280 of them a step, at a peak rate of 4e-4 that fell in stages; 1 % of
rows were cut to a random length. Fine-tuning took three epochs of 4.5 M pairs, 256 a step, at 2.5e-5, with a linear
fall over its last tenth. The schedule here stays at the peak; a stage of another rate is another run, from the last
one's model.
"""

from configs import tiny
from configs.decoding import Decoding
from configs.experiment import POD, Experiment
from dlm_jax import decode, objectives
from dlm_jax.models.config import TransformerConfig
from dlm_jax.train.config import TrainConfig

LLADA_8B = TransformerConfig(
    family="llada", vocab_size=126464, hidden_size=4096, intermediate_size=12288, num_layers=32, num_heads=32,
    num_kv_heads=32, head_dim=128, rope_theta=5e5, rms_norm_eps=1e-5, max_position_embeddings=4096, bos_token_id=126080,
    eos_token_id=126081, pad_token_id=126081, mask_token_id=126336)


def _train(objective: objectives.MaskedDiffusion, **fields) -> TrainConfig:
    return TrainConfig(objective=objective, schedule="constant", weight_decay=0.1, **POD, **fields)


EXPERIMENTS = {
    "pretrain_8b": Experiment(
        model=LLADA_8B, length=4096, train=_train(
            objectives.MaskedDiffusion(target="all", padding="ignore", random_length=0.01),
            steps=438_690, batch_size=1280, learning_rate=4e-4, warmup_steps=2000)),
    "sft_8b": Experiment(
        model=LLADA_8B, length=4096, epochs=3.0, train=_train(
            objectives.MaskedDiffusion(),
            steps=52_735,  # 3 epochs of the paper's 4.5M pairs; `epochs` recomputes it for the rows there are
            batch_size=256, learning_rate=2.5e-5, warmup_steps=50)),
    "tiny": Experiment(
        model=tiny.MODEL.replace(family="llada", tie_word_embeddings=False), length=160,
        train=tiny.train(objectives.MaskedDiffusion(), 2e-3)),
}

DECODING: dict[str, Decoding] = {
    "released": Decoding(decoder=decode.llada(steps=128, block_length=32), max_new_tokens=128,
                         source="LLaDA's released generate.py, its example"),
}
