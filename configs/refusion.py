"""ReFusion as its paper trained and evaluated it: training in B.1, decoding in Table 7 and in the released script."""

from configs.experiment import POD, Experiment
from dlm_jax import objectives
from dlm_jax.models.config import TransformerConfig
from dlm_jax.train.config import TrainConfig

QWEN3_8B = TransformerConfig(
    family="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False,
    max_position_embeddings=40960, bos_token_id=151643, eos_token_id=151645)

# batch, length, rate, epochs, lambda and slot sizes are the paper's; the schedule, a cosine, and no decay are those of
# the released script, which warms nothing up: warm-up, clipping and seed are ours. The paper's batch is spread over 128
# GPUs: here over data x fsdp devices, all there are.
# Masking is the released code's, not the paper's: decoding starts from a block that is all masks, and floor(tK) slots
# of K with t below 1 are never all of them, so a model trained so has not seen where it must begin.
EXPERIMENTS = {
    "qwen3_8b": Experiment(
        model=QWEN3_8B,
        length=4096,
        epochs=4.0,
        train=TrainConfig(
            objective=objectives.ReFusion(slot_sizes=(4, 8, 16, 32), masking="released", mdm_weight=1.0),
            steps=28_907,  # 4 epochs of the paper's 3.7M rows; `epochs` recomputes it for the rows there are
            batch_size=512,
            learning_rate=2e-5,
            warmup_steps=100,
            **POD,
        ),
    ),
}


def _table_7(max_new_tokens: int, tau: float, slot_size: int, block_length: int) -> dict:
    """One row of Table 7, in the names of `generate` and `decode.ReFusion`; tau judges slots and tokens alike."""
    return dict(max_new_tokens=max_new_tokens, slot_threshold=tau, token_threshold=tau, slot_size=slot_size,
                block_length=block_length)


def _released(slot_threshold: float, token_threshold: float, slot_size: int, block_length: int) -> dict:
    """One line of the released eval.sh, whose code redrafts what it rejects; blocks are 512 / `serial_num_blocks`."""
    return dict(max_new_tokens=512, slot_threshold=slot_threshold, token_threshold=token_threshold,
                slot_size=slot_size, block_length=block_length, completion="redraft")


DECODING: dict[str, dict] = {
    "mmlu_pro": _table_7(512, 0.5, 16, 128),
    "arc_c": _table_7(512, 0.4, 4, 16),
    "gsm8k": _table_7(512, 0.7, 16, 64),
    "math": _table_7(512, 0.6, 32, 64),
    "gpqa": _table_7(128, 0.6, 8, 16),
    "humaneval": _table_7(512, 0.6, 16, 32),
    "mbpp": _table_7(512, 0.6, 16, 32),
    "released_mmlu_pro": _released(0.9, 0.4, 16, 128),
    "released_arc_c": _released(0.8, 0.1, 8, 8),
    "released_gsm8k": _released(0.9, 0.4, 32, 128),
    "released_math": _released(0.8, 0.6, 32, 64),
    "released_gpqa": _released(0.8, 0.2, 8, 16),
    "released_humaneval": _released(0.9, 0.4, 32, 128),
    "released_mbpp": _released(0.9, 0.3, 32, 128),
}
