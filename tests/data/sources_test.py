"""Row readers: the three formats agree, and a bad row is named by file and line."""

import json

import pytest

from dlm_jax.data.sources import Row, final_answer, parse_row, read_rows


def test_the_three_formats_say_the_same():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four.\n#### 4"}]
    expected = Row([{"role": "user", "content": "2+2?"}], "Four.\n#### 4", "4")
    assert parse_row({"messages": messages}) == expected
    assert parse_row({"query": "2+2?", "response": "Four.\n#### 4"}) == expected
    assert parse_row({"question": "2+2?", "answer": "Four.\n#### 4", "id": 7}) == expected


def test_a_long_conversation_supervises_its_last_answer():
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = parse_row({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert [m["content"] for m in row.prompt_messages] == ["Be brief.", "a", "b", "c"]
    assert (row.response, row.answer) == ("d", None)


@pytest.mark.parametrize("text, answer", [
    ("x #### 1,234 \nrest", "1234"), ("#### 1\n#### -2", "-2"), ("no mark", None), ("####", None), ("#### \n", None)])
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def _rows(count):
    return [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(count)]


def test_jsonl_and_json_list_read_alike(tmp_path):
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\n\n".join(map(json.dumps, _rows(5))))
    whole.write_text(json.dumps(_rows(5), indent=2))
    assert read_rows(lines) == read_rows(whole) == [parse_row(row) for row in _rows(5)]


@pytest.mark.parametrize("bad, why", [
    ("{", "not JSON"), ("[1]", "a row is list"), ('"x"', "a row is str"), ("{}", "keys"),
    ('{"question": "", "answer": "x"}', '"question" is empty'),
    ('{"question": "x", "answer": 3}', '"answer" is int'),
    ('{"messages": []}', "holds 0 messages"),
    ('{"messages": [{"role": "robot", "content": "x"}, {"role": "user", "content": "x"}]}', "role 'robot'"),
    ('{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]}', "last message"),
    ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}', "message 0"),
])
def test_a_bad_line_is_named(tmp_path, bad, why):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(_rows(1)[0]), "", bad, json.dumps(_rows(1)[0])]))
    with pytest.raises(ValueError, match="rows.jsonl:3:") as error:
        read_rows(path)
    assert why in str(error.value)


def test_a_bad_item_of_a_list_is_named_by_its_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n{"question": "a", "answer": "b"},\n\n{"question": "a"}\n]')
    with pytest.raises(ValueError, match="rows.json:4:"):
        read_rows(path)
    path.write_text('[\n{"question": "a", "answer": "b"},\n{"question"]')
    with pytest.raises(ValueError, match="rows.json:3: not JSON"):
        read_rows(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="rows.jsonl:1: the file holds no rows"):
        read_rows(path)


def test_a_missing_file_and_other_encodings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(_rows(1)[0]).encode() + b"\n\xff\xfe")
    with pytest.raises(ValueError, match="rows.jsonl:2: not UTF-8"):
        read_rows(path)
