"""Named experiments, overrides from text, and the papers' numbers."""

import dataclasses

import pytest

import configs
from configs import flare, orthrus, refusion
from dlm_jax import text
from dlm_jax.decode import Orthrus, ReFusion
from dlm_jax.models import build
from dlm_jax.objectives import Flare
from dlm_jax.objectives.flare import VARIANTS, variant


def test_the_papers_training_run():
    run = configs.load("refusion:qwen3_8b")
    assert (run.train.batch_size, run.length, run.train.learning_rate, run.epochs) == (512, 4096, 2e-5, 4.0)
    assert run.train.objective.slot_sizes == (4, 8, 16, 32) and run.train.objective.mdm_weight == 1.0
    assert (run.train.objective.masking, run.train.objective.normalisation) == ("released", "paper")
    assert (run.train.schedule, run.train.weight_decay) == ("cosine", 0.0)
    assert run.with_steps(3_700_000).train.steps == run.train.steps == 28_907


@pytest.mark.parametrize("name", ["qwen3_1_7b", "qwen3_4b", "qwen3_8b"])
def test_orthrus_training_run(name):
    run, model = configs.load(f"orthrus:{name}"), orthrus.MODELS[name]
    objective = run.train.objective
    assert (objective.block_size, objective.blocks, run.length, run.epochs) == (32, 256, 2048, 2.0)
    assert (objective.distance, objective.anchors, objective.temperature, objective.last_offset) == (
        "kl", "sequence", 1.0, False)
    assert run.with_steps(600_000).train.steps == run.train.steps == 18_750
    assert run.model is None and model.dual and model.block_size == 32
    shares = build.parameter_shares(build.build(model))
    assert shares["total"] - shares["diffusion"] == pytest.approx(float(name[6:-1].replace("_", ".")) * 1e9, rel=0.03)
    assert 0.15 < shares["diffusion"] / shares["total"] < 0.20  # the paper says 16 %; so it is at 8B


@pytest.mark.parametrize("name", ["qwen3_5_2b", "qwen3_5_4b", "qwen3_5_9b", "qwen3_1_7b_flare"])
def test_flare_is_trained_as_the_paper_says(name):
    run = configs.load(f"flare:{name}", ["weights=0.4,0.4,0.2"])
    assert (run.length, run.pack, run.train.batch_size, run.train.steps) == (4096, True, 256, 9000)
    assert (run.train.learning_rate, run.train.warmup_steps, run.train.schedule) == (1e-5, 500, "constant")
    assert run.train.objective == Flare(block_size=4, head_chunk=64) and run.weights == (0.4, 0.4, 0.2)


def test_the_ablation_family_is_there_at_both_sizes():
    for name in VARIANTS:
        assert configs.load(f"flare:tiny_{name}").train.objective == variant(name)
        assert configs.load(f"flare:qwen3_1_7b_{name}").pack


@pytest.mark.parametrize("settings, message", [
    (["length=162"], "length = 162 is no multiple of block_size = 4.*train.objective.block_size"),
    (["pack=false", "weights=1,2"], r"weights = \(1.0, 2.0\) mix packed rows: give pack=true"),
    (["weights=1,0"], r"weights = \(1.0, 0.0\): expected a positive number"),
])
def test_packings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        configs.load("flare:tiny", settings)


def test_table_7():
    want = {  # generation length, threshold, slot size, block size
        "mmlu_pro": (512, 0.5, 16, 128), "arc_c": (512, 0.4, 4, 16), "gsm8k": (512, 0.7, 16, 64),
        "math": (512, 0.6, 32, 64), "gpqa": (128, 0.6, 8, 16), "humaneval": (512, 0.6, 16, 32),
        "mbpp": (512, 0.6, 16, 32)}
    found = {name: entry for name, entry in refusion.DECODING.items() if not name.startswith("released_")}
    assert {name: (entry.max_new_tokens, entry.decoder.slot_threshold, entry.decoder.slot_size,
                   entry.decoder.block_length) for name, entry in found.items()} == want
    assert all(entry.decoder.slot_threshold == entry.decoder.token_threshold for entry in found.values())
    assert all(entry.source == "ReFusion, Table 7" and entry.decoder.completion == "autoregressive"
               for entry in found.values())


def test_the_released_evaluation_script():
    want = {  # slot and token threshold, slot size, number of blocks of 512 tokens
        "mmlu_pro": (0.9, 0.4, 16, 4), "arc_c": (0.8, 0.1, 8, 64), "gsm8k": (0.9, 0.4, 32, 4),
        "math": (0.8, 0.6, 32, 8), "gpqa": (0.8, 0.2, 8, 32), "humaneval": (0.9, 0.4, 32, 4),
        "mbpp": (0.9, 0.3, 32, 4)}
    for name, (slots, tokens, size, blocks) in want.items():
        entry = refusion.DECODING[f"released_{name}"]
        assert entry.decoder == ReFusion(
            slot_threshold=slots, token_threshold=tokens, slot_size=size, block_length=512 // blocks,
            completion="redraft")
        assert entry.max_new_tokens == 512 and "eval.sh" in entry.source


def test_orthrus_decodes_as_it_was_evaluated():
    greedy, sampled = (orthrus.DECODING[name].decoder for name in ("greedy", "sampled"))
    assert greedy == Orthrus(block_size=32) and greedy.sampler.temperature == 0
    assert sampled == Orthrus(block_size=32, temperature=0.7, top_k=20, top_p=0.8)


@pytest.mark.parametrize("name", configs.names())
def test_every_experiment_survives_overriding_each_field_with_itself(name):
    run = configs.load(name)

    def settings(config, prefix=""):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                yield from settings(value, f"{prefix}{field.name}.")
            else:
                written = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                yield f"{prefix}{field.name}={written}"

    assert text.override(run, list(settings(run))) == run


def test_overrides_reach_nested_fields_and_keep_types():
    run = configs.load("tiny:refusion", [
        "train.learning_rate=1e-4", "train.objective.slot_sizes=4, 8", "train.clip_norm=none", "train.remat=true",
        "train.mesh.tensor=2", "model.num_layers=2", "train.trainable=q_proj|k_proj", "epochs=2"])
    assert run.train.learning_rate == 1e-4 and run.train.objective.slot_sizes == (4, 8)
    assert run.train.clip_norm is None and run.train.remat is True and run.train.mesh.tensor == 2
    assert run.model.num_layers == 2 and run.train.trainable == "q_proj|k_proj" and run.epochs == 2.0
    assert configs.load("tiny:refusion").train.remat is False


def test_fields_that_check_each_other_change_together():
    assert configs.load("tiny:refusion", ["train.steps=3", "train.warmup_steps=1"]).train.steps == 3
    with pytest.raises(ValueError, match="warmup_steps = 50: expected 0 to steps = 3"):
        configs.load("tiny:refusion", ["train.steps=3"])


@pytest.mark.parametrize("setting, message", [
    ("train.lr=1", "train.lr: no such field.*accepted:.*train.learning_rate"),
    ("learning_rate=1", "did you mean 'train.learning_rate'"),
    ("train.objectiv.mask_id=1", "did you mean 'train.objective.mask_id'"),
    ("train.steps=1e3", "train.steps=1e3: expected an integer, as in train.steps=500"),
    ("train.remat=yes", "expected true or false, as in train.remat=false"),
    ("train.learning_rate=fast", "expected a number"), ("train.objective.slot_sizes=4;8", "integers such as 4,8,16"),
    ("train.clip_norm=", "expected a number or none"), ("train.learning_rate", "expected FIELD=VALUE"),
    ("train.schedule=linear", "'linear'.*cosine.*constant"), ("train.mesh=2", "no such field.*train.mesh.data"),
])
def test_bad_overrides_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        configs.load("tiny:refusion", [setting])


@pytest.mark.parametrize("name", ["refusion", "tiny:refusions", "experiment:load", "../x:y"])
def test_unknown_names_are_refused_with_the_accepted_ones(name):
    words = "is not known.*accepted: .*refusion:qwen3_8b, .*tiny:autoregressive, .*tiny:refusion"
    with pytest.raises(ValueError, match=words):
        configs.load(name)


def test_epochs_too_short_for_the_warm_up_are_refused():
    with pytest.raises(ValueError, match="warmup_steps = 100 but 4 epochs of 512 rows are only 4 steps"):
        configs.load("refusion:qwen3_8b").with_steps(512)


@pytest.mark.parametrize("name, billions", [("qwen3_5_2b", 1.88), ("qwen3_5_4b", 4.2), ("qwen3_5_9b", 8.95)])
def test_flare_training_run(name, billions):
    run, model = configs.load(f"flare:{name}"), flare.MODELS[name]
    train = run.train
    assert (train.objective.block_size, run.length, train.batch_size, train.steps) == (4, 4096, 256, 9000)
    assert (train.learning_rate, train.warmup_steps, train.schedule) == (1e-5, 500, "constant")
    assert build.parameter_shares(build.build(model))["total"] / 1e9 == pytest.approx(billions, rel=0.02)
    assert model.pattern.count("gated_delta") == 3 and model.rotary_dim == 64


def test_flares_kernels_shape_is_the_2bs():
    """FLARE, Table 4 and A.5: 16 heads of 128, 18 such layers; Table 5: 6,144 channels."""
    model = flare.MODELS["qwen3_5_2b"]
    delta = model.gated_delta
    assert (delta.value_heads, delta.key_dim, delta.value_dim) == (16, 128, 128)
    assert model.num_periods * 3 == 18
    assert 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim == 6144
