"""Result rows: recounted from the generation itself, independent of batching, and replays that end in the answer."""

import copy
import json

import jax
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.data import tokenizer as tok
from dlm_jax.data import word_problems
from dlm_jax.data.sources import parse_row
from dlm_jax.decode import api
from dlm_jax.evals import resume, runner, tasks
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig

ROWS = [parse_row(row) for row in word_problems.generate(4, seed=0, split="test")]
TOKENIZER = tok.train(tok.texts_of(ROWS), 300)
TASK = tasks.task_of("words", ROWS)
DECODERS = {
    "ar": decode.Autoregressive(),
    "refusion": decode.ReFusion(slot_size=4, block_length=8, slot_threshold=0.02, token_threshold=0.01),
}


@pytest.fixture(scope="module")
def model_and_params():
    config = TransformerConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16, tie_word_embeddings=True, initializer_range=0.3)
    model = build.build(config)
    return model, build.init_params(model, jax.random.key(0))


@pytest.mark.parametrize("name", DECODERS)
def test_a_result_row_recounts_the_generation(model_and_params, name):
    model, params = model_and_params
    decoder = DECODERS[name]
    told = []
    row, answers = runner.evaluate(
        name, decoder, model, params, TOKENIZER, TASK, max_new_tokens=16, batch_size=2, timed=3,
        progress=lambda *numbers: told.append(numbers))
    assert told == [(n, 4 + 3 * runner.PASSES) for n in (2, *range(4, 5 + 3 * runner.PASSES))]
    prompts = [tok.encode_prompt(TOKENIZER, r.prompt_messages) for r in ROWS]
    alone = [api.generate(model, params, [p], decoder, max_new_tokens=16, eos_id=1, mask_id=3) for p in prompts]
    assert [a.tokens for a in answers] == [len(out.tokens[0]) for out in alone]
    assert [a.text for a in answers] == [TOKENIZER.decode(out.tokens[0], skip_special_tokens=True) for out in alone]
    kinds = {kind: sum(int(out.ledger.forwards[kind].sum()) for out in alone) for kind in alone[0].ledger.forwards}
    assert row["forwards"] == {kind: count for kind, count in kinds.items() if count}
    steps = sum(count for kind, count in kinds.items() if kind not in ("prefill", "guide"))
    steps += sum(int(out.ledger.yielding.sum()) for out in alone)
    assert row["decoder"]["kind"] != "Autoregressive" or row["tokens_per_forward"] == 1.0
    assert row["tokens"] == sum(len(out.tokens[0]) for out in alone)
    assert row["tokens_per_forward"] == pytest.approx(row["tokens"] / steps)
    assert row["tokens_per_forward"] * row["forwards_per_token"] == pytest.approx(1)
    assert row["accuracy"] * len(ROWS) == row["correct"] == sum(a.right for a in answers)
    assert row["extracted"] == {by or "nothing": [a.by for a in answers].count(by) for by in {a.by for a in answers}}
    assert row["unfinished"] == sum(1 not in out.tokens[0] for out in alone)
    assert row["timed"] == 3 and row["seconds"]["single"]["decode"] > 0 < row["seconds"]["batched"]["decode"]
    batched = row["seconds"]["batched"]
    assert row["tokens_per_second_batched"] == pytest.approx(row["tokens"] / (batched["prefill"] + batched["decode"]))
    single = row["seconds"]["single"]
    assert row["seconds_per_answer"] == pytest.approx((single["prefill"] + single["decode"]) / 3)
    assert row["tokens_per_second"] == pytest.approx(
        sum(a.tokens for a in answers[:3]) / (single["prefill"] + single["decode"]))
    assert row["decoder"]["kind"] == type(decoder).__name__


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("ending", [False, True])
def test_a_replay_ends_in_the_answer(model_and_params, name, ending):
    model, params = model_and_params
    tokenizer = copy.deepcopy(TOKENIZER)
    prompt = tok.encode_prompt(tokenizer, ROWS[0].prompt_messages)
    generate = lambda eos: api.generate(
        model, params, [prompt], DECODERS[name], max_new_tokens=13, eos_id=eos, mask_id=3)
    if ending:  # a token that comes after some others takes the part of the end of sequence
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(generate(1).tokens[0][5]))
    eos = tokenizer.eos_token_id
    out = generate(eos)
    answer = out.tokens[0].tolist()
    assert (len(answer) < 13) == ending == (answer[-1] == eos)
    track = runner.replay(name, DECODERS[name], model, params, tokenizer, ROWS[0], max_new_tokens=13)
    commits = {position: (text, origin, frame["forward"])
               for frame in track["frames"] for position, text, origin in frame["commits"]}
    at = np.flatnonzero(out.committed_at[0] >= 0)[: len(answer)]
    assert sorted(commits) == at.tolist()
    shown = "".join(commits[position][0] for position in at).replace(runner.INCOMPLETE, "")
    assert shown == tokenizer.decode([token for token in answer if token != eos])
    for position, token in zip(at, answer):
        text, origin, forward = commits[position]
        assert (text == "") == (token == eos)
        assert origin == ("drafted", "autoregressive")[out.origin[0, position]]
        assert forward == out.committed_at[0, position]
    assert all(position <= at[-1] for frame in track["frames"] for position, _ in frame["drafts"])
    forwards = [frame["forward"] for frame in track["frames"]]
    assert forwards == sorted(set(forwards))
    assert any(frame["drafts"] for frame in track["frames"]) == (name == "refusion")


def test_a_decoder_is_described_in_plain_values_down_to_its_parts():
    made = decode.fast_dllm(threshold=0.8, temperature=0.5)
    told = runner.describe(made)
    assert json.loads(json.dumps(told)) == told and told["kind"] == "MaskedDiffusion"
    assert told["commit"] == {"kind": "Threshold", "threshold": 0.8} and told["sampler"]["temperature"] == 0.5


def test_a_replay_joins_the_bytes_of_a_character():
    ids = TOKENIZER("a☃", add_special_tokens=False)["input_ids"]
    assert runner._texts(TOKENIZER, [*ids, 1]) == ["a", "◌", "◌", "☃", ""]
    event = api.Event(1, "denoise", 0, [0, 1, 2, 3, 7], [*ids, ids[0]], False, ["drafted"] * 5)
    assert runner._draft_texts(TOKENIZER, event) == ["a", "◌", "◌", "☃", "a"]


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_as_if_nothing_had_happened(model_and_params, tmp_path, monkeypatch):
    model, params = model_and_params
    drawn = decode.Autoregressive(sampler=decode.Sampler(temperature=1.0))  # numbers of rows matter
    ask = dict(max_new_tokens=8, batch_size=2, timed=1, seed=3)
    asked = ("ar", drawn, model, params, TOKENIZER, TASK)
    whole, answers = runner.evaluate(*asked, **ask)

    def die(done, total):
        if done == 2:
            raise Killed

    keep = tmp_path / "batches", "model"
    with pytest.raises(Killed):
        runner.evaluate(*asked, **ask, keep=keep, progress=die)
    assert [path.name for path in keep[0].iterdir()] == ["00000000.npz"]
    (keep[0] / "00000002.part").write_bytes(b"half")  # a kill while writing
    run = []
    monkeypatch.setattr(resume, "_timed", lambda *asked, do=resume._timed: run.append(asked) or do(*asked))
    row, again = runner.evaluate(*asked, **ask, keep=keep)
    assert len(run) == 1 and again == answers
    for name in ("accuracy", "accuracy_interval", "forwards", "positions", "tokens", "tokens_per_forward"):
        assert row[name] == whole[name], name
    assert row["tokens_per_second_batched"] > 0
    with pytest.raises(ValueError, match="of another model, decoder, length, batch size, seed or other prompts"):
        runner.evaluate(*asked, **{**ask, "seed": 4}, keep=keep)
    with pytest.raises(ValueError, match="of another model"):
        runner.evaluate(*asked, **ask, keep=(keep[0], "another"))
