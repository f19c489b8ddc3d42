"""Masked-diffusion decoding in eager PyTorch, as its released scripts do it: the other side of `benchmark masked`.

The body is that of transformers (Qwen3 or Qwen2) with full attention and without its causal mask, which leaves PyTorch
its fastest attention. Only the open block's outputs go through the head and the softmax, as in our decoders; the
released loops compute all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

BODIES = {"a2d-qwen3": "qwen3", "Dream": "qwen2", "a2d-qwen2": "qwen2"}  # family: whose weights it can be stored as


class Memory:
    """Keys and values of a whole row; a forward's own are written at [start, stop), the rest stay as they were."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.start = self.stop = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        """Returns all keys and values of a layer, with those of this forward in place; transformers calls it."""
        if layer not in self.layers:  # the first forward holds the whole row
            self.layers[layer] = keys.clone(), values.clone()
        for old, new in zip(self.layers[layer], (keys, values)):
            old[:, :, self.start:self.stop] = new
        return self.layers[layer]


def load(folder: str) -> Any:
    """Returns a float32 network of a Hugging Face directory (Qwen3 or Qwen2) that attends in both directions."""
    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in network.model.layers:
        layer.self_attn.is_causal = False
    return network


def outputs(network: Any, ids: torch.Tensor, start: int, stop: int, memory: Memory | None) -> torch.Tensor:
    """Returns the (B, stop - start, D) hidden states of the tokens [start, stop).

    Args:
      network: see `load`.
      ids: (B, S) int64 whole rows.
      start, stop: tokens to compute; all of them without a memory, or when it is new.
      memory: keys and values of the others, or None.
    """
    if memory is not None:
        memory.start, memory.stop = start, stop
    return network.model(
        input_ids=ids[:, start:stop], attention_mask={"full_attention": None},
        position_ids=torch.arange(start, stop)[None], past_key_values=memory, use_cache=memory is not None,
    ).last_hidden_state


@torch.no_grad()
def decode(network: Any, prompts: list[list[int]], *, new_tokens: int, block_length: int, mask_id: int, shift: int = 0,
           steps: int = 0, threshold: float | None = None, cache: str = "none") -> tuple[list[list[int]], int]:
    """Decodes answers block by block, committing the most probable drafts.

    Args:
      network: see `load`.
      prompts: token ids, all of one length.
      new_tokens: answer length, a multiple of the block length.
      block_length: tokens of a block.
      mask_id: of the mask token.
      shift: the output at index i predicts the token at i + shift, 0 or 1.
      steps: forwards for the whole answer, a multiple of the number of blocks; or
      threshold: commit all drafts this probable, at least one.
      cache: "none", "prefix", "dual" or "free", see `decode.cache_policies`.

    Returns:
      The answers, and the number of forwards.
    """
    prompt = torch.tensor(prompts)
    first, size = prompt.shape[1], prompt.shape[1] + new_tokens
    ids = torch.cat([prompt, torch.full((len(prompts), new_tokens), mask_id)], dim=1)
    memory, forwards = None if cache == "none" else Memory(), 0
    for begin in range(first, size, block_length):
        end, step, due = begin + block_length, 0, cache != "free" or begin == first
        block = ids[:, begin:end]  # a view: committing writes the row
        while (masked := block == mask_id).any():
            start, stop = 0, size
            if cache != "none" and not due:
                early = shift if cache == "free" or masked[:, 0].any() else 0
                start, stop = begin - early, end if cache == "dual" else size
            hidden = outputs(network, ids, start, stop, memory)
            forwards, due = forwards + 1, False
            wanted = (torch.arange(begin, end) - shift - start).clamp(min=0)  # what is not in the window is committed
            probability = network.lm_head(hidden[:, wanted]).softmax(dim=-1)
            probability[..., mask_id] = 0.0  # a mask is no answer
            sure, draft = probability.max(dim=-1)
            sure = sure.masked_fill(~masked, -1.0)
            if threshold is None:
                each, rest = divmod(block_length, steps * block_length // new_tokens)
                count = torch.full((len(ids), 1), each + (step < rest))
            else:
                count = (sure >= threshold).sum(dim=1, keepdim=True).clamp(min=1)
            place = sure.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            chosen = masked & (place < count)
            block[chosen] = draft[chosen]
            step += 1
    return ids[:, first:].tolist(), forwards
