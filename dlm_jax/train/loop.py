"""The host loop of a run: data in, metrics, checkpoints and a progress bar out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from dlm_jax.io import folders
from dlm_jax.io.checkpoints import Checkpoints
from dlm_jax.objectives.base import require
from dlm_jax.train import sharding
from dlm_jax.train.config import TrainConfig, differences, plain, to_dict
from dlm_jax.train.state import merge
from dlm_jax.train.step import abstract_state, init_state, make_step
from dlm_jax.types import Params

# a resumed run may change where and how often, never what is computed
FREE_ON_RESUME = ("mesh", "remat", "checkpoint_every", "keep", "log_every")


class NonFiniteLoss(FloatingPointError):
    """The loss or its gradient is not a number; the checkpoints on disk are from before."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a run leaves behind.

    Attributes:
      params: nested dict of arrays, trained and frozen.
      history: the lines of metrics.jsonl, from the first step of the run on.
      step: steps done.
      finished: False where a signal stopped the run early.
    """

    params: Params
    history: list[dict[str, float]]
    step: int
    finished: bool


def fit(
    model: Any, params: Params, pipeline: Any, config: TrainConfig, run_dir: Path | str, *,
    resume: bool = False, progress: bool = True, devices: Sequence[jax.Device] | None = None, tokenizer: Any = None,
) -> FitResult:
    """Trains a model, and saves on SIGINT and SIGTERM before it returns.

    Writes `config.json`, `tokenizer/`, `metrics.jsonl`, TensorBoard events and `checkpoints/` into `run_dir`.

    Args:
      model: the module, from `models.build`.
      params: nested dict of starting parameters; left as they are.
      pipeline: an iterable of batches with `state()` and `restore(state)`; each process yields its own rows.
      config: the run.
      run_dir: directory of this run alone.
      resume: continue the run in `run_dir` from its newest usable checkpoint, or start it where there is none.
      progress: draw a progress bar.
      devices: default all of the job.
      tokenizer: an object with `save_pretrained`, kept in `run_dir` from the start; or None.

    Returns:
      The trained parameters and the metrics.

    Raises:
      ValueError: `run_dir` holds another run, or something that is no run; sizes that do not fit the devices;
        a mask id that is missing, outside the vocabulary, or the model's EOS; a model that is not of the kind the
        objective trains.
      NonFiniteLoss: the loss or the gradient norm is not finite.
    """
    _check_model(model, config)
    mesh = sharding.make_mesh(config.mesh, devices)
    step_fn = make_step(model, config, mesh)
    described = {"model": plain(dataclasses.asdict(model.config)), "train": to_dict(config)}
    run_dir = _claim(Path(run_dir), described, resume)
    kept = run_dir / folders.RUN_TOKENIZER
    if tokenizer is not None and jax.process_index() == 0 and not kept.exists():
        with folders.replacing(kept) as made:
            tokenizer.save_pretrained(str(made))
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep)
    with contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        found = checkpoints.restore_newest(
            abstract_state(model, params, config, mesh),
            lambda meta: _check_same(meta["config"], described, run_dir))
        if found is None:
            start, state = 0, init_state(model, params, config, mesh)
        else:
            start, state, meta = found
            pipeline.restore(meta["data"])
        report = stack.enter_context(_Report(run_dir, start, config, progress))
        asked = stack.enter_context(_stop_requests())
        batches = iter(pipeline)
        last = None  # metrics are read one step late, so that the device never waits for the host
        step = start
        stopping = False
        while step < config.steps and not stopping:
            batch = _place(next(batches), config, model.config.vocab_size, mesh)
            state, metrics = step_fn(state, batch)
            step += 1
            if last is not None:
                report.add(*last)
            last = step, metrics
            stopping = _agreed(asked(), step, config)
            if step % config.checkpoint_every == 0 or step == config.steps or stopping:
                report.add(*last)  # a state is saved only after its loss is known to be finite
                last = None
                checkpoints.save(step, state, {"config": described, "data": pipeline.state()})
        checkpoints.wait()
    return FitResult(merge(state.trainable, state.frozen), report.history, step, step == config.steps)


def _check_model(model: Any, config: TrainConfig) -> None:
    """Raises ValueError where the objective's mask token cannot be one, or would move a frozen view."""
    if model.config.dual and config.trainable is None and config.objective.trains is None:
        raise ValueError(f"objective {config.objective.name!r} would train both views of a dual model; train the "
                         "autoregressive model before it is made dual, or name what to train in train.trainable")
    eos = model.config.eos_token_id
    if "mask_id" in config.objective.ids and config.objective.mask_id == eos is not None:
        raise ValueError(f"objective.mask_id = {eos} is also the model's eos_token_id; they must differ")


def _claim(run_dir: Path, described: dict[str, Any], resume: bool) -> Path:
    """Makes `run_dir` the directory of this run, or raises ValueError where it is another's."""
    path, scratch = run_dir / "config.json", run_dir / "config.json.tmp"
    saved = _found(run_dir, scratch.name)
    if saved is not None and not resume:
        raise ValueError(f"{run_dir} already holds a run; resume it (--resume), or choose another directory")
    if saved:
        _check_same(saved, described, run_dir)
    if jax.process_count() > 1:  # nobody writes before all have looked
        multihost_utils.sync_global_devices("claim")
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(described, indent=2) + "\n")
        scratch.replace(path)  # whole or not at all, should a kill come now
    return run_dir


def _found(run_dir: Path, scratch: str) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory, empty where only checkpoints have it; None if no run."""
    foreign = lambda what: ValueError(
        f"{run_dir} holds something that is no training run ({what}); give a fresh directory, or that of a run")
    for place in (run_dir, *run_dir.parents):
        if place.exists() and not place.is_dir():
            raise foreign(f"{place} is a file")
    names = sorted(f.name for f in run_dir.iterdir() if f.name != scratch) if run_dir.exists() else []
    if not names:
        return None
    saved = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        saved = json.loads((run_dir / "config.json").read_text())
    if saved and not (isinstance(saved, dict)
                      and all(isinstance(saved.get(name), dict) for name in ("model", "train"))):
        raise foreign("its config.json is not one of a run")
    if not saved and not (run_dir / "checkpoints").is_dir():
        raise foreign(f"it has {', '.join(names[:3])} but neither the config.json nor the checkpoints of a run")
    return saved


def _check_same(saved: dict[str, Any], described: dict[str, Any], run_dir: Path) -> None:
    without = lambda raw: {**raw, "train": {k: v for k, v in raw["train"].items() if k not in FREE_ON_RESUME}}
    lines = differences(without(saved), without(described))
    if lines:
        raise ValueError(
            f"{run_dir} holds a run of another configuration (saved -> given): {'; '.join(lines)}. "
            "Give the saved values to resume it, or choose another directory")


def _place(
    batch: dict[str, np.ndarray], config: TrainConfig, vocab_size: int, mesh: jax.sharding.Mesh
) -> dict[str, jax.Array]:
    """Joins the rows of all processes into global arrays."""
    require(batch, ("tokens", "length"), "the trainer")
    config.objective.check_batch(batch)
    low, high = batch["tokens"].min(), batch["tokens"].max()
    if low < 0 or high >= vocab_size:  # a lookup on the device would silently take another row of the table
        raise ValueError(f"token id {low if low < 0 else high} lies outside the model's vocabulary of {vocab_size} "
                         "ids; use the tokenizer the model was made with")
    rows = next(iter(batch.values())).shape[0] * jax.process_count()
    if rows != config.batch_size:
        raise ValueError(f"the pipeline yields {rows} rows a step but batch_size = {config.batch_size}; "
                         "make them equal")
    where = sharding.rows(mesh)
    return {name: jax.make_array_from_process_local_data(where, np.asarray(x)) for name, x in batch.items()}


@contextlib.contextmanager
def _stop_requests() -> Iterator[Any]:
    """Yields a function that tells whether SIGINT or SIGTERM has arrived; a second signal acts as usual."""
    asked = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.getsignal(name) for name in names}

    def ask(name, _):
        asked.append(name)
        signal.signal(name, before[name])

    for name in names:
        signal.signal(name, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for name in names:
            signal.signal(name, before[name])


def _agreed(asked: bool, step: int, config: TrainConfig) -> bool:
    """Tells whether all processes stop at this step; a signal reaches them at different times."""
    if jax.process_count() == 1:
        return asked
    return step % config.log_every == 0 and bool(multihost_utils.process_allgather(np.asarray(asked)).any())


class _Report:
    """Turns device metrics into lines, events and a progress bar, and refuses losses that are not finite."""

    def __init__(self, run_dir: Path, start: int, config: TrainConfig, progress: bool):
        self._config, self._run_dir, self._steps = config, run_dir, start
        self._main = jax.process_index() == 0
        self._path = run_dir / "metrics.jsonl"
        self.history = self._lines_until(start)
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"), TimeRemainingColumn(), disable=not (progress and self._main))
        self._start, self._clock, self._tokens = start, None, 0

    def _lines_until(self, step: int) -> list[dict[str, float]]:
        """Reads the metrics of the steps that the state has seen; later ones are run again."""
        if not self._path.exists():
            return []
        lines = []
        for text in self._path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line that a kill cut short
                lines.append(json.loads(text))
        return [line for line in lines if line["step"] <= step]

    def __enter__(self) -> _Report:
        if self._main:
            self._path.write_text("".join(json.dumps(line) + "\n" for line in self.history))
            self._file = self._path.open("a")
            self._events = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=self._start + 1)
        self._bar.start()
        self._task = self._bar.add_task(
            "train", total=self._config.steps, completed=self._start, loss="-", rate="-")
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
        if self._main:
            self._file.close()
            self._events.close()

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step; waits for that step to be done."""
        values = {name: np.asarray(value).item() for name, value in metrics.items()}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise NonFiniteLoss(
                    f"{name} is {values[name]} at step {step}; the run stops, and the checkpoints in "
                    f"{self._run_dir / 'checkpoints'} are from before it. Lower learning_rate, lengthen warmup_steps "
                    "or look at the rows of that step")
        now = time.perf_counter()
        if self._clock is None:
            self._clock = now  # the first step compiles: its time says nothing about speed
        else:
            self._tokens += values["tokens"]
        elapsed = now - self._clock
        rate = self._tokens / elapsed if self._tokens else None
        shown = "-" if rate is None else f"{rate:,.0f}"
        self._bar.update(self._task, completed=step, loss=f"{values['loss']:.4f}", rate=shown)
        if step % self._config.log_every and step not in (1, self._config.steps):
            return
        line = {"step": step} | values | {"tokens_per_second": rate}
        self.history.append(line)
        if self._main:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            for name, value in line.items():
                if name != "step" and value is not None:
                    self._events.add_scalar(name, value, step)
