"""ReFusion as its paper trained and evaluated it: training in B.1, decoding in Table 7 and in the released script."""

from configs.decoding import Decoding
from configs.experiment import POD, Experiment
from dlm_jax import decode, objectives
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


def _decoding(source: str, max_new_tokens: int, *numbers, completion: str = "autoregressive") -> Decoding:
    names = ("slot_threshold", "token_threshold", "slot_size", "block_length")
    return Decoding(decoder=decode.ReFusion(**dict(zip(names, numbers, strict=True)), completion=completion),
                    max_new_tokens=max_new_tokens, source=source)


_TABLE_7 = {  # longest answer, tau, which judges slots and tokens alike, slot size, block length
    "mmlu_pro": (512, 0.5, 16, 128),
    "arc_c": (512, 0.4, 4, 16),
    "gsm8k": (512, 0.7, 16, 64),
    "math": (512, 0.6, 32, 64),
    "gpqa": (128, 0.6, 8, 16),
    "humaneval": (512, 0.6, 16, 32),
    "mbpp": (512, 0.6, 16, 32),
}
_EVAL_SH = {  # slot threshold, token threshold, slot size, block length, which is 512 / `serial_num_blocks`
    "mmlu_pro": (0.9, 0.4, 16, 128),
    "arc_c": (0.8, 0.1, 8, 8),
    "gsm8k": (0.9, 0.4, 32, 128),
    "math": (0.8, 0.6, 32, 64),
    "gpqa": (0.8, 0.2, 8, 16),
    "humaneval": (0.9, 0.4, 32, 128),
    "mbpp": (0.9, 0.3, 32, 128),
}
DECODING: dict[str, Decoding] = {
    **{name: _decoding("ReFusion, Table 7", length, tau, tau, slot, block)
       for name, (length, tau, slot, block) in _TABLE_7.items()},
    **{f"released_{name}": _decoding("ReFusion's released eval.sh, whose code redrafts what it rejects", 512, *numbers,
                                     completion="redraft") for name, numbers in _EVAL_SH.items()},
}
