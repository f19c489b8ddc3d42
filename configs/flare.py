"""FLARE as its paper trained it (Sec. 5, D.1), its ablation family (Sec. 4), and sizes for a CPU.

The paper's: blocks of 4, rows of 4,096 tokens packed from documents, 256 of them a step, 9,000 steps of AdamW at 1e-5
after 500 of warm-up, no decay of the rate. It names no weight decay, clipping or seed: those here are ours, and nobody
has run them at these sizes. The mixture of Long-CoT, Math and IF has the weights 0.4, 0.4 and 0.2 (Table 7): a file of
`--data` each, and `--set weights=0.4,0.4,0.2`.

Every run starts from a post-trained autoregressive model that has been given a mask token (`launch.convert_weights
to-flare`), which `--init` names: the ablations, `qwen3_1_7b_NAME`, from Qwen3-1.7B, the others from Qwen3.5. `MODELS`
are the shapes: of Qwen3.5-2B the paper tells heads and widths of the delta rule and how many layers have one (Table 4,
A.5); the others, and what it leaves open, are as transformers' defaults (those of the 9B) and the models' cards have
them. Special ids come with a checkpoint.
"""

import dataclasses

from configs import tiny
from configs.decoding import Decoding
from configs.experiment import POD, Experiment
from dlm_jax import decode, objectives
from dlm_jax.models.config import GatedDelta, TransformerConfig
from dlm_jax.objectives import flare
from dlm_jax.train.config import TrainConfig

_PATTERN = ("gated_delta",) * 3 + ("attention",)
_9B = TransformerConfig(
    family="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_layers=32, num_heads=16,
    num_kv_heads=4, head_dim=256, rope_theta=1e7, partial_rotary_factor=0.25, max_position_embeddings=262144,
    block_size=4, pattern=_PATTERN,
    gated_delta=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4))
_4B = _9B.replace(hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True)
MODELS = {
    "qwen3_5_2b": _4B.replace(
        hidden_size=2048, intermediate_size=6144, num_layers=24, num_heads=8, num_kv_heads=2,
        gated_delta=dataclasses.replace(_9B.gated_delta, value_heads=16)),
    "qwen3_5_4b": _4B,
    "qwen3_5_9b": _9B,
}
TINY = tiny.MODEL.replace(
    family="qwen3_5_text", partial_rotary_factor=0.25, pattern=_PATTERN,
    gated_delta=GatedDelta(key_heads=2, value_heads=4, key_dim=32, value_dim=32, taps=4))


def _paper(objective: objectives.Flare) -> Experiment:
    # 64 predictions of a row at a time: Qwen3.5's vocabulary has 248,320 ids
    return Experiment(length=4096, pack=True, train=TrainConfig(
        objective=dataclasses.replace(objective, head_chunk=64), steps=9_000, batch_size=256, learning_rate=1e-5,
        warmup_steps=500, schedule="constant", **POD))


def _tiny(objective: objectives.Objective, model=tiny.MODEL, rate: float = 2e-3) -> Experiment:
    return Experiment(model=model, length=160, pack=True, train=tiny.train(objective, rate))


EXPERIMENTS = {
    **{name: _paper(objectives.Flare(block_size=4)) for name in MODELS},
    **{f"qwen3_1_7b_{name}": _paper(flare.variant(name)) for name in flare.VARIANTS},
    "tiny_seed": _tiny(objectives.Autoregressive(), TINY, 3e-3),
    "tiny": _tiny(objectives.Flare(block_size=4), TINY),
    **{f"tiny_{name}": _tiny(flare.variant(name)) for name in flare.VARIANTS},
}

_SAMPLER = decode.Sampler(temperature=1.0, top_k=50, top_p=0.95)
_SAYS = "FLARE, D.1: temperature 1, top-k 50, top-p 0.95, answers of up to 32,768 tokens; "
DECODING: dict[str, Decoding] = {
    "diffusion_trust": Decoding(decoder=decode.DiffusionTrust(block_size=4, sampler=_SAMPLER), max_new_tokens=32768,
                                source=_SAYS + "the thresholds are ours"),
    "ar_trust": Decoding(decoder=decode.ARTrust(sampler=_SAMPLER), max_new_tokens=32768,
                         source=_SAYS + "horizon and draft policy are ours"),
}
