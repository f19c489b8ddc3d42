"""The decode launcher: answers, streams, and refuses bad input with exit status 2."""

import dataclasses
import io
import json
import re

import jax
import numpy as np
import pytest
from rich.console import Console

import dlm_jax
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.decode import Autoregressive, Event, ReFusion, api
from dlm_jax.evals.screen import Screen
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from launch import decode, decoders

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
    messages = [{"role": "user", "content": "Tom?"}]
    rows = [{"question": "How many apples?"}, {"messages": messages}, {"prompt": "Tom has"}]
    source, target = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert decode.main(["--model", str(folder), "--decoder", "refusion", "--set", "slot_size=4", "--set",
                        "block_length=8", "--prompts", str(source), "--max-new-tokens", "8", "--batch-size", "2",
                        "--output", str(target)]) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [a["prompt"] for a in answers] == ["How many apples?", "Tom?", "Tom has"]
    assert all(0 < a["tokens"] <= 8 and a["forwards"] > 0 for a in answers)


def _stdin(text):
    return io.TextIOWrapper(io.BytesIO(text.encode()))


@pytest.mark.parametrize("settings", [[], ["--set", "temperature=0.9"]])
def test_standard_input_streaming_and_batch_agree(folder, capsys, monkeypatch, settings):
    arguments = ["--model", str(folder), "--max-new-tokens", "6", *settings]
    asked = "Tom has 3 apples\n\nTom has 3 apples\u2028or 4\r\nHow many?\n"
    monkeypatch.setattr("sys.stdin", _stdin(asked))
    assert decode.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [row["prompt"] for row in rows] == ["Tom has 3 apples", "Tom has 3 apples\u2028or 4", "How many?"]
    monkeypatch.setattr("sys.stdin", _stdin(asked))
    assert decode.main([*arguments, "--stream"]) == 0
    assert capsys.readouterr().out == "".join(row["answer"] + "\n" for row in rows)


@pytest.mark.parametrize("decoder", [
    "autoregressive", "refusion", "refusion:reference_compat=true"])
def test_the_screen_ends_in_the_answer(folder, decoder):
    name, _, setting = decoder.partition(":")
    settings = ["slot_size=4", "block_length=8", "slot_threshold=0.02", setting] if name == "refusion" else []
    decoder = decoders.make(name, [*filter(None, settings), "temperature=1"]).decoder
    model, params = dlm_jax.load(folder)
    tokenizer = tokenizers.load(folder)
    ended = 0
    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(4, len(tokenizer), 3 + seed % 3).tolist()
        options = dict(max_new_tokens=13, mask_id=tokenizer.mask_token_id, seed=seed)
        free = api.generate(model, params, [prompt], decoder, eos_id=-1, **options).tokens[0]
        eos = int(free[seed % len(free)])  # a token that is likely to come, so that answers do end
        answer = api.generate(model, params, [prompt], decoder, eos_id=eos, **options).tokens[0]
        ended += len(answer) < 13
        screen = Screen(tokenizer, Console(file=io.StringIO()), eos_id=eos, limit=13)
        for event in api.stream(model, params, prompt, decoder, eos_id=eos, **options):
            screen.apply(event)
            screen.spans()
        screen.finish()
        assert _shown(screen) == tokenizer.decode(answer, skip_special_tokens=True)
    assert ended


def _shown(screen):
    return "".join(text for text, _ in screen.spans())


def _event(committed, places, tokens):
    return Event(1, "verify", 0, places, tokens, committed, ["drafted"] * len(places))


def test_the_screen_ends_where_the_answer_does_and_joins_bytes(folder):
    tokenizer = tokenizers.load(folder)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    snow, eos = ids("☃"), tokenizer.eos_token_id
    assert len(snow) == 3
    screen = Screen(tokenizer, Console(file=io.StringIO()), eos_id=eos, limit=8)
    screen.apply(_event(True, [0, 1, 2, 6, 7, 8, 9], [*snow, *ids("3+44")]))
    assert _shown(screen) == "☃ … 3+"  # nothing at or beyond the limit
    screen.apply(_event(False, [3, 4], [*ids("a"), eos]))
    assert _shown(screen) == "☃a<|im_end|> … 3+"  # a draft ends nothing
    screen.apply(_event(True, [4], [eos]))
    assert _shown(screen) == "☃ … "
    screen.finish()
    assert _shown(screen) == "☃"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_sees_the_drafts_and_a_file_the_answer_alone(folder, terminal):
    tokenizer = tokenizers.load(folder)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    target, tokens = io.StringIO(), [*ids("☃\r"), *ids("1" * 200)]
    events = [_event(False, [0], ids("7")), _event(True, list(range(len(tokens))), tokens)]
    screen = Screen(tokenizer, Console(file=target, force_terminal=terminal), eos_id=1, limit=999)
    assert screen.show(events) == 1
    if terminal:
        assert "☃" in target.getvalue() and "\x1b[" in target.getvalue()
    else:
        assert target.getvalue() == "☃\r" + "1" * 200 + "\n"


def test_a_guide_of_its_own_tokenizer_judges_the_drafts(folder, tmp_path, capsys, caplog):
    model, params = dlm_jax.load(folder)
    tokenizer = tokenizers.load(folder)
    drafter = build.build(model.config.replace(family="a2d-qwen3"))
    dlm_jax.save(tmp_path / "drafter", drafter, params, tokenizer_from=tokenizer)
    other = tokenizers.train([text.replace("apples", "pears") for text in TEXTS], 290)
    config = model.config.replace(vocab_size=len(other), eos_token_id=other.eos_token_id)
    guide = build.build(config)
    dlm_jax.save(tmp_path / "guide", guide, build.init_params(guide, jax.random.key(1)), tokenizer_from=other)
    assert decode.main(["--model", str(tmp_path / "drafter"), "--decoder", "guided", "--guide", str(tmp_path / "guide"),
                        "--set", "cache=NoCache()", "--prompt", "Tom?", "--max-new-tokens", "6"]) == 0
    answer, = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert 0 < answer["tokens"] <= 6 and 0 < answer["forwards"] <= answer["tokens"]
    assert re.search(r"the guide knows \d+\.\d% of the drafter's tokens", caplog.text)


def test_list_and_help_teach(capsys):
    assert decode.main(["--list"]) == 0
    said = capsys.readouterr().out
    for words in ("slot_threshold = 0.6", "Threshold(threshold)", "Free(refresh_every, block_length)",
                  "refusion:gsm8k: ReFusion, Table 7"):
        assert words in said
    with pytest.raises(SystemExit) as end:
        decode.main(["--help"])
    assert end.value.code == 0 and "--preset gsm8k" in capsys.readouterr().out


def test_a_preset_is_the_papers_table():
    found = decoders.make("refusion", ["temperature=0.5"], "gsm8k")
    assert (found.decoder.slot_size, found.decoder.block_length, found.decoder.slot_threshold) == (16, 64, 0.7)
    assert (found.max_new_tokens, found.decoder.sampler.temperature, found.source) == (512, 0.5, "ReFusion, Table 7")
    assert decoders.make("refusion", ["temperature=0.5"], "refusion:gsm8k") == found
    assert decoders.make(None, ["temperature=0.5"], "refusion:gsm8k") == found
    settings = ["token_threshold=0.3", "token_threshold=None"]
    assert decoders.make("refusion", settings).decoder.token_threshold is None


def test_special_ids_may_be_given(folder, capsys):
    arguments = ["--model", str(folder), "--prompt", "Tom", "--max-new-tokens", "6"]
    answers = []
    for more in (["--eos-id", "-1"], ["--eos-id", "-1", "--decoder", "refusion", "--mask-id", "9"]):
        assert decode.main([*arguments, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["tokens"] == 6
    assert decode.main([*arguments, "--decoder", "refusion", "--mask-id", "9999"]) == 2
    assert "mask_id = 9999" in capsys.readouterr().err


def test_the_preset_names_the_decoder_and_settings_come_last():
    assert decoders.make(None).decoder == Autoregressive() == decoders.make("autoregressive").decoder
    found = decoders.make(None, ["slot_size=8"], "gpqa")
    assert (type(found.decoder), found.decoder.slot_size, found.max_new_tokens) == (ReFusion, 8, 128)
    for name, preset, message in (
            ("orthrus", "gsm8k", "'gsm8k' is not known.*accepted with decoder 'orthrus'.*'orthrus:greedy'"),
            (None, "released", "stands in several files: say which, of .*dream:released, llada:released"),
            (None, "gsm8", "did you mean 'gsm8k'"), ("refusoin", None, "did you mean 'refusion'")):
        with pytest.raises(ValueError, match=message):
            decoders.make(name, [], preset)


def test_options_decide_over_the_preset():
    options = lambda *more: decode.parser().parse_args(["--preset", "refusion:gpqa", *more])
    assert decoders.chosen(options())[1].max_new_tokens == 128
    assert decoders.chosen(options("--max-new-tokens", "7"))[1].max_new_tokens == 7
    assert decoders.chosen(options())[0] == "refusion"


def test_arguments_of_the_chat_template(folder, tmp_path, capsys):
    model, params = dlm_jax.load(folder)
    tokenizer = tokenizers.load(folder)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}No thoughts.{% endif %}"
    dlm_jax.save(tmp_path / "model", model, params, tokenizer_from=tokenizer)
    asked = [{"role": "user", "content": "Tom"}]
    options = lambda *chat: decode.parser().parse_args([word for each in chat for word in ("--chat", each)])
    arguments = decoders.chat(options("enable_thinking=false"), tokenizer)
    assert arguments == {"enable_thinking": False}
    subject = decoders.Subject(model, params, tokenizer, None, arguments)
    ids, plain = subject.encode(asked), dataclasses.replace(subject, chat={}).encode(asked)
    assert tokenizer.decode(ids[len(plain):]) == "No thoughts." and ids[:len(plain)] == plain
    assert subject.encode(asked, raw=True) == tokenizer("Tom")["input_ids"]
    command = ["--model", str(tmp_path / "model"), "--prompt", "Tom", "--max-new-tokens", "6", "--eos-id", "-1"]
    assert decode.main([*command, "--chat", "enable_thinking=false"]) == 0
    made = dlm_jax.generate(model, params, [ids], Autoregressive(), max_new_tokens=6, eos_id=-1)
    answer = json.loads(capsys.readouterr().out)["answer"]
    assert answer == tokenizer.decode(made.tokens[0], skip_special_tokens=True)
    for chat, message in (("enable_thinking", "expected NAME=VALUE"), ("thinking_budget=3", "never reads"),
                          ("=3", "expected NAME=VALUE")):
        assert decode.main([*command, "--chat", chat]) == 2
        assert f"--chat {chat}: " in (said := capsys.readouterr().err) and message in said


def test_sampling_follows_the_seed(folder, capsys):
    answers = []
    for seed in ("3", "3", "4"):
        assert decode.main(["--model", str(folder), "--prompt", "Tom", "--max-new-tokens", "12", "--eos-id", "-1",
                            "--set", "temperature=1", "--seed", seed]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_eight_devices_answer_as_one(folder, tmp_path, capsys):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, there are {jax.device_count()}")
    model, _ = dlm_jax.load(folder)
    wide = build.build(model.config.replace(vocab_size=304, num_kv_heads=2))  # which two devices divide
    dlm_jax.save(tmp_path / "wide", wide, build.init_params(wide, jax.random.key(0)), tokenizer_from=folder)
    source = tmp_path / "prompts.txt"
    source.write_text("Tom has 3\nHow many?\napples\n")  # three rows, which no mesh divides
    command = ["--model", str(tmp_path / "wide"), "--prompts", str(source), "--max-new-tokens", "6"]
    said = []
    for mesh in ([], ["--mesh", "data=4,tensor=2"], ["--mesh", "fsdp=4, tensor=2"]):
        assert decode.main([*command, *mesh]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].count("\n") == 3 and said[0] == said[1] == said[2]
    subject = decoders.load(decode.parser().parse_args([*command, "--mesh", "data=4,tensor=2"]))
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(subject.params))
    for mesh, message in (("data=3", "there are 8"), ("rows=8", "--mesh rows: no such field"),
                          ("data", "--mesh data: expected FIELD=VALUE with one of data, fsdp, tensor"),
                          ("data=two", "expected an integer"), ("tensor=8", "kv_heads = 2 cannot be split")):
        assert decode.main([*command, "--mesh", mesh]) == 2
        assert message in capsys.readouterr().err


def test_prompts_are_read_as_training_rows_are(folder, tmp_path, capsys):
    asked = [{"question": "a\u2028b"}, {"messages": [{"role": "user", "content": "☃"},
                                                     {"role": "assistant", "content": "x"}]}]
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) for row in asked), encoding="utf-8")
    whole.write_text(json.dumps(asked, indent=1))
    for path in (lines, whole):
        options = decode.parser().parse_args(["--prompts", str(path)])
        assert decode.read_prompts(options, None) == [
            [{"role": "user", "content": "a\u2028b"}], [{"role": "user", "content": "☃"}]]


def test_an_output_that_cannot_be_written_is_refused_before_decoding(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dlm_jax, "generate", None)
    arguments = ["--model", str(folder), "--prompt", "Tom", "--output"]
    for path in (tmp_path, tmp_path / "none" / "answers.jsonl"):
        assert decode.main([*arguments, str(path)]) == 2
        assert f"--output {path}: cannot be written" in capsys.readouterr().err
    kept = tmp_path / "answers.jsonl"
    kept.write_text("earlier answers\n")
    assert decode.main(["--model", "nowhere/at all", *arguments[2:], str(kept)]) == 2
    assert kept.read_text() == "earlier answers\n"


@pytest.mark.parametrize("arguments, message", [
    ([], "--model is missing"),
    (["--model", "nowhere/at all"], "nowhere"),
    (["--model", "FOLDER", "--decoder", "magic"], "accepted: ['ar_trust', 'asynclane', "),
    (["--model", "FOLDER", "--decoder", "guided"], "needs --guide PATH"),
    (["--model", "FOLDER", "--guide", "FOLDER"], "takes no guide"),
    (["--model", "FOLDER", "--decoder", "guided", "--guide", "FOLDER"], "is it the guide?"),
    (["--model", "FOLDER", "--set", "slots=3"], "--set slots: no such field; accepted: sampler, sampler.temperature, "),
    (["--model", "FOLDER", "--set", "top_k=many"], "expected an integer, as in sampler.top_k=0"),
    (["--model", "FOLDER", "--decoder", "refusion", "--set", "slot_size=5"], "not a multiple of slot_size"),
    (["--model", "FOLDER", "--decoder", "refusion", "--preset", "chess"], "humaneval"),
    (["--model", "FOLDER", "--prompt", "a", "--prompts", "b"], "exclude each other"),
    (["--model", "FOLDER", "--prompts", "missing.txt"], "no such file"),
    (["--model", "FOLDER", "--prompts", "EMPTY"], "holds no prompts"),
    (["--model", "FOLDER", "--prompt", " "], "--prompt is empty"),
    (["--model", "FOLDER", "--max-new-tokens", "0"], "--max-new-tokens 0: at least 1"),
    (["--model", "FOLDER", "--batch-size", "0"], "--batch-size 0: at least 1"),
    (["--model", "FOLDER", "--stream", "--output", "x"], "give one"),
    (["--model", "FOLDER", "--decoder", "refusion", "--set", "token_threshold=high"], "expected a number or none"),
    (["--model", "FOLDER", "--prompt", "Tom", "--max-new-tokens", "9999"], "max_position_embeddings"),
])
def test_bad_input_exits_with_2(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "empty.txt").write_text("\n")
    places = {"FOLDER": str(folder), "EMPTY": str(tmp_path / "empty.txt")}
    arguments = [places.get(a, a) for a in arguments]
    if "--prompts" not in arguments and "--prompt" not in arguments:
        arguments += ["--prompt", "Tom"]
    assert decode.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line, message", [
    (b'{"answer": "b"}', "expected a JSON object with"),
    (b"{", "not JSON"),
    (b'{"prompt": 3}', '"prompt" is int, expected text'),
    (b'{"question": ""}', '"question" is empty'),
    (b'{"messages": []}', "asks nothing"),
    (b'{"messages": [{"role": "assistant", "content": "b"}]}', "asks nothing"),
    (b'{"messages": ["Tom"]}', "message 0 has the role None"),
    (b'{"messages": [{"role": "user"}]}', '"content" of message 0 is NoneType'),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": "\xe9"}', "not UTF-8"),
])
def test_bad_rows_are_named_by_file_and_line(folder, tmp_path, capsys, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    assert decode.main(["--model", str(folder), "--prompts", str(path)]) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl:2: " in error and message in error
