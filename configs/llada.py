"""LLaDA-8B as its paper trained it (Sec. 2.2, 2.3 and A.1), its released sampler's settings, and a size for a CPU.

Pre-training saw 2.3 T tokens in rows of 4,096, 1,280 of them a step, at a peak rate of 4e-4 that fell in stages; 1 % of
rows were cut to a random length. Fine-tuning took three epochs of 4.5 M pairs, 256 a step, at 2.5e-5, with a linear
fall over its last tenth. The schedule here stays at the peak; a stage of another rate is another run, from the last
one's model.

iLLaDA-8B (arXiv 2606.25331, Table 1) is a Llama body with LLaDA's conventions: grouped keys, a tied head, Seed-Coder's
vocabulary, mask 5. Its names are those of its modeling_illada.py; the rotary base here is LLaDA's, a checkpoint's own
is in its config.json.
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
ILLADA_8B = LLADA_8B.replace(
    family="illada", vocab_size=155136, intermediate_size=14336, num_kv_heads=8, max_position_embeddings=8192,
    tie_word_embeddings=True, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=2, pad_token_id=None, mask_token_id=5)


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
                         said_by="code",
                         source="LLaDA's released generate.py, its example"),
    "dparallel": Decoding(
        decoder=decode.d3llm(ahead=None, early_stop=False), said_by="code",
        source="dParallel's evaluation scripts: blocks of 32, all drafts of at most 0.5 nats; Dream's same"),
    "d3llm": Decoding(
        decoder=decode.d3llm(), said_by="code",
        source="d3LLM's evaluation scripts: blocks of 32, 0.5 nats, a next block from 0.1 and 0.95 on; Dream's same"),
    "illada": Decoding(
        decoder=decode.llada(steps=1024, block_length=32, stop=decode.AfterBlock()), max_new_tokens=1024,
        said_by="code",
        source="iLLaDA's blocks of 32, a token a step, with LLaDA's generate.py, which its README says to use. The "
               "paper adds a block where the last is full; here all are there, as masks"),
}
