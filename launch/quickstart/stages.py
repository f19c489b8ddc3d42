"""The long stages of the job: train one model, answer with one system; each is done once and kept."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

import dlm_jax
from dlm_jax import decode
from dlm_jax.data.pipeline import Pipeline
from dlm_jax.evals import runner, tasks
from dlm_jax.models import build, convert
from dlm_jax.models.config import GatedDelta, TransformerConfig
from dlm_jax.train.config import TrainConfig
from dlm_jax.train.loop import fit
from dlm_jax.types import Params
from launch.quickstart import kept
from launch.quickstart.plan import Budget, System, Training
from launch.quickstart.rows import Rows
from launch.train import settled

Model = tuple[Any, Params]  # a module and its parameters


class Stopped(Exception):
    """A signal ended a training early; what it had is saved."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What all stages of one run share.

    Attributes:
      out: the run's directory.
      tokenizer: of the run.
      length: T, tokens of a training row.
      room: longest answer, tokens.
      seed: of parameters, shuffles, corruption and sampling.
      budget: steps and shapes.
    """

    out: Path
    tokenizer: Any
    length: int
    room: int
    seed: int
    budget: Budget


def weights_of(out: Path, training: str) -> Path:
    """Returns where a run keeps a training's model."""
    return out / "models" / training


def make_model(tokenizer: Any, budget: Budget, family: str) -> Any:
    """Returns the module of the budget's shape.

    Args:
      tokenizer: of the run.
      budget: whose shape.
      family: dense, or "qwen3_5_text", whose layers are gated delta rules but for the last.
    """
    head_dim, hybrid = budget.width // budget.heads, {}
    if family == "qwen3_5_text":
        delta = GatedDelta(key_heads=budget.kv_heads, value_heads=budget.heads, key_dim=head_dim, value_dim=head_dim)
        hybrid = dict(pattern=("gated_delta",) * (budget.layers - 1) + ("attention",), gated_delta=delta)
    return build.build(TransformerConfig(
        family=family, vocab_size=len(tokenizer), hidden_size=budget.width, intermediate_size=budget.intermediate,
        num_layers=budget.layers, num_heads=budget.heads, num_kv_heads=budget.kv_heads, head_dim=head_dim,
        rope_theta=1e4, tie_word_embeddings=True, initializer_range=0.05, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id, **hybrid))


def adapted(model: Any, params: Params, body: str, logit_shift: int | None = None) -> Model:
    """Turns a trained model into one of another family.

    Args:
      model: the module.
      params: its parameters.
      body: "orthrus" adds the second view; any other family has the same parameters and takes them over.
      logit_shift: as in `TransformerConfig`.

    Returns:
      The module of that family and its parameters.
    """
    if body == model.config.family:
        return model, params
    if body == "orthrus":
        return convert.init_from_ar(model, params)
    return build.build(model.config.replace(family=body, logit_shift=logit_shift, noisy_shift=None)), params


def train(training: Training, job: Job, rows: Rows) -> tuple[Model, dict[str, Any]]:
    """Trains one model, or continues or reads it where it exists.

    Args:
      training: what to train.
      job: the run.
      rows: training rows.

    Returns:
      The model, and plain values: steps, batch_size, seconds, curve, data (see `Pipeline.report`).

    Raises:
      Stopped: by a signal.
    """
    weights, steps = weights_of(job.out, training.name), job.budget.steps[training.name]
    length = training.length or job.length

    def run() -> dict[str, Any]:
        begin = time.perf_counter()
        if training.start is None:
            model = make_model(job.tokenizer, job.budget, training.body)
            params = build.init_params(model, jax.random.key(job.seed))
        else:
            model, params = adapted(
                *dlm_jax.load(weights_of(job.out, training.start)), training.body, training.logit_shift)
        model = settled(model, training.objective, length)
        devices = jax.device_count()
        batch_size = max(1, job.budget.batch_tokens // length // devices) * devices
        pipeline = Pipeline(rows, job.tokenizer, batch_size=batch_size, length=length, seed=job.seed)
        result = fit(
            model, params, pipeline,
            TrainConfig(objective=training.objective, steps=steps, batch_size=batch_size,
                        learning_rate=training.learning_rate, warmup_steps=min(50, steps), beta2=0.98,
                        weight_decay=0.05, seed=job.seed, checkpoint_every=200, keep=2, log_every=10),
            job.out / "training" / training.name, resume=True)
        if not result.finished:
            raise Stopped(f"{training.title} stopped at step {result.step}; the same command continues from there")
        dlm_jax.save(weights, model, result.params, tokenizer_from=job.tokenizer, overwrite=True)
        parts = sorted({name for line in result.history for name in line if name.startswith("loss_")})
        names = ["loss", *(parts if len(parts) > 1 else [])]
        return {"steps": steps, "batch_size": batch_size, "seconds": time.perf_counter() - begin,
                "curve": {name: [[line["step"], line[name]] for line in result.history] for name in names},
                "data": pipeline.report()}

    summary = kept.result(job.out / "training" / f"{training.name}.json",
                          {"training": repr(training), "steps": steps}, run)
    return dlm_jax.load(weights), summary


def answer(system: System, job: Job, models: dict[str, Model], task: tasks.Task) -> dict[str, Any]:
    """Answers the held-out questions with one system.

    Args:
      system: what answers.
      job: the run.
      models: what each training made.
      task: the questions and their judge.

    Returns:
      Plain values: row (see `runner.evaluate`), answers, and for headline systems a replay of the first questions.
    """

    def run() -> dict[str, Any]:
        ask = dict(max_new_tokens=job.room, seed=job.seed)
        model = models[system.training]
        if system.guide is not None:
            model = decode.join(*model, *models[system.guide])
        subject = (system.name, system.decoder, *model, job.tokenizer)
        row, answers = runner.evaluate(*subject, task, **ask)
        if system.lossless:
            row |= runner.losslessness(*subject[1:], task, max_new_tokens=job.room)
        tracks = [runner.replay(*subject, question, **ask) for question in task.rows[:3 if system.headline else 0]]
        return {"row": {**row, "family": system.family, "label": system.label, "headline": system.headline},
                "answers": [dataclasses.asdict(each) for each in answers],
                "tracks": [{**track, "family": system.family} for track in tracks]}

    file = "".join(c if c.isalnum() or c in "._" else "-" for c in system.name)
    return kept.result(job.out / "systems" / f"{file}.json", {"system": repr(system), "room": job.room}, run)
