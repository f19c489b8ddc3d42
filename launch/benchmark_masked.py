"""Measure masked-diffusion decoders: what each policy computes, how fast it is, and eager PyTorch beside it.

Examples:

    # random models of about 1 M and 50 M parameters
    python -m launch.benchmark masked --output masked.json

    # one size and other lengths
    python -m launch.benchmark masked --size 50m --prompt 128 --new-tokens 256 --steps 64

    # a trained model; eager PyTorch beside it if its body is Qwen2 or Qwen3
    python -m launch.benchmark masked --model runs/mine/model

`forwards` and `positions` are of the diffusion model (query positions evaluated, a row), those of a guide stand beside
them. Times are of whole calls on one prompt or batch, from lists of ids to lists of ids: medians over repeats, the
systems in turn, compile apart, everything in one run. `eager` is the same policy in eager PyTorch (transformers) on the
same weights, `same ids` how many tokens of the answer it shares with ours. A random model is as sure of one draft
as of another: rows of "steps" fix the forwards, the threshold is one that a share of the first drafts reaches, and a
guide agrees with nothing or with everything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from launch import cli

SIZES = {  # about as many parameters, most of them in the layers
    "1m": dict(vocab_size=2048, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2,
               head_dim=32),
    "50m": dict(vocab_size=24576, hidden_size=512, intermediate_size=1536, num_layers=12, num_heads=8, num_kv_heads=4,
                head_dim=64),
    "tiny": dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1,
                 head_dim=16),
}
# what is decoded where the command line does not say: a model of a million parameters gives short answers
SHAPES = {"1m": dict(prompt=32, new_tokens=64, block=8, steps=32)}
SHAPE = dict(prompt=64, new_tokens=128, block=32, steps=32)
SPREAD = 0.1  # of fresh weights: wide enough that confidences differ by more than rounding


def random_model(size: str) -> tuple[Any, Any]:
    """Returns a random bidirectional model of a named size."""
    from dlm_jax.models import build
    from dlm_jax.models.config import TransformerConfig

    shape = SIZES[size]
    model = build.build(TransformerConfig(
        family="a2d-qwen3", **shape, tie_word_embeddings=True, initializer_range=SPREAD,
        mask_token_id=shape["vocab_size"] - 1))
    return model, jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(0))


def random_guide(config: Any) -> tuple[Any, Any]:
    """Returns a random causal model of half the width and a quarter of the layers, of the same vocabulary."""
    from dlm_jax.models import build

    half = lambda x: max(1, x // 2)
    guide = build.build(config.replace(
        family="qwen3", logit_shift=None, hidden_size=half(config.hidden_size), num_heads=config.num_kv_heads,
        num_kv_heads=config.num_kv_heads, intermediate_size=half(config.intermediate_size),
        num_layers=max(1, config.num_layers // 4), tie_word_embeddings=False))  # tied, it would repeat what it reads
    return guide, jax.jit(build.init_params, static_argnums=0)(guide, jax.random.key(1))


def share_threshold(model: Any, params: Any, prompt: list[int], block_length: int, share: float) -> float:
    """Returns the confidence that `share` of a first block's drafts reach."""
    import dlm_jax

    mask = model.config.mask_token_id
    logits = dlm_jax.forward(model, params, [prompt + [mask] * block_length])[0]
    behind = len(prompt) - model.config.shift
    sure = jnp.max(jax.nn.softmax(logits[behind:behind + block_length]).at[:, mask].set(0.0), axis=-1)
    return float(np.quantile(np.asarray(sure), 1.0 - share))


def systems(options: argparse.Namespace, threshold: float) -> dict[str, tuple[Any, dict[str, Any] | None]]:
    """Returns each system's decoder, and the arguments of the eager loop that does the same, or None.

    Args:
      options: the command line.
      threshold: of the rows that commit by confidence.
    """
    from dlm_jax.decode import Guided
    from dlm_jax.decode import masked_presets as presets

    by_steps = dict(steps=options.steps, block_length=options.block)
    sure = dict(threshold=threshold, block_length=options.block)
    guided = dict(cache="free", block_length=options.block)
    return {
        "vanilla": (presets.llada(**by_steps), by_steps),
        "prefix cache": (presets.fast_dllm(**by_steps, threshold=None, cache="prefix"), by_steps | {"cache": "prefix"}),
        "dual cache": (presets.fast_dllm(**by_steps, threshold=None, cache="dual"), by_steps | {"cache": "dual"}),
        "FreeCache": (presets.free_cache(**by_steps, early_stop=False), by_steps | {"cache": "free"}),
        "threshold": (presets.fast_dllm(**sure, cache="none"), sure),
        "threshold, dual cache": (presets.fast_dllm(**sure, cache="dual"), sure | {"cache": "dual"}),
        "block diffusion": (presets.block_diffusion(**by_steps, early_stop="none"), by_steps | {"cache": "block"}),
        "guided, none agreed": (Guided(**guided), None),
        "guided, all agreed": (Guided(**guided, acceptance="top_k", top_k=1 << 30), None),
    }


def eager_network(model: Any, params: Any) -> Any:
    """Returns the same network in eager PyTorch; None without PyTorch, or for a body that transformers lacks."""
    try:
        from launch import eager_masked
    except ImportError:
        return None
    import dlm_jax
    from dlm_jax.models import build

    if model.config.family not in eager_masked.BODIES:
        return None
    body = model.config.replace(family=eager_masked.BODIES[model.config.family], logit_shift=None)
    with tempfile.TemporaryDirectory() as folder:
        dlm_jax.save(folder + "/model", build.build(body), params)
        return eager_masked.load(folder + "/model")


def measure(options: argparse.Namespace, stacked: tuple[Any, Any], name: str) -> dict[str, Any]:
    """Times every system on one model; returns the table as plain values.

    Args:
      options: the command line.
      stacked: the model and its parameters.
      name: of the model.
    """
    import dlm_jax
    from dlm_jax.decode import guided_model
    from dlm_jax.models import build
    from launch.benchmark import seconds

    config, new = stacked[0].config, options.new_tokens
    guide = random_guide(config)
    draw = np.random.default_rng(0)
    usable = [i for i in range(config.vocab_size) if i not in (config.mask_token_id, config.eos_token_id)]
    prompts = [draw.choice(usable, options.prompt).tolist() for _ in range(options.batch)]
    threshold = share_threshold(*stacked, prompts[0], options.block, options.block_share)
    network = eager_network(*stacked)
    plain = build.unroll(*stacked)
    pair = guided_model.join(*plain, *build.unroll(*guide))

    rows, calls = [], {}
    for system, (decoder, same) in systems(options, threshold).items():
        def ours(decoder=decoder, target=pair if system.startswith("guided") else plain):
            return dlm_jax.generate(*target, prompts, decoder, max_new_tokens=new, eos_id=-1)

        cold = ours()
        ledger = cold.ledger
        row = {"system": system, "forwards": int(ledger.after_prefill().max()),
               "positions": _a_row(ledger.positions, without="guide"), "compile_seconds": cold.seconds["compile"]}
        if ledger.forwards["guide"].any():
            row |= {"guide_forwards": int(ledger.forwards["guide"].max()),
                    "guide_positions": float(ledger.positions["guide"].mean())}
        calls[system] = ours
        if network is not None and same is not None:
            from launch import eager_masked

            def eager(same=same):
                return eager_masked.decode(network, prompts, new_tokens=new, mask_id=config.mask_token_id,
                                           shift=config.shift, **same)

            answers, row["eager_forwards"] = eager()
            agree = sum(int(np.sum(np.asarray(a) == b)) for a, b in zip(answers, cold.tokens))
            row["same_ids"] = f"{agree}/{new * len(prompts)}"
            calls[system + " eager"] = eager
        rows.append(row)
    taken = seconds(calls, options.repeats, warm_up=False)  # each has run once
    for row in rows:
        system, tokens = row["system"], new * len(prompts)
        row |= {"tokens_per_second": tokens / taken[system], "ms_per_forward": 1e3 * taken[system] / row["forwards"],
                "times_vanilla": taken["vanilla"] / taken[system]}
        if system + " eager" in taken:
            wall = taken[system + " eager"]
            row |= {"eager_tokens_per_second": tokens / wall, "times_eager": wall / taken[system],
                    "eager_ms_per_forward": 1e3 * wall / row["eager_forwards"]}
    count = lambda params: sum(x.size for x in jax.tree.leaves(params))
    return {"model": name, "parameters": count(stacked[1]), "guide_parameters": count(guide[1]),
            "batch": len(prompts), "prompt": options.prompt, "new_tokens": new, "block_length": options.block,
            "steps": options.steps, "threshold": threshold, "rows": rows}


def _a_row(positions: dict[str, np.ndarray], without: str) -> float:
    return float(sum(value.mean() for kind, value in positions.items() if kind != without))


COLUMNS = {"system": "system", "forwards": "forwards", "positions": "positions", "tokens_per_second": "tokens / s",
           "ms_per_forward": "ms a forward", "eager_tokens_per_second": "eager tokens / s",
           "eager_ms_per_forward": "eager ms a forward", "times_eager": "times eager", "same_ids": "same ids"}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table of one model."""
    r = result
    millions = lambda name: f"{r[name] / 1e6:.1f} M parameters"
    table = Table(title=f"{r['model']}: {millions('parameters')}, guide of {millions('guide_parameters')}, "
                        f"prompt {r['prompt']}, answer {r['new_tokens']}, batch {r['batch']}")
    for name, title in COLUMNS.items():
        table.add_column(title, justify="left" if name == "system" else "right", no_wrap=name == "system")
    cell = lambda v: "" if v is None else f"{v:.3g}" if isinstance(v, float) and v < 100 else v if isinstance(
        v, str) else f"{v:.0f}"
    for row in r["rows"]:
        shown = dict(row)
        for name in ("forwards", "positions"):
            if f"guide_{name}" in row:
                shown[name] = f"{cell(row[name])} + {cell(row[f'guide_{name}'])}"
        table.add_row(*(cell(shown.get(name)) for name in COLUMNS))
    console.print(table)


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(prog="python -m launch.benchmark masked", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["1m", "50m"],
                   help="random models to measure (default: 1m 50m)")
    p.add_argument("--model", metavar="PATH", help="a bidirectional model to measure in place of random ones")
    p.add_argument("--batch", type=int, default=1, help="prompts decoded at once (default: %(default)s)")
    for name, what in (("prompt", "prompt length, tokens"), ("new-tokens", "answer length, tokens"),
                       ("block", "block length, tokens"), ("steps", "forwards of an answer, where fixed")):
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=int, help=f"{what} (default: {SHAPE[key]}; for 1m {SHAPES['1m'][key]})")
    p.add_argument("--block-share", type=float, default=0.9, metavar="SHARE",
                   help="share of a first block's drafts that reach the threshold (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="timed repeats of each number (default: %(default)s)")
    p.add_argument("--output", metavar="FILE", help="write the tables as JSON")
    return p


def shaped(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Returns the options with the shape that a model of this name has where they leave it open."""
    default = SHAPE | SHAPES.get(name, {})
    return argparse.Namespace(**vars(options) | {
        key: default[key] if getattr(options, key) is None else getattr(options, key) for key in default})


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that make no benchmark."""
    for name in ("batch", "prompt", "new_tokens", "block", "steps", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    blocks, rest = divmod(options.new_tokens, options.block)
    if rest:
        raise ValueError(f"--new-tokens {options.new_tokens}: a multiple of --block {options.block}")
    if options.steps % blocks or options.steps > options.new_tokens:
        raise ValueError(f"--steps {options.steps}: a multiple of the {blocks} blocks, at most {options.new_tokens}")
    if not 0 < options.block_share < 1:
        raise ValueError(f"--block-share {options.block_share}: between 0 and 1")


def check_model(config: Any, options: argparse.Namespace) -> None:
    """Raises ValueError for a model that no masked-diffusion decoder takes."""
    if not config.bidirectional or config.mask_token_id is None:
        what = "has no mask token" if config.bidirectional else "is causal"
        raise ValueError(f"--model {options.model}: this {config.family} model {what}; expected a masked-diffusion one "
                         "(launch.convert_weights to-diffusion makes one)")
    if options.prompt + options.new_tokens > config.max_position_embeddings:
        raise ValueError(f"--prompt {options.prompt} and --new-tokens {options.new_tokens} exceed the model's "
                         f"{config.max_position_embeddings} positions")


def run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Does what the command line says; `arguments` is what was typed."""
    from launch.benchmark import machine

    result = {"command": "python -m launch.benchmark " + " ".join(["masked", *arguments]), "machine": machine(),
              "models": []}
    names = [options.model] if options.model else options.size
    each = {name: shaped(options, name) for name in names}
    for name in names:
        check(each[name])
    for name in names:
        if options.model:
            import dlm_jax

            stacked = dlm_jax.load(options.model, dtype=jnp.float32)
            check_model(stacked[0].config, each[name])
        else:
            stacked = random_model(name)
        result["models"].append(measure(each[name], stacked, Path(name).name))
        show(result["models"][-1], Console(width=None if sys.stdout.isatty() else 120))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    options = parser().parse_args(arguments)
    return cli.exit_code(lambda: run(options, arguments))
