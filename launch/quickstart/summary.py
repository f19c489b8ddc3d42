"""What the stages found, joined into results.json and what the report shows."""

from __future__ import annotations

import os
from typing import Any

import jax

from dlm_jax.evals import tasks
from dlm_jax.models import build
from launch.quickstart.plan import Plan
from pallas_kernels import timing

_CURVES = {"loss": "whole", "loss_ar": "autoregressive part", "loss_mdm": "denoising part",
           "loss_diff1": "denoising part, view 1", "loss_diff2": "denoising part, view 2"}  # of the report


def summarise(plan: Plan, task: tasks.Task, trained: dict[str, Any], answered: dict[str, Any],
              facts: list[list[str]], dropped: int) -> dict[str, Any]:
    """Joins the stages' results into what results.json holds and the report shows.

    Args:
      plan: the study.
      task: the questions.
      trained: what `stages.train` found, by training.
      answered: what `stages.answer` found, by system.
      facts: see `describe`.
      dropped: held-out questions that nobody was asked.
    """
    heads = [system.name for system in plan.systems if system.headline]
    wrong = [i for i in range(len(task.rows)) if not all(answered[name]["answers"][i]["right"] for name in heads)]
    shown = [*wrong[:2], *(i for i in range(len(task.rows)) if i not in wrong)][:4]
    question = lambda i: {"question": task.rows[i].prompt_messages[-1]["content"], "expected": task.rows[i].response}
    return {
        "title": plan.title,
        "task": {"name": task.name, "metric": task.metric, "questions": len(task.rows), "dropped": dropped},
        "systems": [answered[system.name]["row"] for system in plan.systems],
        "trainings": [{"name": t.name, **trained[t.name]} for t in plan.trainings],
        "curves": [{"name": t.title, "family": t.family,
                    "series": {_CURVES.get(name, name): points for name, points in trained[t.name]["curve"].items()}}
                   for t in plan.trainings],
        "replays": [{**question(i), "tracks": [answered[name]["tracks"][i] for name in reversed(heads)]}
                    for i in range(len(answered[heads[0]]["tracks"]))],
        "examples": [{**question(i), "answers": [
            {"system": name, **{k: answered[name]["answers"][i][k] for k in ("text", "right")}} for name in heads]}
            for i in shown],
        "facts": facts,
        "environment": timing.environment(),
    }


def describe(plan: Plan, model: Any, tokenizer: Any, trained: dict[str, Any], seed: int, source: str,
             questions: str) -> list[list[str]]:
    """Returns the facts at the foot of the report.

    Args:
      plan: the study.
      model: the module of the first training.
      tokenizer: of the run.
      trained: what `stages.train` found, by training.
      seed: of the run.
      source: where the rows came from. questions: how many are asked, and how many were dropped.
    """
    c, data, here = model.config, trained[plan.trainings[0].name]["data"], timing.environment()
    size = sum(x.size for x in jax.tree.leaves(build.abstract_params(model)))
    spaced = lambda n: f"{n:,}".replace(",", "\u202f")
    cut = f"{spaced(data['truncated'])} cut short" if data["truncated"] else "none cut short"
    return [
        ["Model", f"{c.family}, {c.num_layers} layers, width {c.hidden_size}, {size / 1e6:.2f} M parameters"],
        ["Rows", f"{source}; {spaced(data['rows'])} to train on"],
        ["Held-out questions", questions],
        ["Padding and truncation",
         f"{100 * data['padding_share']:.0f} % padding, {cut}, {data['empty']} left without an answer"],
        ["Tokenizer", f"byte-level BPE, {spaced(len(tokenizer))} ids, every digit alone"],
        *([t.title, f"{spaced(trained[t.name]['steps'])} steps of {trained[t.name]['batch_size']} rows, "
           f"{trained[t.name]['seconds']:.0f} s"] for t in plan.trainings),
        ["Software", f"jax {here['jax']} on {os.cpu_count()} × {here['platform']}, Python {here['python']}"],
        ["Date", here["date"]],
        ["Seed", str(seed)],
    ]
