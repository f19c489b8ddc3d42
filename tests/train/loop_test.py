"""Runs as a whole: learning, resuming, being killed, and stopping for a reason."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dlm_jax.data import packing
from dlm_jax.objectives import Flare
from dlm_jax.train import loop
from tests.train import toy

ROOT = Path(__file__).resolve().parents[2]


def _same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


def _metrics(history):
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in history]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, toy.run(folder, **toy.KILLED)


def test_a_run_leaves_its_configuration_metrics_events_and_checkpoints(whole):
    folder, result = whole
    assert (result.step, result.finished) == (12, True)
    assert json.loads((folder / "config.json").read_text())["train"]["objective"]["name"] == "refusion"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.history
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {"loss", "loss_ar", "loss_mdm", "grad_norm", "learning_rate", "tokens", "tokens_per_second"} <= set(lines[0])
    assert list((folder / "tensorboard").glob("events*"))
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"10", "12"}


def test_the_loss_goes_down(tmp_path):
    result = toy.run(tmp_path / "run", steps=60, checkpoint_every=60, log_every=10, schedule="cosine", epsilon=1e-8)
    assert result.history[0]["loss"] > 2.5
    assert result.history[-1]["loss"] < 0.8
    assert [line["step"] for line in result.history] == [1, 10, 20, 30, 40, 50, 60]


def test_a_killed_run_resumes_bit_for_bit(whole, tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.toy", str(folder), "0.3"], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    # somewhere behind the first checkpoint; where exactly, and whether a save is under way, is left to chance
    deadline = time.monotonic() + 240
    while not (folder / "checkpoints" / "4").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    seen = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(seen) < 12
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # a kill may also cut a line short

    result = toy.run(folder, resume=True, **toy.KILLED)
    _same(result.params, whole[1].params)
    assert _metrics(result.history) == _metrics(whole[1].history)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_returns_and_the_run_goes_on_later(whole, tmp_path, name, monkeypatch):
    before = signal.getsignal(getattr(signal, name))
    original, sent = toy.Counting.__next__, []

    def interrupting(self):
        if self.next == 4 and not sent:
            sent.append(name)
            os.kill(os.getpid(), getattr(signal, name))
        return original(self)

    monkeypatch.setattr(toy.Counting, "__next__", interrupting)
    stopped = toy.run(tmp_path / "run", **toy.KILLED | {"checkpoint_every": 100})
    assert (stopped.step, stopped.finished) == (5, False)
    assert signal.getsignal(getattr(signal, name)) is before
    resumed = toy.run(tmp_path / "run", resume=True, **toy.KILLED)
    assert resumed.finished
    _same(resumed.params, whole[1].params)


def test_resuming_a_finished_run_returns_it(whole):
    folder, result = whole
    again = toy.run(folder, resume=True, **toy.KILLED)
    _same(again.params, result.params)
    assert again.history == result.history


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_damaged_checkpoint_falls_back_and_ends_the_same(whole, tmp_path):
    folder = tmp_path / "run"
    toy.run(folder, **toy.KILLED | {"checkpoint_every": 5})
    arrays = max((folder / "checkpoints" / "12").rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 0xFF
    arrays.write_bytes(data)
    with pytest.warns(UserWarning, match="checkpoint 12 .* is damaged"):
        result = toy.run(folder, resume=True, **toy.KILLED)
    _same(result.params, whole[1].params)
    assert (folder / "checkpoints_damaged" / "12.0").is_dir()
    gc.collect()  # the coroutines that orbax leaves behind go here, and not in a test that comes later


def test_a_directory_that_holds_a_run_is_not_overwritten(whole):
    with pytest.raises(ValueError, match="already holds a run.*--resume"):
        toy.run(whole[0], **toy.KILLED)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("place, content, reason", [
    ("config.json", '{"model_type": "qwen3"}', "config.json is not one of a run"),
    ("config.json", "[1]", "config.json is not one of a run"),
    ("config.json", "{", "it has config.json but neither"),
    ("thesis.txt", "dear to someone", "it has thesis.txt but neither"),
    ("", "a file", "run is a file"),
])
def test_what_is_no_run_is_refused_and_left_alone(tmp_path, place, content, reason, resume):
    file = tmp_path / "run" / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    with pytest.raises(ValueError, match=f"holds something that is no training run .*{reason}"):
        toy.run(tmp_path / "run", resume=resume, **toy.KILLED)
    assert [f for f in tmp_path.rglob("*") if f.is_file()] == [file] and file.read_text() == content


def test_a_kill_while_the_configuration_is_written_is_no_obstacle(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json.tmp").write_text('{"mod')
    assert toy.run(tmp_path / "run", steps=2).finished


def test_another_configuration_is_refused_by_field(whole):
    changed = toy.KILLED | {"learning_rate": 0.5, "objective": toy.ReFusion(mask_id=23, slot_sizes=(4,))}
    with pytest.raises(ValueError, match=r"train.learning_rate: 0.01 -> 0.5; train.objective.slot_sizes: \[2, 4\]"):
        toy.run(whole[0], resume=True, **changed)
    # the checkpoints know it too, should the file be lost
    (whole[0] / "config.json").rename(whole[0] / "kept.json")
    try:
        with pytest.raises(ValueError, match="train.learning_rate: 0.01 -> 0.5"):
            toy.run(whole[0], resume=True, **changed)
    finally:
        (whole[0] / "kept.json").rename(whole[0] / "config.json")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(loop.NonFiniteLoss, match="(loss|grad_norm) is nan at step 2;.*learning_rate"):
        toy.run(tmp_path / "run", steps=9, learning_rate=1e38, warmup_steps=0, clip_norm=None, weight_decay=1.0,
                checkpoint_every=1)
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps and max(steps) == lines[-1]["step"]
    assert all(np.isfinite(line["loss"]) for line in lines)


def _report(folder, monkeypatch, seconds):
    """A report whose clock reads `seconds`, one after another."""
    clock = iter(seconds)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    return loop._Report(folder, 0, toy.config(log_every=2, steps=5), progress=False)


def test_speed_leaves_the_step_that_compiles_out_and_lines_follow_log_every(tmp_path, monkeypatch):
    with _report(tmp_path, monkeypatch, [10.0, 12.0, 14.0, 18.0, 20.0]) as report:
        for step in range(1, 6):
            report.add(step, {"loss": np.float32(1), "grad_norm": np.float32(1), "tokens": np.int32(100 * step)})
    # tokens of steps 2 to the present one over the time since the first was done
    assert [(line["step"], line["tokens_per_second"]) for line in report.history] == [
        (1, None), (2, 200 / 2), (4, 900 / 8), (5, 1400 / 10)]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_is_refused_at_its_step(tmp_path, monkeypatch, name):
    with _report(tmp_path, monkeypatch, []) as report:
        with pytest.raises(loop.NonFiniteLoss, match=f"{name} is nan at step 3"):
            report.add(3, {"loss": np.float32(1), "grad_norm": np.float32(1)} | {name: np.float32("nan")})
    assert report.history == []


def test_a_pipeline_of_another_batch_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="yields 4 rows a step but batch_size = 8"):
        loop.fit(toy.MODEL, toy.params(), toy.Counting(rows=4), toy.config(), tmp_path / "run", progress=False,
                 devices=jax.devices()[:1])


@pytest.mark.parametrize("mask_id, message", [
    (None, "mask_id is None"), (24, "mask_id = 24 lies outside the vocabulary of 24"), (5, "also the model's eos")])
def test_mask_ids_that_cannot_work_are_refused_before_any_compile(tmp_path, mask_id, message):
    model = toy.build.build(toy.MODEL.config.replace(eos_token_id=5))
    with pytest.raises(ValueError, match=message):
        loop.fit(model, None, None, toy.config(objective=toy.ReFusion(mask_id=mask_id)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key, reader", [("tokens", "the trainer"), ("length", "the trainer"), (
    "prompt_length", "objective 'refusion'")])
def test_a_batch_without_a_key_is_refused_by_name(tmp_path, monkeypatch, key, reader):
    original = toy.Counting.batch
    monkeypatch.setattr(toy.Counting, "batch", lambda self, n: {k: v for k, v in original(self, n).items() if k != key})
    with pytest.raises(ValueError, match=rf"{reader} reads batch\['{key}'\].*has only.*example_id.*Pipeline"):
        toy.run(tmp_path / "run", objective=toy.REFUSION)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path, monkeypatch):
    original = toy.Counting.batch
    monkeypatch.setattr(toy.Counting, "batch", lambda self, n: original(self, n) | {
        "tokens": np.full((8, 16), 24, np.int32)})
    with pytest.raises(ValueError, match="token id 24 lies outside the model's vocabulary of 24"):
        toy.run(tmp_path / "run")


def test_packed_documents_inside_a_block_are_refused_before_a_step(tmp_path, monkeypatch):
    row = packing.lay_out([(0, ([1], [2, 3])), (1, ([4], [5, 6]))], length=16, most=2, align=1, pad_id=0)
    monkeypatch.setattr(toy.Counting, "batch", lambda *_: {name: np.stack([x] * 8) for name, x in row.items()})
    with pytest.raises(ValueError, match="document 1 of row 0 starts at token 3, inside a block of block_size = 4"):
        toy.run(tmp_path / "run", objective=Flare(mask_id=23, block_size=4))
