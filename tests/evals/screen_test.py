"""A film of an answer: drafts and committed tokens told apart, a line an event (the screen itself: tests/launch)."""

import re

from dlm_jax.data import sources
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.decode import Event
from dlm_jax.evals.screen import film
from dlm_jax.train import tiny


def test_drafts_are_grey_and_go_when_something_is_committed():
    tokenizer = tokenizers.train(tokenizers.texts_of(map(sources.parse_row, tiny.stories(50))), 300)
    ids = tokenizer("12[bold]", add_special_tokens=False)["input_ids"]
    events = [Event(1, "denoise", 0, [0, 1], ids[:2], False, ["drafted"] * 2),
              Event(1, "denoise", 0, [1], ids[1:2], True, ["drafted"]),
              Event(2, "decode", 0, [0], ids[:1], True, ["autoregressive"]),
              Event(3, "decode", 0, list(range(2, len(ids))), ids[2:], True, ["autoregressive"] * (len(ids) - 2)),
              Event(4, "decode", 0, [20], [tokenizer.eos_token_id], True, ["autoregressive"])]
    lines = list(film(events, tokenizer, eos_id=tokenizer.eos_token_id, limit=32))
    grey, coloured = "\x1b[90m", "\x1b[91m"
    assert lines[0].startswith("  1 denoise ") and f"{grey}1" in lines[0] and f"{grey}2" in lines[0]
    assert f"{coloured}2" in lines[1] and f"{grey}1" not in lines[1]
    assert lines[2].startswith("  2 decode  ") and "1" in lines[2].split("decode", 1)[1]
    plain = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    assert plain[3:] == ["  3 decode  12[bold]", "  4 decode  12[bold] … "]  # texts are no markup
