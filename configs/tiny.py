"""CPU-sized variants: the same code paths in seconds."""

from configs.experiment import Experiment
from dlm_jax import objectives
from dlm_jax.models.config import TransformerConfig
from dlm_jax.train.config import TrainConfig

# vocabulary and special ids are replaced by the tokenizer's
MODEL = TransformerConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
    rope_theta=1e4, tie_word_embeddings=True, initializer_range=0.05, max_position_embeddings=4096)


def train(objective, learning_rate: float) -> TrainConfig:
    """Returns the run that every tiny model takes."""
    return TrainConfig(
        objective=objective, steps=500, batch_size=32, learning_rate=learning_rate, warmup_steps=50, beta2=0.98,
        weight_decay=0.05, checkpoint_every=100)


EXPERIMENTS = {
    "autoregressive": Experiment(model=MODEL, length=160, train=train(objectives.Autoregressive(), 3e-3)),
    "refusion": Experiment(model=MODEL, length=160, train=train(objectives.ReFusion(slot_sizes=(4, 8, 16, 32)), 2e-3)),
}
