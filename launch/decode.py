"""Answer prompts with any checkpoint and any decoder.

Examples:

    # one question, watched while it is decoded (drafts grey, drafted tokens orange, autoregressive ones plain)
    python -m launch.decode --model runs/quickstart/models/refusion --decoder refusion --stream \\
        --prompt "Tom has 3 apples ..."

    # the paper's settings for a benchmark (Table 7), one prompt a line on standard input, answers as JSON lines
    cat questions.txt | python -m launch.decode --model PATH --decoder refusion --preset gsm8k > answers.jsonl

    # a diffusion model whose drafts a small autoregressive model, of the same tokenizer or another, accepts or rejects
    python -m launch.decode --model PATH --decoder guided --guide Qwen/Qwen2.5-0.5B-Instruct --prompts questions.txt

    # a file of rows ({"question": ...}, {"query": ...}, {"messages": [...]} or {"prompt": ...}), in batches of 16
    python -m launch.decode --model PATH --decoder autoregressive --set temperature=0.7 --set top_p=0.9 \\
        --prompts rows.jsonl --batch-size 16 --output answers.jsonl

`--decoder NAME --set field=value` reaches every hyperparameter; `--list` prints them with their defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launch import cli


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m launch.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", metavar="PATH", help="Hugging Face directory or hub id (safetensors)")
    add_decoder(p)
    p.add_argument("--prompt", help="one prompt")
    p.add_argument("--prompts", metavar="FILE", help="prompts, one a line (.txt) or JSON rows (.jsonl, .json)")
    p.add_argument("--raw", action="store_true", help="use prompts as they are, without the chat template")
    p.add_argument("--max-new-tokens", type=int, help="longest answer, tokens (default: the preset's, else 256)")
    p.add_argument("--batch-size", type=int, default=8, help="prompts decoded at once (default: %(default)s)")
    p.add_argument("--eos-id", type=int, help="token that ends an answer, -1 for none (default: the tokenizer's)")
    p.add_argument("--mask-id", type=int, help="mask token of drafts (default: the tokenizer's)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (default: as stored)")
    p.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    p.add_argument("--stream", action="store_true", help="show the answers while they are decoded, one by one")
    p.add_argument("--output", metavar="FILE", help="write answers as JSON lines (default: standard output)")
    p.add_argument("--list", action="store_true", help="print every decoder and its hyperparameters, and stop")
    return p


def add_decoder(p: argparse.ArgumentParser) -> None:
    """Adds the options that choose a decoder, see `make_decoder` and `with_guide`."""
    p.add_argument("--decoder", default="autoregressive", help="decoder name (default: %(default)s)")
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE",
                   help="hyperparameter of the decoder; may be repeated")
    p.add_argument("--preset", metavar="NAME", help="settings that a file of configs/ names, e.g. refusion:gsm8k")
    p.add_argument("--guide", metavar="PATH", help="autoregressive model that judges the drafts of --decoder guided")


def presets() -> dict[str, dict[str, Any]]:
    """Returns the settings under `DECODING` in the files of `configs`, as "file:name"."""
    import configs

    modules = (importlib.import_module(f"configs.{found.name}") for found in pkgutil.iter_modules(configs.__path__))
    return {f"{module.__name__.split('.')[-1]}:{name}": values
            for module in modules for name, values in getattr(module, "DECODING", {}).items()}


def make_decoder(name: str, settings: list[str], preset: str | None = None) -> tuple[Any, int | None]:
    """Builds a decoder from names and "field=value" strings.

    Args:
      name: key of `dlm_jax.decode.DECODERS`.
      settings: overrides.
      preset: one of `presets`, whose file need not be named where no other has the name; or None.

    Returns:
      The decoder, and the preset's generation length in tokens (None without one).

    Raises:
      ValueError: unknown names, or values of another type.
    """
    from dlm_jax.decode import DECODERS

    if name not in DECODERS:
        raise ValueError(f"decoder {name!r} is not known; accepted: {sorted(DECODERS)}")
    kind, values, length = DECODERS[name], {}, None
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if preset is not None:
        fitting = {full: found for full, found in presets().items() if found.keys() <= {*fields, "max_new_tokens"}}
        chosen = [full for full in fitting if preset in (full, full.split(":")[1])]
        if len(chosen) != 1:
            raise ValueError(f"preset {preset!r} is not known for decoder {name!r}; accepted with it: "
                             f"{sorted(fitting)}")
        values = dict(fitting[chosen[0]])
        length = values.pop("max_new_tokens", None)
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not equals or field not in fields:
            raise ValueError(f"--set {setting}: expected FIELD=VALUE with one of {sorted(fields)}")
        values[field] = _value(fields[field], text)
    return kind(**values), length


def _value(field: dataclasses.Field, text: str) -> Any:
    first, *others = field.type.split(" | ")
    kind = first if field.default is None else type(field.default).__name__
    optional = ["None"] if "None" in others else []
    parse = {"int": int, "float": float, "str": str, "bool": lambda t: {"true": True, "1": True, "false": False,
                                                                        "0": False}[t.lower()]}[kind]
    try:
        return None if optional and text.lower() == "none" else parse(text)
    except (ValueError, KeyError):
        kinds = " or ".join([kind, *map(str.lower, optional)])
        raise ValueError(f"--set {field.name}={text}: expected a {kinds}, as in {field.name}={field.default}") from None


def check_guide(decoder: str, guide: str | None) -> None:
    """Raises ValueError for a decoder that lacks its guide, or a guide that nobody asks."""
    if (decoder == "guided") != (guide is not None):
        raise ValueError("--decoder guided needs --guide PATH, an autoregressive model" if guide is None else
                         f"--guide {guide}: --decoder {decoder} takes no guide; accepted with --decoder guided")


def with_guide(model: Any, params: Any, tokenizer: Any, guide: str | None, dtype: Any = None) -> tuple[Any, Any]:
    """Joins a drafter and its guide, whose tokenizers may differ, and says how much of a vocabulary they share.

    Args:
      model, params, tokenizer: the drafter's.
      guide: directory or hub id; None leaves the drafter alone.
      dtype: as in `dlm_jax.load`.

    Returns:
      The pair as one model, and its parameters.

    Raises:
      ValueError: a guide that cannot guide this drafter.
    """
    if guide is None:
        return model, params
    import dlm_jax
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.data import vocabulary_map
    from dlm_jax.decode import guided_model
    from dlm_jax.io import folders

    guide_model, guide_params = dlm_jax.load(guide, dtype=dtype)
    shared = vocabulary_map.build(
        tokenizer, tokenizers.load(folders.resolve(guide)), draft_size=model.config.vocab_size,
        guide_size=guide_model.config.vocab_size)
    Console(stderr=True).print(f"the guide knows {shared.coverage():.1%} of the drafter's tokens")
    return guided_model.join(model, params, guide_model, guide_params, shared)


def read_prompts(options: argparse.Namespace, stdin: TextIO) -> list[list[dict[str, str]]]:
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


class Screen:
    """An answer on a terminal while it is being decoded."""

    STYLE = {"drafted": "dark_orange", "autoregressive": "default", "draft": "bright_black"}

    def __init__(self, tokenizer: Any, console: Console, *, eos_id: int | None, limit: int):
        self._tokenizer, self._console, self._eos_id, self._limit = tokenizer, console, eos_id, limit
        self._shown: dict[int, tuple[int, str]] = {}
        self._finished = False

    def apply(self, event: Any) -> None:
        """Takes one event in; an answer ends with its first committed end of sequence, or with the limit."""
        if event.committed:
            self._forget_drafts()
        for place, token, origin in zip(event.positions, event.tokens, event.origin):
            self._shown[place] = (token, origin if event.committed else "draft")
        ends = [p for p, (token, style) in self._shown.items() if style != "draft" and token == self._eos_id]
        end = min([self._limit - 1, *ends])
        self._shown = {p: shown for p, shown in self._shown.items() if p <= end}

    def finish(self) -> None:
        """Leaves the answer alone on the canvas."""
        self._forget_drafts()
        self._finished = True

    def _forget_drafts(self) -> None:
        self._shown = {p: shown for p, shown in self._shown.items() if shown[1] != "draft"}

    def spans(self) -> list[tuple[str, str]]:
        """Returns the texts on the canvas now and their styles."""
        from dlm_jax.data import tokenizer as tokenizers

        out, last = [], -1
        # tokens that follow each other are decoded together; only drafts show their special tokens
        run = lambda item: (item[1][1][1] == "draft", 0 if self._finished else item[1][0] - item[0])
        for (draft, _), items in itertools.groupby(enumerate(sorted(self._shown.items())), run):
            places, cells = zip(*(item for _, item in items))
            if places[0] > last + 1 and not self._finished:
                out.append((" … ", self.STYLE["draft"]))
            pieces = tokenizers.pieces(self._tokenizer, [token for token, _ in cells], skip_special_tokens=not draft)
            out += [(piece, self.STYLE[style]) for piece, (_, style) in zip(pieces, cells)]
            last = places[-1]
        return out

    def show(self, events: Any) -> int:
        """Plays events to their end and returns the forwards they took; a file gets the answer alone."""
        forwards, live = 0, self._console.is_terminal
        with Live(console=self._console, refresh_per_second=20) if live else contextlib.nullcontext() as view:
            for event in events:
                forwards = event.forward
                self.apply(event)
                if live:
                    view.update(Text.assemble(*self.spans()))
            self.finish()
            if live:
                view.update(Text.assemble(*self.spans()))
        if not live:
            self._console.file.write("".join(text for text, _ in self.spans()) + "\n")
        return forwards


def _opened(path: str, mode: str) -> TextIO:
    try:
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror})") from None


def run(options: argparse.Namespace, stdin: TextIO, stdout: TextIO) -> None:
    """Does what the command line says."""
    from dlm_jax.decode import DECODERS

    if options.list:
        for name, kind in DECODERS.items():
            print(f"{name}: {kind.__doc__.splitlines()[0]}", file=stdout)
            for field in dataclasses.fields(kind):
                print(f"    {field.name} = {field.default}", file=stdout)
        return
    if not options.model:
        raise ValueError("--model is missing: a Hugging Face directory or hub id")
    decoder, length = make_decoder(options.decoder, options.settings, options.preset)
    check_guide(options.decoder, options.guide)
    limit = next(n for n in (options.max_new_tokens, length, 256) if n is not None)
    for name, value in (("--max-new-tokens", limit), ("--batch-size", options.batch_size)):
        if value < 1:
            raise ValueError(f"{name} {value}: at least 1")
    if options.stream and options.output:
        raise ValueError("--stream shows answers and --output writes them: give one")
    messages = read_prompts(options, stdin)
    if options.output:
        with _opened(options.output, "a"):  # now, rather than after the work
            pass

    import jax.numpy as jnp

    import dlm_jax
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.io import folders

    tokenizer = tokenizers.load(folders.resolve(options.model))
    dtype = None if options.dtype is None else jnp.dtype(options.dtype)
    model, params = with_guide(*dlm_jax.load(options.model, dtype=dtype), tokenizer, options.guide, dtype)
    encode = (lambda m: tokenizer(m[-1]["content"])["input_ids"]) if options.raw else (
        lambda m: tokenizers.encode_prompt(tokenizer, m))
    prompts = [encode(m) for m in messages]
    first = lambda *ids: next((i for i in ids if i is not None), None)
    special = dict(eos_id=first(options.eos_id, tokenizer.eos_token_id, model.config.eos_token_id),
                   mask_id=first(options.mask_id, tokenizer.mask_token_id, model.config.mask_token_id))
    console = Console(stderr=True)
    if options.stream:
        for i, (prompt, message) in enumerate(zip(prompts, messages)):
            console.rule(message[-1]["content"][:60])
            events = dlm_jax.stream(
                model, params, prompt, decoder, max_new_tokens=limit, seed=options.seed, first_row=i, **special)
            forwards = Screen(tokenizer, Console(file=stdout), eos_id=special["eos_id"], limit=limit).show(events)
            console.print(f"[bright_black]{forwards} forwards after prefill[/]")
        return
    with console.status(f"decoding {len(prompts)} prompts"):
        out = dlm_jax.generate(model, params, prompts, decoder, max_new_tokens=limit, seed=options.seed,
                               batch_size=min(options.batch_size, len(prompts)), **special)
    forwards = out.ledger.after_prefill()
    with _opened(options.output, "w") if options.output else contextlib.nullcontext(stdout) as sink:
        for i, (message, tokens) in enumerate(zip(messages, out.tokens)):
            row = {"prompt": message[-1]["content"], "answer": tokenizer.decode(tokens, skip_special_tokens=True),
                   "tokens": int(out.ledger.committed[i]), "forwards": int(forwards[i])}
            print(json.dumps(row, ensure_ascii=False), file=sink, flush=True)
    console.print(f"{int(out.ledger.committed.sum())} tokens, {out.ledger.tokens_per_forward():.2f} a forward, "
                  f"{out.tokens_per_second:.1f} a second (compile {out.seconds['compile']:.1f} s not counted)")


def main(arguments: list[str] | None = None) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    options = parser().parse_args(arguments)
    return cli.exit_code(lambda: run(options, sys.stdin, sys.stdout))


if __name__ == "__main__":
    sys.exit(main())
