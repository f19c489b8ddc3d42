"""Byte-level BPE tokenizers with a chat template, and the encoding of a row that both training and decoding use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dlm_jax.data.sources import Row

PAD, END, START, MASK = "<|pad|>", "<|im_end|>", "<|im_start|>", "<|mask|>"
SPECIAL = (PAD, END, START, MASK)  # ids 0, 1, 2, 3

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# words with their leading space, every digit alone (so that arithmetic sees columns), punctuation, line ends
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def texts_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yields the texts a tokenizer is trained on: every message as the chat template shows it.

    Args:
      rows: the training rows.
    """
    for row in rows:
        for message in [*row.prompt_messages, {"role": "assistant", "content": row.response}]:
            yield f"{message['role']}\n{message['content']}\n"


def train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer: any text can be encoded, digits are single tokens.

    Args:
      texts: training texts.
      vocab_size: largest number of ids, at least 260 (256 bytes and 4 special tokens); fewer are made when the
        texts run out of repeated pairs.

    Returns:
      A tokenizer with `<|pad|>` = 0, `<|im_end|>` (end of sequence) = 1, `<|im_start|>` = 2, `<|mask|>` = 3.

    Raises:
      ValueError: a vocabulary too small.
    """
    smallest = 256 + len(SPECIAL)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size = {vocab_size}: a byte-level tokenizer needs at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK,
        extra_special_tokens=[START], chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False)


def load(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Reads the tokenizer of a Hugging Face directory; nothing is downloaded and no code of it is run.

    Args:
      path: directory with tokenizer.json or its older equivalents.

    Raises:
      ValueError: the directory holds no tokenizer.
    """
    if not Path(path).is_dir():
        raise ValueError(f"tokenizer {path}: no such directory; give a directory with tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer {path}: cannot be read ({error}); it needs tokenizer.json") from None


def save(tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike[str]) -> None:
    """Writes the files that `load` and `transformers` read.

    Args:
      tokenizer: the tokenizer.
      path: directory, made where missing.
    """
    tokenizer.save_pretrained(path)


def prompt_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **chat: Any) -> str:
    """Returns a conversation as text, up to where the assistant's next answer begins.

    Args:
      tokenizer: a tokenizer with a chat template.
      messages: {"role", "content"} each, the last one not the assistant's.
      **chat: arguments of the chat template, `enable_thinking` for instance.

    Raises:
      ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; add chat_template to its tokenizer_config.json")
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **chat)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **chat: Any) -> list[int]:
    """Returns the ids of `prompt_text`.

    Args:
      tokenizer, messages, **chat: as there.
    """
    return tokenizer(prompt_text(tokenizer, messages, **chat), add_special_tokens=False)["input_ids"]


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
    """Returns what each token adds to the text before it; joined, the pieces are the text of all.

    A character of several tokens comes with the last of them; the ones before add "".

    Args:
      tokenizer: the tokenizer.
      tokens: ids that follow each other.
      skip_special_tokens: whether special tokens add "".
    """
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    found, context, start = [], 0, 0  # texts up to `start` are out; those from `context` on decide how the next begins
    for end in range(1, len(tokens) + 1):
        before, now = decode(tokens[context:start]), decode(tokens[context:end])
        if now.endswith("\ufffd") and end < len(tokens):
            found.append("")
        else:
            found.append(now[len(before):])
            context, start = start, end
    return found


def encode_rows(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
    """Returns the ids of each row's prompt, and of its response with the end-of-sequence token.

    Args:
      tokenizer: a tokenizer with a chat template.
      rows: the rows.

    Raises:
      ValueError: a tokenizer without a chat template or an end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json")
    # one call for all texts: the tokenizer works on them in parallel
    ids = lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    prompts = ids([prompt_text(tokenizer, row.prompt_messages) for row in rows])
    responses = ids([row.response for row in rows])
    return [(prompt, response + [tokenizer.eos_token_id]) for prompt, response in zip(prompts, responses)]


def fit_turns(prompt: Sequence[int], response: Sequence[int], length: int, pad_id: int) -> dict[str, np.ndarray]:
    """Lays a prompt and its response out as one example of a training batch.

    The response is supervised. A row too long loses the end of its response (and with it the end-of-sequence
    token); a prompt too long leaves nothing supervised.

    Args:
      prompt: ids.
      response: ids, end-of-sequence included.
      length: T, tokens.
      pad_id: id to the right of the example.

    Returns:
      tokens (T,) int32 right-padded, loss_mask (T,) bool, prompt_length, length () int32, truncated, empty () bool.
    """
    ids = [*prompt, *response][:length]
    tokens = np.full(length, pad_id, np.int32)
    tokens[: len(ids)] = ids
    index = np.arange(length)
    return {
        "tokens": tokens,
        "loss_mask": (index >= len(prompt)) & (index < len(ids)),
        "prompt_length": np.int32(min(len(prompt), length)),
        "length": np.int32(len(ids)),
        "truncated": np.bool_(len(prompt) + len(response) > length),
        "empty": np.bool_(len(prompt) >= length),
    }


def encode_row(tokenizer: PreTrainedTokenizerBase, row: Row, length: int) -> dict[str, np.ndarray]:
    """Encodes one row as one example of a training batch; see `encode_rows` and `fit_turns`.

    Args:
      tokenizer: a tokenizer with a chat template.
      row: the row.
      length: T, tokens.
    """
    return fit_turns(*encode_rows(tokenizer, [row])[0], length, tokenizer.pad_token_id or 0)
