"""The tokenizer: reversible, digits alone, the same after a round trip, and the loss mask where the answer is."""

import numpy as np
import pytest

from dlm_jax.data import tokenizer as tok
from dlm_jax.data import word_problems
from dlm_jax.data.sources import parse_row


@pytest.fixture(scope="module")
def rows():
    return [parse_row(row) for row in word_problems.generate(300, seed=0)]


@pytest.fixture(scope="module")
def tokenizer(rows):
    return tok.train(tok.texts_of(rows), 400)


def test_special_ids_are_fixed(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(tok.SPECIAL)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 3)
    assert 260 <= len(tokenizer) <= 400


@pytest.mark.parametrize("text", ["Mia has 12+7=19 apples.\n#### 19", "  naïve ☃ 中文\r\n\ttabs ", "a.\n\n b"])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_digits_are_single_tokens(tokenizer):
    pieces = [tokenizer.decode([i]) for i in tokenizer("has 1234 cups", add_special_tokens=False)["input_ids"]]
    assert [p.strip() for p in pieces if p.strip().isdigit()] == ["1", "2", "3", "4"]


def test_save_and_load_give_the_same_tokenizer(tokenizer, rows, tmp_path):
    tok.save(tokenizer, tmp_path)
    again = tok.load(tmp_path)
    assert again.chat_template == tokenizer.chat_template and len(again) == len(tokenizer)
    assert (again.pad_token_id, again.eos_token_id, again.mask_token_id) == (0, 1, 3)
    assert tok.encode_rows(again, rows[:20]) == tok.encode_rows(tokenizer, rows[:20])


def test_the_mask_covers_the_answer_and_its_end_only(tokenizer, rows):
    for row in rows[:20]:
        example = tok.encode_row(tokenizer, row, 160)
        supervised = example["tokens"][example["loss_mask"]]
        assert supervised[-1] == 1 and tokenizer.decode(supervised[:-1]) == row.response
        start, end = int(example["prompt_length"]), int(example["length"])
        assert np.flatnonzero(example["loss_mask"]).tolist() == list(range(start, end))
        assert example["tokens"][:start].tolist() == tok.encode_prompt(tokenizer, row.prompt_messages)
        assert (example["tokens"][end:] == 0).all() and not example["truncated"] and not example["empty"]


def test_training_and_decoding_read_the_same_conversation(tokenizer, rows):
    # what the template writes around a whole conversation is what prompt + response + end spell out
    row = rows[0]
    messages = [*row.prompt_messages, {"role": "assistant", "content": row.response}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt, response = tok.encode_rows(tokenizer, [row])[0]
    assert tokenizer.decode(prompt + response) + "\n" == whole


@pytest.mark.parametrize("room", [-3, 0, 1, 5])
def test_a_row_too_long_loses_the_end_of_its_answer(tokenizer, rows, room):
    prompt, response = tok.encode_rows(tokenizer, rows[:1])[0]
    example = tok.encode_row(tokenizer, rows[0], len(prompt) + room)
    assert example["tokens"].tolist() == (prompt + response)[: len(prompt) + room]
    assert example["loss_mask"].sum() == max(room, 0)
    assert example["truncated"] and example["empty"] == (room <= 0)
    assert example["prompt_length"] <= example["length"] == len(prompt) + room


def test_bad_requests_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="vocab_size = 100"):
        tok.train(["a"], 100)
    with pytest.raises(ValueError, match="no such directory"):
        tok.load(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read"):
        tok.load(tmp_path)
    bare = tok.train(["a"], 260)
    bare.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        tok.encode_prompt(bare, [{"role": "user", "content": "a"}])
    bare.eos_token = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        tok.encode_row(bare, parse_row({"query": "a", "response": "b"}), 10)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text_and_keep_characters_whole(tokenizer, seed):
    tokens = np.random.default_rng(seed).integers(0, len(tokenizer), 40).tolist()  # most bytes are no characters
    for skip in (False, True):
        pieces = tok.pieces(tokenizer, tokens, skip_special_tokens=skip)
        assert len(pieces) == 40 and "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip)
    text = "snow ☃, naïve 🙂🙂 東京."
    pieces = tok.pieces(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "".join(pieces) == text and "" in pieces and not any("\ufffd" in piece for piece in pieces)
