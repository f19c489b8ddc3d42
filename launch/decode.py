"""Answer prompts with any checkpoint and any decoder.

Examples:

    # one question, watched while it is decoded (drafts grey, drafted tokens orange, autoregressive ones plain)
    python -m launch.decode --model runs/quickstart/models/refusion --decoder refusion --stream \\
        --prompt "Tom has 3 apples ..."

    # the paper's settings for a benchmark (Table 7), one prompt a line on standard input, answers as JSON lines
    cat questions.txt | python -m launch.decode --model PATH --decoder refusion --preset gsm8k > answers.jsonl

    # a file of rows ({"question": ...}, {"query": ...}, {"messages": [...]} or {"prompt": ...}), in batches of 16
    python -m launch.decode --model PATH --decoder autoregressive --set temperature=0.7 --set top_p=0.9 \\
        --prompts rows.jsonl --batch-size 16 --output answers.jsonl

`--decoder NAME --set field=value` reaches every hyperparameter; `--list` prints them with their defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m launch.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", metavar="PATH", help="Hugging Face directory or hub id (safetensors)")
    p.add_argument("--decoder", default="autoregressive", help="decoder name (default: %(default)s)")
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE",
                   help="hyperparameter of the decoder; may be repeated")
    p.add_argument("--preset", metavar="NAME", help="settings of a benchmark in configs/refusion.py, e.g. gsm8k")
    p.add_argument("--prompt", help="one prompt")
    p.add_argument("--prompts", metavar="FILE", help="prompts, one a line (.txt) or a JSON row a line (.jsonl)")
    p.add_argument("--raw", action="store_true", help="use prompts as they are, without the chat template")
    p.add_argument("--max-new-tokens", type=int, help="longest answer, tokens (default: the preset's, else 256)")
    p.add_argument("--batch-size", type=int, default=8, help="prompts decoded at once (default: %(default)s)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (default: as stored)")
    p.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    p.add_argument("--stream", action="store_true", help="show the answers while they are decoded, one by one")
    p.add_argument("--output", metavar="FILE", help="write answers as JSON lines (default: standard output)")
    p.add_argument("--list", action="store_true", help="print every decoder and its hyperparameters, and stop")
    return p


def make_decoder(name: str, settings: list[str], preset: str | None = None) -> tuple[Any, int | None]:
    """Builds a decoder from names and "field=value" strings.

    Args:
      name: key of `dlm_jax.decode.DECODERS`.
      settings: overrides.
      preset: benchmark of `configs.refusion.DECODING`, or None.

    Returns:
      The decoder, and the preset's generation length in tokens (None without one).

    Raises:
      ValueError: unknown names, or values of another type.
    """
    from dlm_jax.decode import DECODERS

    if name not in DECODERS:
        raise ValueError(f"decoder {name!r} is not known; accepted: {sorted(DECODERS)}")
    kind, values, length = DECODERS[name], {}, None
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    if preset is not None:
        from configs.refusion import DECODING

        if name != "refusion" or preset not in DECODING:
            raise ValueError(f"preset {preset!r} is not known for decoder {name!r}; accepted with --decoder refusion: "
                             f"{sorted(DECODING)}")
        values = dict(DECODING[preset])
        length = values.pop("max_new_tokens")
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not equals or field not in defaults:
            raise ValueError(f"--set {setting}: expected FIELD=VALUE with one of {sorted(defaults)}")
        values[field] = _value(field, text, defaults[field])
    return kind(**values), length


def _value(field: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float) or default is None:
            return float(text)
        return text
    except (ValueError, KeyError):
        kind = type(default).__name__ if default is not None else "float"
        raise ValueError(f"--set {field}={text}: expected a {kind}, as in {field}={default}") from None


def read_prompts(options: argparse.Namespace, stdin: TextIO) -> list[list[dict[str, str]]]:
    """Returns each prompt as chat messages.

    Raises:
      ValueError: two sources, an empty one, or a malformed line (file and line number).
    """
    user = lambda text: [{"role": "user", "content": text}]
    if options.prompt is not None and options.prompts is not None:
        raise ValueError("--prompt and --prompts exclude each other: give one")
    if options.prompt is not None:
        return [user(options.prompt)]
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise ValueError(f"--prompts {options.prompts}: no such file")
    name = options.prompts or "standard input"
    lines = (Path(options.prompts).read_text() if options.prompts else stdin.read()).splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not name.endswith((".jsonl", ".json")):
            found.append(user(line))
            continue
        try:
            row = json.loads(line)
            text = next(row[key] for key in ("prompt", "question", "query", "messages") if key in row)
        except (json.JSONDecodeError, StopIteration, TypeError):
            raise ValueError(f"{name}:{number}: expected a JSON object with prompt, question, query or messages"
                             ) from None
        if isinstance(text, list):
            text = text[:-1] if text and text[-1].get("role") == "assistant" else text
        found.append(text if isinstance(text, list) else user(text))
    if not found:
        raise ValueError(f"{name} holds no prompts: one a line is expected")
    return found


class Screen:
    """An answer on a terminal while it is being decoded."""

    STYLE = {"drafted": "dark_orange", "autoregressive": "default", "draft": "bright_black"}

    def __init__(self, tokenizer: Any, console: Console):
        self._tokenizer, self._console = tokenizer, console
        self._shown: dict[int, tuple[int, str]] = {}

    def text(self) -> Text:
        """Returns what is on the canvas now."""
        out, last = Text(), -1
        for place in sorted(self._shown):
            token, style = self._shown[place]
            if place > last + 1:
                out.append(" … ", style="bright_black")
            out.append(self._tokenizer.decode([token], skip_special_tokens=style != "draft"), style=self.STYLE[style])
            last = place
        return out

    def show(self, events: Any) -> int:
        """Plays events to their end and returns the forwards they took."""
        forwards = 0
        with Live(console=self._console, refresh_per_second=20, transient=False) as live:
            for event in events:
                forwards = event.forward
                if event.committed:
                    self._shown = {p: s for p, s in self._shown.items() if s[1] != "draft"}
                for place, token, origin in zip(event.positions, event.tokens, event.origin):
                    self._shown[place] = (token, origin if event.committed else "draft")
                live.update(self.text())
            self._shown = {p: s for p, s in self._shown.items() if s[1] != "draft"}
            live.update(self.text())
        return forwards


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
    messages = read_prompts(options, stdin)
    limit = options.max_new_tokens or length or 256

    import jax.numpy as jnp

    import dlm_jax
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.io import folders

    tokenizer = tokenizers.load(folders.resolve(options.model))
    model, params = dlm_jax.load(options.model, dtype=None if options.dtype is None else jnp.dtype(options.dtype))
    encode = (lambda m: tokenizer(m[-1]["content"])["input_ids"]) if options.raw else (
        lambda m: tokenizers.encode_prompt(tokenizer, m))
    prompts = [encode(m) for m in messages]
    special = dict(eos_id=tokenizer.eos_token_id, mask_id=tokenizer.mask_token_id)
    console = Console(stderr=True)
    if options.stream:
        for prompt, message in zip(prompts, messages):
            console.rule(message[-1]["content"][:60])
            events = dlm_jax.stream(
                model, params, prompt, decoder, max_new_tokens=limit, seed=options.seed, **special)
            forwards = Screen(tokenizer, Console(file=stdout)).show(events)
            console.print(f"[bright_black]{forwards} forwards after prefill[/]")
        return
    with console.status(f"decoding {len(prompts)} prompts"):
        out = dlm_jax.generate(model, params, prompts, decoder, max_new_tokens=limit, seed=options.seed,
                               batch_size=min(options.batch_size, len(prompts)), **special)
    sink = Path(options.output).open("w") if options.output else stdout
    forwards = out.ledger.after_prefill()
    for i, (message, tokens) in enumerate(zip(messages, out.tokens)):
        row = {"prompt": message[-1]["content"], "answer": tokenizer.decode(tokens, skip_special_tokens=True),
               "tokens": int(out.ledger.committed[i]), "forwards": int(forwards[i])}
        print(json.dumps(row, ensure_ascii=False), file=sink, flush=True)
    if options.output:
        sink.close()
    console.print(f"{int(out.ledger.committed.sum())} tokens, {out.ledger.tokens_per_forward():.2f} a forward, "
                  f"{out.tokens_per_second:.1f} a second (compile {out.seconds['compile']:.1f} s not counted)")


def main(arguments: list[str] | None = None) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    options = parser().parse_args(arguments)
    try:
        run(options, sys.stdin, sys.stdout)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
