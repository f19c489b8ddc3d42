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
    """Keys and values of a whole row; a forward's own are written at [start, stop), the rest stay as they were.

    Attributes:
      size: tokens of a row.
      later: whether a forward sees tokens behind its window.
    """

    def __init__(self, size: int, later: bool):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.size, self.later = size, later
        self.start = self.stop = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        """Returns what a layer sees, with the keys and values of this forward in place; transformers calls it."""
        if layer not in self.layers:
            self.layers[layer] = tuple(x.new_empty(*x.shape[:2], self.size, x.shape[3]) for x in (keys, values))
        for old, new in zip(self.layers[layer], (keys, values)):
            old[:, :, self.start:self.stop] = new
        return self.layers[layer] if self.later else tuple(x[:, :, :self.stop] for x in self.layers[layer])


def load(folder: str) -> Any:
    """Returns a float32 network of a Hugging Face directory (Qwen3 or Qwen2) that attends in both directions."""
    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in network.model.layers:
        layer.self_attn.is_causal = False
    return network


def outputs(network: Any, ids: torch.Tensor, start: int, stop: int, memory: Memory | None,
            seen: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the (B, stop - start, D) hidden states of the tokens [start, stop).

    Args:
      network: see `load`.
      ids: (B, S) int64 whole rows.
      start, stop: tokens to compute; all of them without a memory, or when it is new.
      memory: keys and values of the others, or None.
      seen: (stop - start, keys) bool where a token does not see all there is.
    """
    if memory is not None:
        memory.start, memory.stop = start, stop
    return network.model(
        input_ids=ids[:, start:stop], attention_mask={"full_attention": None if seen is None else seen[None, None]},
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
      cache: "none", "prefix", "dual", "free", "delayed" or "block", see `decode.masked.caches`.

    Returns:
      The answers, and the number of forwards.
    """
    prompt = torch.tensor(prompts)
    first, size = prompt.shape[1], prompt.shape[1] + new_tokens
    ids = torch.cat([prompt, torch.full((len(prompts), new_tokens), mask_id)], dim=1)
    memory, forwards = None if cache == "none" else Memory(size, later=cache != "block"), 0
    if cache == "block":  # the prompt by itself, in blocks that end where it does
        number = (torch.arange(first) + -first % block_length) // block_length
        outputs(network, ids, 0, first, memory, number[None, :] <= number[:, None])
    for begin in range(first, size, block_length):
        end, step = begin + block_length, 0
        due = cache in ("prefix", "dual") or cache in ("free", "delayed") and begin == first
        if cache == "block" and begin > first:  # the finished block, clean
            outputs(network, ids, begin - block_length, begin, memory)
            forwards += 1
        block = ids[:, begin:end]  # a view: committing writes the row
        while (masked := block == mask_id).any():
            start, stop, seen = 0, size, None
            if cache != "none" and not due:
                early = shift if cache in ("free", "delayed") or masked[:, 0].any() else 0
                if cache == "delayed" and step == 0:  # the block before, finished by the last forward
                    early += block_length
                start, stop = begin - early, end if cache in ("dual", "block") else size
                if cache == "block" and early:  # the token before ends its own block and sees no further
                    seen = torch.ones(stop - start, stop, dtype=torch.bool)
                    seen[:early, begin:] = False
            hidden = outputs(network, ids, start, stop, memory, seen)
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
