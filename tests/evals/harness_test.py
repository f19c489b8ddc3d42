"""lm_eval's tasks through the adapter: any batch size alike, and the numbers that we and its own models find."""

import dataclasses
import inspect
import json
import sys

import jax
import numpy as np
import pytest

import dlm_jax
from dlm_jax.data import sources, word_problems
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.decode import DECODERS
from dlm_jax.evals import causal_likelihood, likelihood
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install '.[eval]'")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from dlm_jax.evals import harness  # noqa: E402

RAW = list(word_problems.generate(5, seed=0, split="test"))
CHOICES = [{"question": row["question"], "choices": ["18", "7", "no", "3 apples"], "gold": n % 4}
           for n, row in enumerate(RAW)]
DECODED = {"autoregressive": {}, "refusion": {"slot_size": 4, "block_length": 8, "slot_threshold": 0.02}}
MASKED = {"decoder": "masked", "schedule": "Blocks(4)", "commit": "Threshold(0.05)"}


def checkpoint(folder, **changes):
    tokenizer = tokenizers.train(tokenizers.texts_of([sources.parse_row(row) for row in RAW]), 300)
    config = TransformerConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, initializer_range=0.3, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=tokenizer.mask_token_id, **changes)
    model = build.build(config)
    dlm_jax.save(folder, model, build.init_params(model, jax.random.key(0)), tokenizer_from=tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model") / "causal")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model") / "masked", family="llada")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Tasks as lm_eval's own YAML files describe them, over local files."""
    folder = tmp_path_factory.mktemp("tasks")

    def task(name, rows, **fields):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"task": name, "dataset_path": "json", "test_split": "test", "fewshot_split": "test", "dataset_kwargs": {
            "data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")}, **fields}

    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    return {
        "words": task("words", RAW, output_type="generate_until", doc_to_text="Q: {{question}}\nA:",
                      doc_to_target="{{answer}}", metric_list=[exact], num_fewshot=1,
                      generation_kwargs={"until": ["\n", "<|im_end|>"], "max_gen_toks": 12, "do_sample": False}),
        "letters": task("letters", CHOICES, output_type="multiple_choice", doc_to_text="Q: {{question}}\nA:",
                        doc_to_choice="{{choices}}", doc_to_target="{{gold}}", metric_list=[accuracy]),
        "manager": TaskManager(include_defaults=False)}


def evaluated(tasks, name, arguments, batch_size, **options):
    harness.register()
    found = lm_eval.simple_evaluate(
        "dlm_jax", arguments, tasks=[tasks[name]], task_manager=tasks["manager"], batch_size=batch_size,
        bootstrap_iters=0, **options)
    return found, [sample["resps"] for sample in found["samples"][name]]


@pytest.mark.parametrize("name", ["words", "letters"])
@pytest.mark.parametrize("decoder", [*DECODED, "masked"])
def test_tasks_run_and_answers_do_not_depend_on_the_batch(causal, masked, tasks, name, decoder):
    arguments = {"pretrained": masked, "samples": 4, **MASKED} if decoder == "masked" else {
        "pretrained": causal, "decoder": decoder, **DECODED[decoder]}
    found, answers = evaluated(tasks, name, arguments, 8)
    again, same = evaluated(tasks, name, arguments, 1)
    metric = {"words": "exact_match,none", "letters": "acc,none"}[name]
    assert found["results"][name][metric] == again["results"][name][metric]
    if name == "words":
        assert answers == same and len(answers) == len(RAW)
        assert found["config"]["tokens"] == again["config"]["tokens"] > 0
    else:
        flat = lambda given: np.array([[float(value) for (value, _), in row] for row in given])
        np.testing.assert_allclose(flat(answers), flat(same), rtol=1e-5)
    assert found["config"]["loglikelihood"].startswith("lower bound, 4" if decoder == "masked" else "exact")


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=n) for n, each in enumerate(arguments)]


def test_rows_of_a_batch_have_their_own_stops_and_lengths(causal):
    lm = harness.DlmJax(causal, batch_size=8)
    prompt = RAW[0]["question"]
    whole, = lm.generate_until(requests("generate_until", (prompt, {"until": [], "max_gen_toks": 20})))
    ids = lm.tokenizer(prompt)["input_ids"]
    made = dlm_jax.generate(lm.model, lm.params, [ids], dlm_jax.decode.Autoregressive(), max_new_tokens=20,
                            eos_id=1).tokens[0]
    assert whole == lm.tokenizer.decode(made, skip_special_tokens=True) and len(whole) > 6
    early, late = whole[2:4], whole[4:6]
    asked = [(prompt, {"until": [late, early], "max_gen_toks": 20}), (prompt, {"until": late, "max_gen_toks": 20}),
             (prompt, {"until": ["nowhere"], "max_gen_toks": 3}), (prompt, {"max_gen_toks": 20, "num_beams": 1})]
    found = lm.generate_until(requests("generate_until", *asked))
    cut = lambda stop: whole[:whole.index(stop)]
    assert found[:2] == [min(cut(early), cut(late), key=len), cut(late)]
    assert found[2] == lm.tokenizer.decode(made[:3], skip_special_tokens=True) and found[3] == whole
    assert lm.get_model_info()["tokens_per_forward"] == 1.0


def test_a_special_token_stops_an_answer_though_no_text_shows_it(causal):
    lm = harness.DlmJax(causal, max_gen_toks=16)
    said = [*lm.tokenizer("Tom", add_special_tokens=False)["input_ids"], 2, *lm.tokenizer("more")["input_ids"]]
    asked = lm._asked("hello", {"until": ["<|im_start|>", "zzz"]})
    assert lm._cut(said, asked) == "Tom" and lm._cut(said, lm._asked("hello", {"until": ["o"]})) == "T"


def test_a_task_may_sample_and_every_request_draws_its_own(causal):
    lm = harness.DlmJax(causal, batch_size=2)
    asked = ("Tom has", {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_gen_toks": 8})
    greedy = ("Tom has", {"do_sample": False, "temperature": 0.7, "max_gen_toks": 8})
    found = lm.generate_until(requests("generate_until", asked, greedy, asked, asked))
    assert len(set(found)) > 2 and found == lm.generate_until(requests("generate_until", asked, greedy, asked, asked))
    assert [found[1]] == harness.DlmJax(causal).generate_until(requests("generate_until", greedy))


PAIRS = [("Tom has 3 apples.", " He"), ("", "Tom has"), ("Tom has 3 ", "apples"), ("A: ", "18")]
TEXTS = ["Tom has 3 apples. He gives 2 away.", "x" * 300]


@pytest.mark.parametrize("family", ["causal", "masked"])
def test_log_likelihoods_are_ours(request, family):
    folder = request.getfixturevalue(family)
    options = {"samples": 8, "seed": 3, **MASKED} if family == "masked" else {}
    lm = harness.DlmJax(folder, batch_size=3, **options)
    found = lm.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    ids = lambda text: lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompts = [ids("Tom has 3 apples."), [1], ids("Tom has 3"), ids("A:")]
    wholes = [ids("Tom has 3 apples. He"), [1, *ids("Tom has")], ids("Tom has 3 apples"), ids("A: 18")]
    answers = [whole[len(prompt):] for whole, prompt in zip(wholes, prompts)]
    if family == "masked":
        wanted = likelihood.log_likelihood(lm.model, lm.params, prompts, answers, mask_id=3, samples=8, seed=3)
        decoder = dlm_jax.decode.MaskedDiffusion(
            schedule=dlm_jax.decode.Blocks(4), commit=dlm_jax.decode.Threshold(0.05))
    else:
        wanted = causal_likelihood.log_likelihood(lm.model, lm.params, prompts, answers)[0]
        decoder = dlm_jax.decode.Autoregressive()
    np.testing.assert_allclose([value for value, _ in found], wanted, rtol=1e-5)
    made = dlm_jax.generate(lm.model, lm.params, prompts, decoder, max_new_tokens=list(map(len, answers)), eos_id=-1,
                            mask_id=3)
    assert [same for _, same in found] == [list(a) == list(b) for a, b in zip(made.tokens, answers)]
    rolled = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in TEXTS)))
    assert rolled[1] < rolled[0] < 0  # the second takes two windows


def test_log_likelihoods_of_a_causal_model_are_those_of_the_hf_model(causal):
    for name in ("torch", "accelerate", "peft"):
        pytest.importorskip(name)
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=causal, device="cpu", dtype="float32", batch_size=2, max_length=64)
    ours = harness.DlmJax(causal, batch_size=2, max_length=64)
    long = [*PAIRS, (RAW[0]["question"] * 3, " 18")]  # its beginning is cut off
    for kind, asked in (("loglikelihood", long), ("loglikelihood_rolling", [(text,) for text in TEXTS])):
        rows = requests(kind, *asked)
        expected, found = getattr(theirs, kind)(rows, disable_tqdm=True), getattr(ours, kind)(rows, disable_tqdm=True)
        np.testing.assert_allclose(found, expected, rtol=2e-5, err_msg=kind)
    asked = requests("generate_until", *((row["question"], {"until": ["\n"], "max_gen_toks": 12}) for row in RAW))
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


def test_chats_are_rendered_by_the_template(causal, tasks):
    lm = harness.DlmJax(causal)
    turns = [{"role": "user", "content": "2 + 2?"}]
    assert lm.apply_chat_template(turns) == tokenizers.prompt_text(lm.tokenizer, turns)
    going_on = lm.apply_chat_template([*turns, {"role": "assistant", "content": "It is"}], add_generation_prompt=False)
    assert going_on.endswith("assistant\nIt is")
    found, _ = evaluated(tasks, "words", {"pretrained": causal}, 8, apply_chat_template=True,
                         fewshot_as_multiturn=True, system_instruction="Count.")
    context = found["samples"]["words"][0]["arguments"][0][0]
    assert context.startswith("<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nQ:")
    assert context.count("<|im_start|>assistant") == 2  # the example's, and where the answer begins
    lm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template: leave out"):
        lm.apply_chat_template(turns)


@pytest.mark.parametrize("changes, message", [
    (dict(decoder="telepathy"), "decoder 'telepathy' is not known.*'refusion'"),
    (dict(decoder="masked"), "MaskedDiffusion needs a bidirectional model.*decode it with Autoregressive"),
    (dict(decoder="orthrus"), "Orthrus drafts with a second view"),
    (dict(decoder="guided"), "launch.evaluate --guide"),
    (dict(slot_size=4), "model_args slot_size: no such field"),
    (dict(temperature=-1.0), "temperature"), (dict(pretrained="nowhere/at/all"), "nowhere"),
    (dict(batch_size="auto"), "batch_size = 'auto'"), (dict(max_length=999), "the model has 256 positions"),
    (dict(max_batch_size=4), "max_batch_size = 4")])
def test_bad_arguments_are_refused(causal, changes, message):
    with pytest.raises(ValueError, match=message):
        harness.DlmJax(**{"pretrained": causal, **changes})


@pytest.mark.parametrize("told, message", [
    ({"num_beams": 4}, "num_beams"), ({"repetition_penalty": 1.1}, "'repetition_penalty': 1.1"),
    ({"max_gen_toks": 256}, "max_gen_toks = 256: expected 1 to 255"),
    ({"do_sample": True, "temperature": -2.0}, "temperature")])
def test_bad_generation_arguments_are_refused(causal, told, message):
    with pytest.raises(ValueError, match=message):
        harness.DlmJax(causal, max_gen_toks=16).generate_until(requests("generate_until", ("Tom", told)))


def test_no_field_of_a_decoder_is_hidden_by_an_argument():
    taken = set(inspect.signature(harness.DlmJax.__init__).parameters)
    assert not taken & {field.name for kind in DECODERS.values() for field in dataclasses.fields(kind)}


@pytest.mark.slow  # lm_eval reads thousands of task files first
def test_its_own_command_line_knows_our_model(causal, tasks, tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "words.yaml").write_text(json.dumps(tasks["words"]))  # JSON is YAML
    monkeypatch.setattr(sys, "argv", [
        "lm_eval", "--model", "dlm_jax", "--model_args", f"pretrained={causal}", "decoder=refusion", "slot_size=4",
        "--tasks", "words", "--include_path", str(folder), "--batch_size", "4", "--limit", "2",
        "--output_path", str(tmp_path / "out")])
    harness.main()
    written, = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text())
    assert "exact_match,none" in results["results"]["words"] and "ReFusion(" in results["config"]["decoder"]
