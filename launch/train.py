"""Train a model on rows of text, with any objective.

Examples:

    # seconds a step on a laptop: a tiny autoregressive model from scratch, its tokenizer trained on the same rows
    python -m launch.train --config tiny:autoregressive --data rows.jsonl --run-dir runs/seed

    # that model turned into a ReFusion model
    python -m launch.train --config tiny:refusion --init runs/seed/model --data rows.jsonl --run-dir runs/refusion

    # or given a second, parallel view (Orthrus): only that one is trained
    python -m launch.convert_weights to-orthrus runs/seed/model seeds/orthrus --block-size 8
    python -m launch.train --config orthrus:tiny --init seeds/orthrus --data rows.jsonl --run-dir runs/orthrus

    # or into a masked-diffusion model: Dream's way, LLaDA's (--shift 0, llada:tiny), or by blocks
    python -m launch.convert_weights to-diffusion runs/seed/model seeds/diffusion
    python -m launch.train --config dream:tiny --init seeds/diffusion --data rows.jsonl --run-dir runs/dream
    python -m launch.convert_weights to-diffusion runs/seed/model seeds/blocks --shift 0
    python -m launch.train --config block_diffusion:tiny --init seeds/blocks --data rows.jsonl --run-dir runs/blocks

    # a diffusion model that decodes both ways (FLARE), in packed rows: one document after another, no padding between
    python -m launch.train --config flare:tiny --init runs/seed/model --data rows.jsonl --run-dir runs/flare

    # any objective on packed rows, here of two files, four rows of the first for one of the second
    python -m launch.train --config tiny:refusion --init runs/seed/model --run-dir runs/mixed --pack \\
        --data rows.jsonl --data more.jsonl --set weights=4,1

    # stopped by ctrl-c, SIGTERM, a crash or kill -9: the same command and --resume continue bit for bit
    python -m launch.train --config tiny:refusion --init runs/seed/model --data rows.jsonl --run-dir runs/refusion \\
        --resume

    # any field of the configuration; `--show` prints them all, and stops
    python -m launch.train --config tiny:refusion --show \\
        --set train.learning_rate=1e-4 --set train.objective.slot_sizes=4,8

    # the paper's run on a slice of 64 chips, 16 ways of rows and 4 of heads: the second command on every host
    python -m launch.convert_weights to-refusion Qwen/Qwen3-8B seeds/refusion
    python -m launch.train --config refusion:qwen3_8b --init seeds/refusion --data rows.jsonl --run-dir /shared/run \\
        --set train.mesh.fsdp=16 --set train.mesh.tensor=4 --distributed

Rows of a JSONL, JSON, Parquet, Arrow or CSV file, or of a Hub dataset, are {"messages": [...]},
{"query": ..., "response": ...} or {"question": ..., "answer": ...}.
RUN_DIR gets config.json, tokenizer/, metrics.jsonl, tensorboard/, checkpoints/ and, once finished, the Hugging Face
directory model/; `python -m launch.convert_weights to-hf RUN_DIR OUT` makes one of an unfinished run. Exit codes: 0
finished, 1 loss not finite, 2 bad input, 75 stopped by a signal after saving.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch import cli
from launch.convert_weights import SEEDS

STOPPED = 75  # "temporary failure, try again" of sysexits.h


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.train", __doc__)
    p.add_argument("--config", required=True, metavar="NAME",
                   help="file:experiment of configs/, e.g. tiny:refusion; a wrong name lists them")
    p.add_argument("--data", metavar="FILE", action="append", default=[],
                   help="training rows, e.g. rows.jsonl; may be repeated with --pack")
    p.add_argument("--pack", action="store_true",
                   help="short for --set pack=true: several rows of the data in one of a batch")
    p.add_argument("--init", metavar="PATH",
                   help="Hugging Face directory or hub id to start from, e.g. runs/seed/model; "
                   "default a fresh model of the configuration's shape")
    p.add_argument("--run-dir", metavar="DIR", type=Path, help="directory of this run alone, e.g. runs/refusion")
    p.add_argument("--resume", action="store_true", help="continue the run in --run-dir, or start it")
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE",
                   help="override a field, e.g. train.batch_size=64; may be repeated")
    p.add_argument("--show", action="store_true", help="print the configuration and stop")
    p.add_argument("--distributed", action="store_true", help="join the other hosts of the job first")
    return p


def start(options: argparse.Namespace, experiment: Any, rows: Iterable[Any]) -> tuple[Any, Any, Any]:
    """Makes what training starts from.

    Args:
      options: the command line.
      experiment: a `configs.Experiment`.
      rows: training rows, of all files.

    Returns:
      The module, its parameters and the tokenizer.

    Raises:
      ValueError: a checkpoint without weights or tokenizer, or nothing to start from.
    """
    import jax

    from dlm_jax import api
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.io import folders
    from dlm_jax.models import build
    from dlm_jax.train import sharding

    mesh = sharding.make_mesh(experiment.train.mesh)
    if options.init is not None:
        folder = folders.resolve(options.init)
        tokenizer = tokenizers.load(folder)
        model, params = api.load(folder, mesh=mesh)
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(f"--init {options.init}: its tokenizer has {len(tokenizer)} ids, its model only "
                             f"{model.config.vocab_size}")
        return model, params, tokenizer
    if experiment.model is None:
        raise ValueError(f"--config {options.config} has no model to make from scratch: give --init PATH")
    tokenizer = tokenizers.train(tokenizers.texts_of(rows), experiment.vocab_size)
    # a multiple that mesh axes divide; ids beyond the tokenizer's are never used
    size = -(-len(tokenizer) // 64) * 64
    model = build.build(experiment.model.replace(
        vocab_size=size, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id))
    init = jax.jit(build.init_params, static_argnums=0, out_shardings=sharding.params(model, mesh))
    return model, init(model, jax.random.key(experiment.train.seed)), tokenizer


def with_ids(experiment: Any, model: Any, tokenizer: Any) -> Any:
    """Returns the experiment with the model's mask and EOS ids, where its objective needs them and names none."""
    objective, known = experiment.train.objective, {}
    for name, here in (("mask_id", "mask_token_id"), ("eos_id", "eos_token_id")):
        if name not in objective.ids or getattr(objective, name) is not None:
            continue
        known[name] = getattr(model.config, here)
        known[name] = getattr(tokenizer, here) if known[name] is None else known[name]
    if "mask_id" in known and known["mask_id"] is None and objective.masks:
        made = f"to-{objective.name}"
        made = made if made in SEEDS else "to-diffusion"
        raise ValueError("the model and its tokenizer have no mask token: add one with `python -m "
                         f"launch.convert_weights {made}`, or name its id with --set train.objective.mask_id=ID")
    objective = dataclasses.replace(objective, **known)
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, objective=objective))


def settled(model: Any, objective: Any, length: int) -> Any:
    """Returns the module whose config says what it is about to be trained on, where the objective has blocks."""
    found = objective.settles()
    if found.get("block_size", 0) > length:
        raise ValueError(f"length = {length}: rows have no room for blocks of {found['block_size']} tokens; raise "
                         "length, or lower train.objective.block_size")
    return model.clone(config=model.config.replace(**found)) if found else model


def pipeline_of(experiment: Any, files: Sequence[Sequence[Any]], tokenizer: Any) -> Any:
    """Returns the iterator of the run's batches.

    Args:
      experiment: a `configs.Experiment`.
      files: training rows of each.
      tokenizer: the run's.

    Raises:
      ValueError: several files without packing, or what the iterator refuses.
    """
    import jax

    from dlm_jax.data.packing import Packer
    from dlm_jax.data.pipeline import Pipeline

    config = experiment.train
    common = dict(batch_size=config.batch_size, length=experiment.length, seed=config.seed,
                  process_index=jax.process_index(), process_count=jax.process_count())
    if experiment.pack:
        return Packer(files, tokenizer, align=config.objective.unit, weights=experiment.weights, **common)
    return Pipeline(files[0], tokenizer, **common)


def run(options: argparse.Namespace) -> int:
    """Does what the command line says.

    Args:
      options: from `parser`.

    Returns:
      The exit code.

    Raises:
      ValueError: bad input, named.
    """
    import configs

    experiment = configs.load(options.config, options.settings + ["pack=true"] * options.pack)
    if options.show:
        print(json.dumps(dataclasses.asdict(experiment), indent=2))
        return 0
    if not options.data or options.run_dir is None:
        raise ValueError("give --data FILE (rows to train on) and --run-dir DIR (where the run lives)")
    if len(options.data) > 1 and not experiment.pack:
        raise ValueError(f"{len(options.data)} files of --data are mixed by packed rows: give --pack too, or one file")
    if any(setting.startswith("train.steps=") for setting in options.settings) and experiment.epochs is not None:
        raise ValueError(f"epochs = {experiment.epochs:g} decides the steps: with train.steps give --set epochs=none "
                         "too")

    import jax

    if options.distributed:
        jax.distributed.initialize()

    from dlm_jax import api
    from dlm_jax.data import sources
    from dlm_jax.io import folders
    from dlm_jax.train import loop, sharding

    sharding.check_batch(experiment.train, sharding.make_mesh(experiment.train.mesh))
    files = [sources.read_rows(name) for name in options.data]
    if not experiment.pack:
        experiment = experiment.with_steps(len(files[0]))
    model, params, tokenizer = start(options, experiment, itertools.chain(*files))
    experiment = with_ids(experiment, model, tokenizer)
    model = settled(model, experiment.train.objective, experiment.length)
    pipeline = pipeline_of(experiment, files, tokenizer)
    if experiment.pack:
        experiment = experiment.with_steps(len(pipeline))
    config = experiment.train
    say = cli.log.info if jax.process_index() == 0 else lambda *_: None
    report = pipeline.report()
    size = sum(x.size for x in jax.tree.leaves(params)) / 1e6
    packed = f" packed into {report['packed_rows']}" if experiment.pack else ""
    say(f"{report['rows']} rows{packed}: {report['truncated']} cut to {experiment.length} tokens, {report['empty']} of "
        f"them left without a response; padding {report['padding_share']:.0%}. {size:,.1f} M parameters, "
        f"{config.steps} steps of {config.batch_size} rows on {jax.device_count()} devices")
    result = loop.fit(model, params, pipeline, config, options.run_dir, resume=options.resume, tokenizer=tokenizer)
    if not result.finished:
        say(f"stopped at step {result.step} of {config.steps}; the same command with --resume continues from there")
        return STOPPED
    made = options.run_dir / "model"
    source = tokenizer if options.init is None else folders.resolve(options.init)
    as_given = jax.tree.map(lambda trained, given: trained.astype(given.dtype), result.params, params)
    api.save(made, model, as_given, tokenizer_from=source, overwrite=True)
    say(f"loss {result.history[-1]['loss']:.4f} at step {result.step}; the model is in {made}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code."""
    return cli.main(parser().parse_args, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
