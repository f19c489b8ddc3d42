"""Answer prompts with any checkpoint and any decoder.

Examples:

    # one question, watched while it is decoded (drafts grey, drafted tokens orange, autoregressive ones plain)
    python -m launch.decode --model runs/quickstart/models/refusion --decoder refusion --stream \\
        --prompt "Tom has 3 apples ..."

    # the paper's settings for a benchmark (Table 7), one prompt a line on standard input, answers as JSON lines
    cat questions.txt | python -m launch.decode --model PATH --decoder refusion --preset gsm8k > answers.jsonl

    # a diffusion model whose drafts a small autoregressive model, of the same tokenizer or another, accepts or rejects
    python -m launch.decode --model PATH --decoder guided --guide Qwen/Qwen2.5-0.5B-Instruct --prompts questions.txt

    # a hybrid-thinking model without its thoughts, sharded over 8 devices
    python -m launch.decode --model Qwen/Qwen3-8B --chat enable_thinking=false --mesh data=2,tensor=4 \\
        --prompts questions.txt

    # a file of rows ({"question": ...}, {"query": ...}, {"messages": [...]} or {"prompt": ...}), in batches of 16
    python -m launch.decode --model PATH --decoder autoregressive --set temperature=0.7 --set top_p=0.9 \\
        --prompts rows.jsonl --batch-size 16 --output answers.jsonl

`--decoder NAME --set field=value` reaches every hyperparameter; `--list` prints them with their defaults, and presets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from dlm_jax.evals.screen import Screen
from launch import cli, decoders


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = cli.parser("python -m launch.decode", __doc__)
    decoders.add_options(p, batch_size=8)
    p.add_argument("--prompt", help="one prompt")
    p.add_argument("--prompts", metavar="FILE", help="prompts, one a line (.txt) or JSON rows (.jsonl, .json)")
    p.add_argument("--raw", action="store_true", help="use prompts as they are, without the chat template")
    p.add_argument("--eos-id", type=int, help="token that ends an answer, -1 for none (default: the tokenizer's)")
    p.add_argument("--mask-id", type=int, help="mask token of drafts (default: the tokenizer's)")
    p.add_argument("--stream", action="store_true", help="show the answers while they are decoded, one by one")
    p.add_argument("--output", metavar="FILE", help="write answers as JSON lines (default: standard output)")
    p.add_argument("--list", action="store_true", help="print every decoder, its hyperparameters and presets, and stop")
    return p


def read_prompts(options: argparse.Namespace, stdin: Any) -> list[list[dict[str, str]]]:
    """Returns each prompt as chat messages.

    Raises:
      ValueError: two sources, an empty one, or a malformed line (file and line number).
    """
    from dlm_jax.data import sources

    if options.prompt is not None and options.prompts is not None:
        raise ValueError("--prompt and --prompts exclude each other: give one")
    if options.prompt is not None:
        return [sources.user_prompt(options.prompt, "--prompt")]
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise ValueError(f"--prompts {options.prompts}: no such file")
    name = options.prompts or "standard input"
    raw = Path(name).read_bytes() if options.prompts else stdin.buffer.read()
    if name.lower().endswith((".jsonl", ".json")):
        found = sources.parse_file(raw, name, sources.parse_prompt)
    else:
        lines = enumerate(sources.decode_text(raw, name).split("\n"), 1)
        found = [sources.user_prompt(line, f"{name}:{number}") for number, line in lines if line.strip()]
    if not found:
        raise ValueError(f"{name} holds no prompts: one a line is expected")
    return found


def run(options: argparse.Namespace) -> None:
    """Does what the command line says.

    Args:
      options: from `parser`.

    Raises:
      ValueError: bad input, named, before the model is read where that can be.
    """
    if options.list:
        print(decoders.catalogue())
        return
    _, chosen = decoders.chosen(options)
    cli.check_counts(options, "batch_size", "max_new_tokens")
    if options.stream and options.output:
        raise ValueError("--stream shows answers and --output writes them: give one")
    messages = read_prompts(options, sys.stdin)
    if options.output:
        with _opened(options.output, "a"):  # now, rather than after the work
            pass
    subject = decoders.load(options)
    prompts = [subject.encode(each, options.raw) for each in messages]
    asked = [each[-1]["content"] for each in messages]
    tokenizer, config = subject.tokenizer, subject.model.config
    first = lambda *ids: next((i for i in ids if i is not None), None)
    ask = dict(decoder=chosen.decoder.reading(tokenizer), max_new_tokens=chosen.max_new_tokens, seed=options.seed,
               eos_id=first(options.eos_id, tokenizer.eos_token_id, config.eos_token_id),
               mask_id=first(options.mask_id, tokenizer.mask_token_id, config.mask_token_id))
    if options.stream:
        show(subject, prompts, asked, ask)
    else:
        answer(subject, prompts, asked, ask, options)


def show(subject: decoders.Subject, prompts: list[Any], asked: list[str], ask: dict[str, Any]) -> None:
    """Decodes prompts, in words `asked`, one by one on the screen; `ask` are further arguments of `stream`."""
    import dlm_jax

    console = Console(stderr=True)
    for i, (prompt, words) in enumerate(zip(prompts, asked)):
        console.rule(words[:60])
        events = dlm_jax.stream(subject.model, subject.params, prompt, first_row=i, **ask)
        screen = Screen(subject.tokenizer, Console(file=sys.stdout), eos_id=ask["eos_id"], limit=ask["max_new_tokens"])
        forwards = screen.show(events)
        console.print(f"[bright_black]{forwards} forwards after prefill[/]")


def answer(subject: decoders.Subject, prompts: list[Any], asked: list[str], ask: dict[str, Any],
           options: argparse.Namespace) -> None:
    """Decodes prompts in batches and writes JSON lines; `ask` are further arguments of `generate`."""
    import dlm_jax

    with Console(stderr=True).status(f"decoding {len(prompts)} prompts"):
        out = dlm_jax.generate(subject.model, subject.params, prompts,
                               batch_size=min(options.batch_size, len(prompts)), **ask)
    forwards = out.ledger.after_prefill()
    with _opened(options.output, "w") if options.output else contextlib.nullcontext(sys.stdout) as sink:
        for i, (words, tokens) in enumerate(zip(asked, out.tokens)):
            row = {"prompt": words, "answer": subject.tokenizer.decode(tokens, skip_special_tokens=True),
                   "tokens": int(out.ledger.committed[i]), "forwards": int(forwards[i])}
            print(json.dumps(row, ensure_ascii=False), file=sink, flush=True)
    cli.log.info("%d tokens, %.2f a forward, %.1f a second (compile %.1f s not counted)", out.ledger.committed.sum(),
                 out.ledger.tokens_per_forward(), out.tokens_per_second, out.seconds["compile"])


def _opened(path: str, mode: str) -> TextIO:
    try:
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror})") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code, 2 for bad input."""
    return cli.main(parser().parse_args, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
