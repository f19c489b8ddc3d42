"""Maps between tokenizers: bytes and names decide, roles fill in, nothing else is mapped, and it survives a file."""

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlm_jax.data import tokenizer as tok
from dlm_jax.data import vocabulary_map, word_problems
from dlm_jax.data.sources import parse_row

UNMAPPED = vocabulary_map.UNMAPPED


@pytest.fixture(scope="module")
def texts():
    return list(tok.texts_of([parse_row(row) for row in word_problems.generate(300, seed=0)]))


@pytest.fixture(scope="module")
def draft(texts):
    return tok.train(texts, 400)


@pytest.fixture(scope="module")
def guide(texts):
    return tok.train(texts[::3], 330)


def sentencepiece(pieces, **roles):
    """A tokenizer that spells spaces and bytes as sentencepiece does."""
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁")
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", **roles)


def test_the_same_vocabulary_gives_the_identity(draft):
    mapping = vocabulary_map.build(draft, draft, draft_size=512, guide_size=448)
    size = len(draft)
    for ids, padded in ((mapping.to_guide, 512), (mapping.to_draft, 448)):
        assert len(ids) == padded
        np.testing.assert_array_equal(ids[:size], np.arange(size))
        assert (ids[size:] == UNMAPPED).all()
    assert mapping.coverage() == 1.0
    np.testing.assert_array_equal(vocabulary_map.identity(size).to_guide, mapping.to_guide[:size])


def test_tokens_are_mapped_where_their_text_is_the_same_and_only_there(draft, guide):
    mapping = vocabulary_map.build(draft, guide)
    text = lambda tokenizer, id: tokenizer.convert_ids_to_tokens(int(id))  # both spell bytes alike
    theirs = set(guide.get_vocab())
    for id in range(len(draft)):
        other = mapping.to_guide[id]
        assert (other != UNMAPPED) == (text(draft, id) in theirs)
        assert other == UNMAPPED or text(draft, id) == text(guide, other)
    known = mapping.to_guide != UNMAPPED
    np.testing.assert_array_equal(mapping.to_draft[mapping.to_guide[known]], np.flatnonzero(known))
    assert mapping.coverage() == pytest.approx(known.sum() / len(draft)) and 0.5 < mapping.coverage() < 1
    unknown = np.flatnonzero(~known)
    assert mapping.coverage([0, unknown[0], 1, 2]) == 0.75
    assert (mapping.feed[unknown] == guide.pad_token_id).all()
    assert (mapping.feed[known] == mapping.to_guide[known]).all()


def test_byte_level_and_sentencepiece_spellings_meet(draft):
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "1", "▁the", "é", "#", "nonsense▁piece"]
    other = sentencepiece(pieces, bos_token="<s>", eos_token="</s>")
    mapping = vocabulary_map.build(draft, other)
    ours = lambda text: draft(text, add_special_tokens=False)["input_ids"]
    assert mapping.to_guide[ours("\n")] == pieces.index("<0x0A>")
    assert mapping.to_guide[ours(" ")] == pieces.index("▁")
    assert mapping.to_guide[ours("1")] == pieces.index("1") and mapping.to_guide[ours("#")] == pieces.index("#")
    assert mapping.to_draft[pieces.index("nonsense▁piece")] == UNMAPPED
    assert mapping.to_draft[pieces.index("é")] == UNMAPPED  # two byte tokens over there: no id stands for it
    assert mapping.placeholder == 0


def test_special_tokens_without_a_namesake_are_paired_by_role(draft):
    other = sentencepiece(["<unk>", "<s>", "</s>", "<pad>", "a"], bos_token="<s>", eos_token="</s>")
    mapping = vocabulary_map.build(draft, other)
    assert mapping.to_guide[draft.eos_token_id] == 2 and mapping.to_draft[2] == draft.eos_token_id
    assert mapping.to_guide[draft.mask_token_id] == UNMAPPED  # a guide without a mask token
    assert mapping.to_guide[draft.pad_token_id] == UNMAPPED  # "<pad>" has no role in the other tokenizer
    start = draft.convert_tokens_to_ids(tok.START)
    assert mapping.to_guide[start] == UNMAPPED
    also = vocabulary_map.build(draft, other, also={tok.START: "<s>", tok.PAD: "<pad>"})
    assert also.to_guide[start] == 1 and also.to_draft[1] == start and also.to_guide[draft.pad_token_id] == 3


def test_where_one_token_begins_and_ends_text_it_is_paired_with_the_end():
    pieces = ["<unk>", *"ab"]
    two = sentencepiece([*pieces, "<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    one = sentencepiece([*pieces, "<|end|>"], bos_token="<|end|>", eos_token="<|end|>")
    mapping = vocabulary_map.build(two, one)
    assert mapping.to_draft[one.eos_token_id] == two.eos_token_id
    assert mapping.to_guide[two.eos_token_id] == one.eos_token_id
    back = vocabulary_map.build(one, two)
    assert back.to_guide[one.eos_token_id] == two.eos_token_id and back.to_draft[two.eos_token_id] == one.eos_token_id


def test_a_special_token_is_not_the_text_that_looks_like_it(draft):
    other = sentencepiece(["<unk>", "<s>", "</s>", tok.START, "a"], eos_token="</s>")
    mapping = vocabulary_map.build(draft, other)
    assert mapping.to_guide[draft.convert_tokens_to_ids(tok.START)] == UNMAPPED
    assert mapping.to_draft[3] == UNMAPPED


def test_of_several_tokens_of_the_same_bytes_the_lowest_is_taken():
    into = np.full(3, vocabulary_map.UNMAPPED)
    vocabulary_map._join(into, {0: b"a", 1: b"b", 2: b"a"}, {7: b"a", 4: b"a", 9: b"c"})
    assert into.tolist() == [4, vocabulary_map.UNMAPPED, 4]


def test_a_map_survives_a_file(draft, guide, tmp_path):
    mapping = vocabulary_map.build(draft, guide, draft_size=512)
    vocabulary_map.save(mapping, tmp_path / "map.safetensors")
    again = vocabulary_map.load(tmp_path / "map.safetensors")
    np.testing.assert_array_equal(again.to_guide, mapping.to_guide)
    np.testing.assert_array_equal(again.to_draft, mapping.to_draft)
    assert again.placeholder == mapping.placeholder and again.coverage() == mapping.coverage() > 0


def test_bad_input_is_named(draft, guide, tmp_path):
    with pytest.raises(ValueError, match="draft_size = 10"):
        vocabulary_map.build(draft, guide, draft_size=10)
    with pytest.raises(ValueError, match="guide tokenizer has no token 'nothing'"):
        vocabulary_map.build(draft, guide, also={tok.START: "nothing"})
    with pytest.raises(ValueError, match="no such file"):
        vocabulary_map.load(tmp_path / "absent.safetensors")
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds something else"):
        vocabulary_map.load(tmp_path / "other.safetensors")
    vocabulary_map.save(vocabulary_map.identity(4), tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-3])
    with pytest.raises(ValueError, match="damaged"):
        vocabulary_map.load(tmp_path / "cut.safetensors")
    with pytest.raises(ValueError, match=r"tokens: .* each in \[0, 4\)"):
        vocabulary_map.identity(4).coverage([4])
    ids = np.arange(4, dtype=np.int32)
    with pytest.raises(ValueError, match="to_guide holds id 3, the other vocabulary has 3 ids"):
        vocabulary_map.VocabularyMap(ids, ids[:3], 0, 4, 3)
    with pytest.raises(ValueError, match="placeholder = 9"):
        vocabulary_map.VocabularyMap(ids, ids, 9, 4, 4)
