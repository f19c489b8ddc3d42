"""Makes `qwen3_tiny` here with PyTorch's Qwen3: `python tests/golden/make_qwen3.py`, PyTorch installed.

The format is that of `tests/oracle/qwen3.py`; the greedy prompts are those whose every decision has a margin.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache

FOLDER = Path(__file__).resolve().parent / "qwen3_tiny"
LENGTH, PIECES, NEW, EOS = 24, [9, 1, 1, 5, 1, 3, 4], 12, 1


def random_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=2,
        eos_token_id=EOS, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.25)
    return model


def additive(mask: np.ndarray) -> torch.Tensor:
    return torch.where(torch.tensor(mask), 0.0, torch.finfo(torch.float32).min)


def array_cases(model) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    ids = draw.integers(0, model.config.vocab_size, (2, LENGTH))
    plain = np.tile(np.arange(LENGTH), (2, 1))
    causal = np.tril(np.ones((2, 1, LENGTH, LENGTH), bool))
    block = np.array([i if i < 8 else 8 + (i - 8) // 4 for i in range(LENGTH)])
    cases = {
        "causal": (plain, causal),
        "randpos": (draw.integers(0, 200, (2, LENGTH)), causal),
        "blockmask": (plain, np.broadcast_to(block[:, None] >= block, causal.shape)),
        "randmask": (draw.integers(0, 200, (2, LENGTH)),
                     (draw.random(causal.shape) < 0.4) | np.eye(LENGTH, dtype=bool)),
    }
    out = {}
    for name, (positions, mask) in cases.items():
        out[f"{name}__input_ids"] = ids
        if positions is not plain:
            out[f"{name}__position_ids"] = positions
        if mask is not causal:
            out[f"{name}__mask"] = np.ascontiguousarray(mask)
        out[f"{name}__logits"] = model(
            torch.tensor(ids), attention_mask=additive(mask), position_ids=torch.tensor(positions)).logits.numpy()
    cache, start, logits = DynamicCache(), 0, []
    for size in PIECES:
        piece = torch.tensor(ids[:, start:start + size])
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits.numpy())
        start += size
    out["cache__logits"] = np.concatenate(logits, axis=1)
    for layer in (0, model.config.num_hidden_layers - 1):
        out[f"cache__layer{layer}_keys"] = cache.layers[layer].keys.numpy()
        out[f"cache__layer{layer}_values"] = cache.layers[layer].values.numpy()
    return out


def greedy_case(model, prompt: list[int]) -> dict:
    ids, gaps = list(prompt), []
    while len(ids) < len(prompt) + NEW and EOS not in ids[len(prompt):]:
        best = torch.topk(model(torch.tensor([ids])).logits[0, -1], 2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return {"prompt": prompt, "max_new_tokens": NEW, "eos_id": EOS, "expected_ids": ids,
            "stopped_on_eos": ids[-1] == EOS, "min_top1_top2_logit_gap": min(gaps)}


@torch.no_grad()
def main() -> None:
    model = random_model()
    model.save_pretrained(FOLDER)
    np.savez_compressed(FOLDER / "cases.npz", **array_cases(model))
    draw = np.random.default_rng(1)
    found = [greedy_case(model, draw.integers(2, 64, length).tolist()) for length in (3, 7, 5, 12, 4, 9, 6, 8)]
    kept = [case for case in found if case["min_top1_top2_logit_gap"] > 1e-2][:4]
    facts = {"made_by": "tests/golden/make_qwen3.py", "trained_steps": 0, "cache_chunk_sizes": PIECES, "greedy": kept}
    (FOLDER / "cases.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
