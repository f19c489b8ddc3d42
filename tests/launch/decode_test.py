"""The decode launcher: answers, streams, and refuses bad input with exit status 2."""

import io
import json

import jax
import pytest

import dlm_jax
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from launch import decode

TEXTS = ["Tom has 3 apples and buys 4 more.", "How many apples has Tom?", "Tom has 3 + 4 = 7 apples. #### 7"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = tokenizers.train(TEXTS, 300)
    config = TransformerConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16, initializer_range=0.2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=tokenizer.mask_token_id)
    model = build.build(config)
    path = tmp_path_factory.mktemp("model") / "tiny"
    dlm_jax.save(path, model, build.init_params(model, jax.random.key(0)), tokenizer_from=tokenizer)
    return path


def test_answers_a_file_of_rows_as_json_lines(folder, tmp_path):
    rows = [{"question": "How many apples?"}, {"messages": [{"role": "user", "content": "Tom?"}]}, {"prompt": "Tom has"}]
    source, target = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert decode.main(["--model", str(folder), "--decoder", "refusion", "--set", "slot_size=4", "--set",
                        "block_length=8", "--prompts", str(source), "--max-new-tokens", "8", "--batch-size", "2",
                        "--output", str(target)]) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [a["prompt"] for a in answers] == ["How many apples?", "Tom?", "Tom has"]
    assert all(0 < a["tokens"] <= 8 and a["forwards"] > 0 for a in answers)


def test_standard_input_streaming_and_batch_agree(folder, capsys, monkeypatch):
    arguments = ["--model", str(folder), "--max-new-tokens", "6"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom has 3 apples\n\n"))
    assert decode.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)["answer"]
    assert decode.main([*arguments, "--prompt", "Tom has 3 apples", "--stream"]) == 0
    assert answer.split()[0] in capsys.readouterr().out


def test_list_and_help_teach(capsys):
    assert decode.main(["--list"]) == 0
    assert "slot_threshold = 0.6" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        decode.main(["--help"])
    assert end.value.code == 0 and "--preset gsm8k" in capsys.readouterr().out


def test_a_preset_is_the_papers_table():
    decoder, length = decode.make_decoder("refusion", ["temperature=0.5"], "gsm8k")
    assert (decoder.slot_size, decoder.block_length, decoder.slot_threshold, length) == (16, 64, 0.7, 512)
    assert decoder.temperature == 0.5


@pytest.mark.parametrize("arguments, message", [
    ([], "--model is missing"),
    (["--model", "nowhere/at all"], "nowhere"),
    (["--model", "FOLDER", "--decoder", "magic"], "accepted: ['autoregressive', 'refusion']"),
    (["--model", "FOLDER", "--set", "slots=3"], "expected FIELD=VALUE with one of"),
    (["--model", "FOLDER", "--set", "top_k=many"], "expected a int"),
    (["--model", "FOLDER", "--decoder", "refusion", "--set", "slot_size=5"], "not a multiple of slot_size"),
    (["--model", "FOLDER", "--decoder", "refusion", "--preset", "chess"], "humaneval"),
    (["--model", "FOLDER", "--prompt", "a", "--prompts", "b"], "exclude each other"),
    (["--model", "FOLDER", "--prompts", "missing.txt"], "no such file"),
    (["--model", "FOLDER", "--prompts", "EMPTY"], "holds no prompts"),
    (["--model", "FOLDER", "--prompts", "BROKEN"], "broken.jsonl:2: expected a JSON object"),
    (["--model", "FOLDER", "--prompt", "Tom", "--max-new-tokens", "9999"], "max_position_embeddings"),
])
def test_bad_input_exits_with_2(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"answer": "b"}\n')
    places = {"FOLDER": str(folder), "EMPTY": str(tmp_path / "empty.txt"), "BROKEN": str(tmp_path / "broken.jsonl")}
    arguments = [places.get(a, a) for a in arguments]
    if "--prompts" not in arguments and "--prompt" not in arguments:
        arguments += ["--prompt", "Tom"]
    assert decode.main(arguments) == 2
    assert message in capsys.readouterr().err
