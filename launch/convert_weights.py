"""Converts checkpoints: Hugging Face to orbax and back, between dtypes, from an AR model to a seed of another kind."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import cli

DTYPES = ("float32", "bfloat16", "float16")
SEEDS = {"to-refusion": "ReFusion", "to-orthrus": "Orthrus", "to-diffusion": "masked-diffusion", "to-flare": "FLARE"}
MASK = "<|mask|>"

_HELP = """\
Converts checkpoints. SOURCE is a directory or, where Hugging Face ones are meant, a hub id; OUT must not exist.

examples:
  python -m launch.convert_weights to-refusion Qwen/Qwen3-0.6B seeds/refusion --dtype float32
                          a seed for ReFusion training: the AR weights, and a mask token where there is none
  python -m launch.convert_weights to-orthrus Qwen/Qwen3-0.6B seeds/orthrus
                          a seed for Orthrus training: the AR model and a copy of its attention weights beside them
  python -m launch.convert_weights to-diffusion Qwen/Qwen3-0.6B seeds/llada --shift 0
                          a seed for masked or block diffusion: the AR weights with every token seeing every other
  python -m launch.convert_weights to-flare Qwen/Qwen3.5-2B seeds/flare
                          a seed for FLARE training: the AR weights, dense or hybrid, and a mask token
  python -m launch.convert_weights to-hf runs/refusion exports/refusion --dtype bfloat16
                          the newest checkpoint of a training run as a directory that transformers reads
  python -m launch.convert_weights to-orbax Qwen/Qwen3-0.6B seeds/orbax --dtype bfloat16
                          orbax arrays, which several hosts read in parallel
  python -m launch.convert_weights cast exports/refusion exports/half --dtype bfloat16
"""


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    result = cli.parser("python -m launch.convert_weights", _HELP)
    commands = result.add_subparsers(dest="command", required=True)

    def command(name: str, what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what)
        sub.add_argument("source", metavar="SOURCE", help="what to convert")
        sub.add_argument("out", metavar="OUT", type=Path, help="directory to make")
        sub.add_argument("--dtype", choices=DTYPES, help="of the result; default as stored")
        return sub

    command("to-orbax", "Hugging Face directory or hub id -> orbax arrays")
    to_hf = command("to-hf", "orbax arrays or a training run -> Hugging Face directory")
    to_hf.add_argument("--step", type=int, help="checkpoint of a run; default the newest")
    to_hf.add_argument("--tokenizer", metavar="DIR", help="directory whose tokenizer and further config fields are "
                       "kept; default SOURCE's own, where it has them")
    command("cast", "Hugging Face directory or hub id -> the same in another dtype")
    seeds = {}
    for name, kind in SEEDS.items():
        seed = seeds[name] = command(
            name, f"autoregressive Hugging Face directory or hub id -> seed for {kind} training")
        seed.add_argument("--mask-id", type=int, metavar="ID",
                          help="id of the mask token: a free one of the tokenizer, e.g. 151670 for Qwen3 as the "
                          "released ReFusion code has it; default the tokenizer's own or next. Without a tokenizer any "
                          "id; one beyond the vocabulary is added")
    seeds["to-orthrus"].add_argument(
        "--block-size", type=int, default=32, metavar="N",
        help="tokens of the blocks it is to be trained on, for config.json; free when decoding (default: %(default)s)")
    seeds["to-diffusion"].add_argument(
        "--shift", type=int, choices=(0, 1), default=1,
        help="1: outputs go on predicting the next token, as Dream's do; 0: they learn to predict their own, as "
        "LLaDA's do and block diffusion needs (default: %(default)s)")
    return result


def convert(args: argparse.Namespace) -> str:
    """Does what the command line says.

    Args:
      args: from `parser`.

    Returns:
      A sentence about what was made.

    Raises:
      ValueError: bad input, named.
    """
    import jax

    from dlm_jax.io import folders, hf, orbax_params
    from dlm_jax.models import build
    from dlm_jax.models import convert as conversion

    folders.check_free(args.out)  # before minutes are spent on loading
    if args.command == "to-hf":
        keep = args.tokenizer or own_tokenizer(Path(args.source).expanduser())
        folders.check_sources(keep, None)
        config, params = orbax_params.stream(args.source, dtype=args.dtype, step=args.step)
        if keep is None or not folders.has_tokenizer(keep):
            print(f"warning: {keep or args.source} has no tokenizer, so {args.out} gets none; "
                  "--tokenizer DIR names one", file=sys.stderr)
        hf.save(args.out, config, params, tokenizer_from=keep)
    else:
        if args.command == "cast" and args.dtype is None:
            raise ValueError(f"cast needs --dtype, one of {', '.join(DTYPES)}")
        source = folders.resolve(args.source)
        config = hf.stored_config(source, folders.load_config(source))
        if args.command in SEEDS:
            tokenizer, mask_id, fresh = mask_token(source, config, args.mask_id)
        if args.command == "to-orthrus":
            if args.block_size < 2:
                raise ValueError(f"--block-size {args.block_size}: expected at least 2 tokens, one given and one "
                                 "masked")
            conversion.init_from_ar(build.build(config), {}, 0)  # refuses what has no AR view, before weights are read
        if args.command == "to-flare":
            check_causal(config)
        if args.command == "to-refusion" and config.recurrent:
            raise ValueError(f"{args.source}: ReFusion reorders tokens, which the recurrent layers of a "
                             f"{config.family} model cannot follow; take a model of attention alone, or to-flare")
        if args.command == "to-diffusion":
            config = conversion.denoiser(config, args.shift)
        params = hf.load_params(source, config, dtype=args.dtype)
        if args.command == "to-orbax":
            orbax_params.save(args.out, config, params, tokenizer_from=source)
        elif args.command == "cast":
            hf.save(args.out, config, params, tokenizer_from=source)
        else:
            if args.command == "to-orthrus":  # the AR view stays as it is: no row that it has is written to
                fresh = fresh and mask_id >= config.vocab_size
            added = max(0, mask_id + 1 - config.vocab_size)
            config, params = conversion.with_mask(config, params, mask_id, fresh)
            made = f"{args.out}: {count(params)}, mask token id {mask_id}"
            if args.command == "to-orthrus":
                model, params = conversion.init_from_ar(build.build(config), params)
                config, share = model.config.replace(block_size=args.block_size), build.parameter_shares(model)
                made = (f"{args.out}: {count(params)}, {share['diffusion'] / share['total']:.0%} of them in the "
                        f"diffusion view, mask token id {mask_id}")
                if added:
                    made += (f"; the vocabulary grew to {config.vocab_size} ids, and the AR view gives the new ones "
                             "some of its probability (its greedy answers are the same)")
            if args.command == "to-diffusion":
                made += f", family {config.family}, shift {config.shift}"
            hf.save(args.out, config, params, tokenizer_from=tokenizer, config_from=source)
            return made
    return f"{args.out}: {count(params)}, {jax.tree.leaves(params)[0].dtype}"


def check_causal(config: Any) -> None:
    """Raises ValueError for a model that does not predict the next token."""
    if config.bidirectional or config.dual:
        raise ValueError(f"a {config.family} model is not autoregressive: FLARE continues a causal one, such as "
                         "Qwen3 or Qwen3.5")


def own_tokenizer(source: Path) -> Path | None:
    """Returns the directory of an orbax directory's or a run's own tokenizer, None where there is none."""
    from dlm_jax.io import folders, orbax_params

    places = (source if (source / orbax_params.PARAMS).is_dir() else None, source / folders.RUN_TOKENIZER)
    return next((place for place in places if place is not None and place.is_dir()), None)


def count(params: Any) -> str:
    """Returns the number of parameters, readable."""
    import jax

    return f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:,.1f} M parameters"


def mask_token(source: Path, config: Any, mask_id: int | None) -> tuple[Any, int, bool]:
    """Finds the mask token of a directory, or adds one to its tokenizer.

    Args:
      source: Hugging Face directory.
      config: its `TransformerConfig`.
      mask_id: what the user said, or None.

    Returns:
      The tokenizer with a mask token (None where the directory has no tokenizer), the mask token's id, and whether
      the token is new to the model.

    Raises:
      ValueError: no tokenizer and no id, an id that is not the tokenizer's or not free, or one that ends sequences.
    """
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.io import folders

    tokenizer, ends = None, {config.eos_token_id}
    if folders.has_tokenizer(source):
        tokenizer = tokenizers.load(source)
        before = len(tokenizer)
        if tokenizer.mask_token_id is None:
            if mask_id is not None and MASK not in tokenizer.get_vocab():
                reserve(tokenizer, config.vocab_size, mask_id)
            tokenizer.add_special_tokens({"mask_token": MASK})
        own = tokenizer.mask_token_id
        if mask_id not in (None, own):
            raise ValueError(f"--mask-id {mask_id}: the tokenizer's mask token {tokenizer.mask_token!r} has id {own}; "
                             "leave --mask-id out")
        mask_id, fresh = own, own >= min(before, config.vocab_size)
        ends.add(tokenizer.eos_token_id)
    else:
        mask_id = config.mask_token_id if mask_id is None else mask_id
        if mask_id is None or mask_id < 0:
            raise ValueError(f"{source} has no tokenizer: --mask-id {mask_id} must be the id of its mask token, or "
                             f"{config.vocab_size} to add one")
        fresh = mask_id >= config.vocab_size
    if mask_id in ends:
        raise ValueError(f"id {mask_id} ends sequences and cannot be the mask token too; give another --mask-id")
    return tokenizer, mask_id, fresh


def reserve(tokenizer: Any, vocab_size: int, mask_id: int) -> None:
    """Fills a tokenizer, in place, with reserved special tokens until its next token gets an id.

    Tokenizers number their tokens without gaps.

    Args:
      tokenizer: one without a mask token.
      vocab_size: ids the model has, often more than the tokenizer.
      mask_id: the id.

    Raises:
      ValueError: the id is another token's, or leaves the model's vocabulary.
    """
    first = len(tokenizer)
    last = max(first, vocab_size - 1)
    accepted = f"accepted: {first} to {last}, or leave --mask-id out for {first}"
    if 0 <= mask_id < first:
        taken = tokenizer.convert_ids_to_tokens(mask_id)
        raise ValueError(f"--mask-id {mask_id}: that is the token {taken!r}; {accepted}")
    if not first <= mask_id <= last:
        raise ValueError(f"--mask-id {mask_id}: outside the model's vocabulary of {vocab_size} ids; {accepted}")
    tokenizer.add_tokens([f"<|reserved_{i}|>" for i in range(first, mask_id)], special_tokens=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 2 for bad input."""
    return cli.main(parser().parse_args, lambda args: print(convert(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
