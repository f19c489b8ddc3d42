"""Orthrus as its paper trained it (Sec. 4.1, Implementation Details), and a size for a CPU.

The paper's: blocks of 32 tokens, 256 of them at random anchors over at most 2,048 clean tokens, two epochs of 600K
rows, forward KL, only the diffusion heads trained, in one denoising step. It names no batch size, learning rate,
schedule, warm-up, decay, clipping or seed: those here are ours, and nobody has run them at these sizes.

Every run starts from a dual model, which `launch.convert_weights to-orthrus` makes of an autoregressive one; `--init`
names it. `MODELS` are the shapes.
"""

from configs.decoding import Decoding
from configs.experiment import POD, Experiment
from configs.refusion import QWEN3_8B
from dlm_jax import decode, objectives
from dlm_jax.train.config import TrainConfig

_8B = QWEN3_8B.replace(family="orthrus", block_size=32)
_4B = _8B.replace(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
MODELS = {
    "qwen3_1_7b": _4B.replace(hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16),
    "qwen3_4b": _4B,
    "qwen3_8b": _8B,
}

_PAPER = Experiment(
    length=2048,
    epochs=2.0,
    train=TrainConfig(
        objective=objectives.Orthrus(block_size=32, blocks=256),
        steps=18_750,  # 2 epochs of the paper's 600K rows; `epochs` recomputes it for the rows there are
        batch_size=64,
        learning_rate=1e-4,
        warmup_steps=100,
        **POD,
    ),
)

EXPERIMENTS = {name: _PAPER for name in MODELS} | {
    "tiny": Experiment(length=160, train=TrainConfig(
        objective=objectives.Orthrus(block_size=8, blocks=16), steps=500, batch_size=32, learning_rate=2e-3,
        warmup_steps=50, beta2=0.98, checkpoint_every=100)),
}

# the paper evaluates greedy answers only, and does not say how long; the released model card's example generates 2,048
DECODING: dict[str, Decoding] = {
    "greedy": Decoding(decoder=decode.Orthrus(block_size=32), max_new_tokens=2048, said_by="paper",
                       source="Orthrus, Sec. 4.1; length of the released example, with --chat enable_thinking=false"),
    "sampled": Decoding(decoder=decode.Orthrus(block_size=32, temperature=0.7, top_k=20, top_p=0.8),
                        max_new_tokens=2048, source="Orthrus' blocks, sampled as Qwen3's card says for "
                                                    "--chat enable_thinking=false"),
}
