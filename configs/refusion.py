"""ReFusion as its paper trained and evaluated it: training in B.1, decoding in Table 7."""

from configs.experiment import POD, Experiment
from dlm_jax import objectives
from dlm_jax.models.config import TransformerConfig
from dlm_jax.train.config import TrainConfig

QWEN3_8B = TransformerConfig(
    family="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False,
    max_position_embeddings=40960, bos_token_id=151643, eos_token_id=151645)

# batch, length, rate, epochs, lambda and slot sizes are the paper's; it does not name the schedule, warm-up, decay,
# clipping or seed. The paper's batch is spread over 128 GPUs: here over data x fsdp devices, all there are.
EXPERIMENTS = {
    "qwen3_8b": Experiment(
        model=QWEN3_8B,
        length=4096,
        epochs=4.0,
        train=TrainConfig(
            objective=objectives.ReFusion(slot_sizes=(4, 8, 16, 32), mdm_weight=1.0),
            steps=28_907,  # 4 epochs of the paper's 3.7M rows; `epochs` recomputes it for the rows there are
            batch_size=512,
            learning_rate=2e-5,
            warmup_steps=100,
            **POD,
        ),
    ),
}


def _decoding(max_new_tokens: int, threshold: float, slot_size: int, block_length: int) -> dict:
    """One row of Table 7, in the names of `generate` and `decode.ReFusion`; tau judges slots and tokens alike."""
    return dict(max_new_tokens=max_new_tokens, slot_threshold=threshold, token_threshold=threshold,
                slot_size=slot_size, block_length=block_length)


DECODING: dict[str, dict] = {
    "mmlu_pro": _decoding(512, 0.5, 16, 128),
    "arc_c": _decoding(512, 0.4, 4, 16),
    "gsm8k": _decoding(512, 0.7, 16, 64),
    "math": _decoding(512, 0.6, 32, 64),
    "gpqa": _decoding(128, 0.6, 8, 16),
    "humaneval": _decoding(512, 0.6, 16, 32),
    "mbpp": _decoding(512, 0.6, 16, 32),
}
