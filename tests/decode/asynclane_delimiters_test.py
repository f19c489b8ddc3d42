"""Boundaries that are built from tokenizers: what tokens say by themselves, and what the tables make of whole texts."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dlm_jax.decode.asynclane import boundary as boundaries
from dlm_jax.decode.asynclane import code_boundary, math_boundary, punctuation_boundary
from dlm_jax.decode.request import make
from tests.decode import asynclane_parts_test as parts

MATH = {  # token -> "end", "number" where it may belong to one, or "" for no delimiter
    ".": "number", " .": "number", "。": "end", ".\n": "end", ".\n\n": "end", '."': "end", ".'": "end",
    ".”": "end", "。”": "end", "。」": "end", ".)": "end", " foo.": "end", "%.": "end", ").": "end", "...": "end",
    "2).": "end", "3.": "", "3.5": "", "x3.": "", "3.\n": "end", "3.)": "end", "。因": "", ".com": "", ". The": "",
    '. "': "", ",": "", "”": "", "": ""}
PUNCTUATION = {**MATH, ",": "number", ",\n": "end", "7,": "", "7,\n": "end", "；": "end", "：": "end", "!”": "end",
               "！」": "end", "?)": "end", "7:": "end", ',"': "end", "7。": "end"}
CODE = {  # token -> whether it is a delimiter, brackets it leaves open and closes, quotes, whether it leaves off
    "\n": (1, 0, 0, 0, 0), "\n\n    ": (1, 0, 0, 0, 0), " \t\r\n": (1, 0, 0, 0, 0), ");\n": (1, 0, 1, 0, 0),
    "():\n": (1, 0, 0, 0, 0), ")]\n": (1, 0, 2, 0, 0), "(\n": (1, 1, 0, 0, 0), ")(": (0, 1, 1, 0, 0),
    "],[": (0, 1, 1, 0, 0), "([)": (0, 1, 0, 0, 0), '"\n': (1, 0, 0, 1, 0), '"")\n': (1, 0, 1, 0, 0),
    '"""': (0, 0, 0, 1, 0),
    "'''": (0, 0, 0, 1, 0), "'": (0, 0, 0, 0, 0), '\\"': (0, 0, 0, 0, 0), '("': (0, 1, 0, 1, 0),
    ",\n": (0, 0, 0, 0, 1), " =\n": (0, 0, 0, 0, 1), " \\\n": (0, 0, 0, 0, 1), "),\n": (0, 0, 1, 0, 1),
    " and\n": (0, 0, 0, 0, 1), "band\n": (1, 0, 0, 0, 0), "\nreturn": (0, 0, 0, 0, 0), "\n#": (0, 0, 0, 0, 0),
    ",": (0, 0, 0, 0, 1), "x not": (0, 0, 0, 0, 1), "main": (0, 0, 0, 0, 0), "  ": (0, 0, 0, 0, 1)}


@pytest.mark.parametrize("rule, tokens", [(math_boundary, MATH), (punctuation_boundary, PUNCTUATION)])
def test_what_ends_a_sentence(rule, tokens):
    texts = list(tokens)
    found = rule(parts.Tokenizer(["<pad>", *texts]))
    kinds = dict.fromkeys(texts, "") | {texts[i - 1]: "end" for i in found.delimiters}
    kinds |= {texts[i - 1]: "number" for i in found.numeric_delimiters}
    assert kinds == tokens
    assert set(found.numeric_delimiters) <= set(found.delimiters)


def test_what_ends_a_statement():
    texts = list(CODE)
    found = code_boundary(parts.Tokenizer(["<pad>", *texts]))
    for i, text in enumerate(texts, 1):
        assert (i in found.delimiters, found.open.count(i), found.close.count(i), i in found.quote,
                i in found.no_fork_after) == CODE[text], text


# --- whole texts, as a byte-level tokenizer cuts them

PROSE = [
    "The shop sold 3.5 kg, then 1,200 more. He said: “No.” (They left.)\n", "A total of 72. So 7 + 5 = 12; 50%.\n\n",
    "他说：“走吧。”然后他走了。一共3.5元，还有7个。\n", 'Is it 9? "Yes." It costs 12,000... or 4.', "See v2.0.1, fig. 3.\n"]
LINES = [
    "def f(a, b=[1, 2]):\n", "    x = (a +\n         b)\n", '    print("a, (b")\n',
    "    return {\n        'k': a,\n    }\n",
    '    """A (doc)\n    string,\n    """\n', "    y = a \\\n        + b\n", "    if a and \\\n            not b:\n",
    "    z = f(a)[0]; w = ()\n\n", "    '''one\n    two'''\n", "    t = 1,\n", "    s = \"say \\\" (\"\n", "\n",
    "    u = 1 \n"]


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer that joins punctuation with what stands around it, as those of Qwen and LLaDA do."""
    made = Tokenizer(models.BPE())
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}[.,]?| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([*PROSE, *LINES] * 4, trainers.BpeTrainer(
        vocab_size=900, min_frequency=2, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def cut(tokenizer, rng, sentences):
    """Returns ids of a random text, some tokens without quotes cut into smaller ones, and the text of each."""
    text = "".join(rng.choice(sentences, 12))
    ids = []
    for token in tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)):
        at = int(rng.integers(len(token) + 1)) if rng.integers(3) == 0 and not set(token) & set("\\\"'") else 0
        halves = [tokenizer.get_vocab().get(part) for part in (token[:at], token[at:]) if part]
        ids += halves if None not in halves else tokenizer.convert_tokens_to_ids([token])
    return ids, [tokenizer.decode([i]) for i in ids]


def allowed(rule, size, ids):
    """(T,) bool: the tokens behind which the tables allow a split, where all is known and nothing stands before."""
    request = make([[]], max_new_tokens=256, capacity=256)
    padded = jnp.zeros((1, 256), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
    flags = boundaries.valid(boundaries.classes(rule, size), request, padded, jnp.arange(256)[None] < len(ids))
    return np.asarray(flags[0])[: len(ids)]


@pytest.mark.parametrize("rule, marks", [(math_boundary, ".。"), (punctuation_boundary, ".。,;:!?，；：！？、")])
def test_prose_is_split_where_its_letters_say(tokenizer, rule, marks):
    found, rng, seen = rule(tokenizer), np.random.default_rng(0), set()
    for _ in range(40):
        ids, pieces = cut(tokenizer, rng, PROSE)
        ids, pieces = ids[:256], pieces[:256]
        for k, flag in enumerate(allowed(found, len(tokenizer), ids)):
            text = "".join(pieces[: k + 1])
            end = re.search(rf"[{marks}][\"'”’)」]*\s*\Z", text)
            held = bool(end) and end.start() >= len(text) - len(pieces[k])  # the token holds the mark
            assert flag == (held and not re.search(r"\d[.,]\Z", text)), pieces[max(0, k - 3) : k + 2]
            seen |= {pieces[k]} if flag else set()
    assert {".", "。"} <= {piece.strip() for piece in seen} and any(len(piece.strip()) > 1 for piece in seen)


def test_code_is_split_where_its_letters_say(tokenizer):
    found, rng, forks = code_boundary(tokenizer), np.random.default_rng(1), 0
    for _ in range(40):
        ids, pieces = cut(tokenizer, rng, LINES)
        ids, pieces = ids[:256], pieces[:256]
        for k, flag in enumerate(allowed(found, len(tokenizer), ids)):
            text = "".join(pieces[: k + 1])
            closed = depth(text) == 0 and len(re.findall(r"(?<!\\)\"|'''", text)) % 2 == 0
            line, newline, indent = text.rpartition("\n")
            ends = bool(newline) and not indent.strip() and "\n" in pieces[k]
            goes_on = re.search(r"([,\\=+\-*/%]|\b(and|or|not|in))[^\S\n]*\Z", line)
            assert not flag or (ends and closed and not goes_on), pieces[max(0, k - 4) : k + 2]
            # a delimiter is refused behind a token that leaves off even where it has text of its own before its end
            sure = k == 0 or ids[k - 1] not in found.no_fork_after
            own = not re.search(r"([,\\=+\-*/%]|\b(and|or|not|in))\s*\Z", pieces[k].rpartition("\n")[0])
            assert flag or not (ends and closed and sure and own), pieces[max(0, k - 4) : k + 2]
            forks += flag
    assert forks > 40


def depth(text):
    """Brackets that a text leaves open, letter by letter."""
    open_ = 0
    for letter in text:
        open_ = open_ + 1 if letter in "([{" else max(0, open_ - 1) if letter in ")]}" else open_
    return open_


def test_a_full_stop_of_several_tokens_is_not_seen(tokenizer):
    bytes_alone = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(
        {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])))
    bytes_alone.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.backend_tokenizer.decoder = decoders.ByteLevel()
    found = math_boundary(bytes_alone)
    assert [bytes_alone.decode([i]) for i in found.delimiters] == ["."]
    assert len(bytes_alone.encode("。")) == 3
    assert [tokenizer.decode([i]) for i in math_boundary(tokenizer).delimiters].count("。") == 1
