"""Decoders, and the models they run on, from what is typed: names, presets of `configs`, `--set field=value`, a mesh.

Every launcher that decodes takes these options and makes of them what the library wants.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pkgutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from dlm_jax import text
from launch import cli

Messages = Sequence[Mapping[str, str]]


def add_options(p: argparse.ArgumentParser, batch_size: int) -> None:
    """Adds the options that `chosen`, `load` and `chat` read, and what else decoding needs.

    Args:
      p: the command line.
      batch_size: default of --batch-size.
    """
    p.add_argument("--model", metavar="PATH", help="Hugging Face directory or hub id (safetensors)")
    p.add_argument("--decoder", metavar="NAME", help="decoder name (default: the preset's, else autoregressive)")
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE",
                   help="hyperparameter of the decoder; may be repeated")
    p.add_argument("--preset", metavar="NAME", help="settings that a file of configs/ names, e.g. refusion:gsm8k")
    p.add_argument("--guide", metavar="PATH", help="autoregressive model that judges the drafts of --decoder guided")
    p.add_argument("--max-new-tokens", type=int, help="longest answer, tokens (default: the preset's, else 256)")
    p.add_argument("--batch-size", type=int, default=batch_size, help="prompts decoded at once (default: %(default)s)")
    p.add_argument("--chat", action="append", default=[], metavar="NAME=VALUE",
                   help="argument of the chat template, e.g. enable_thinking=false; may be repeated")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (default: as stored)")
    p.add_argument("--mesh", metavar="AXES", help="devices that share the work, e.g. data=2,tensor=4: rows of a batch "
                   "over data, heads and vocabulary over tensor (default: one device)")
    p.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")


def presets() -> dict[str, Any]:
    """Returns the `configs.Decoding` entries of the files of `configs`, as "file:name"."""
    import configs

    modules = {found.name: importlib.import_module(f"configs.{found.name}")
               for found in pkgutil.iter_modules(configs.__path__)}
    return {f"{file}:{name}": entry for file, module in modules.items()
            for name, entry in getattr(module, "DECODING", {}).items()}


def make(name: str | None, settings: Sequence[str] = (), preset: str | None = None) -> Any:
    """Makes a decoder from names and "field=value" texts.

    Args:
      name: key of `dlm_jax.decode.DECODERS`; None takes the preset's, else "autoregressive".
      settings: see `dlm_jax.decode.names.override`.
      preset: one of `presets`, whose file need not be named where no other preset of the decoder has the name.

    Returns:
      A `configs.Decoding`.

    Raises:
      ValueError: unknown names, or values that do not fit, with what is accepted.
    """
    import configs
    from dlm_jax.decode import names

    kind = names.find(name or "autoregressive")
    found = configs.Decoding(decoder=kind())
    if preset is not None:
        fitting = {full: entry for full, entry in presets().items()
                   if name is None or type(entry.decoder) is kind}
        short = {full: full.split(":")[1] for full in fitting}
        meant = [full for full in fitting if preset in (full, short[full])]
        if len(meant) > 1:
            raise ValueError(f"preset {preset!r} stands in several files: say which, of {', '.join(meant)}")
        if not meant:
            close = text.close_to(preset, [*fitting, *short.values()])
            raise ValueError(f"preset {preset!r} is not known{close}; accepted"
                             f"{f' with decoder {name!r}' if name else ''}: {sorted(fitting)}")
        found = fitting[meant[0]]
    return dataclasses.replace(found, decoder=names.override(found.decoder, settings))


def chosen(options: argparse.Namespace) -> tuple[str, Any]:
    """Returns the name of the decoder that a command line chooses, and its `configs.Decoding`.

    Args:
      options: of `add_options`.

    Raises:
      ValueError: as `make`, and for a decoder that lacks its guide or a guide that nobody asks.
    """
    from dlm_jax.decode import DECODERS

    found = make(options.decoder, options.settings, options.preset)
    name = next(name for name, kind in DECODERS.items() if type(found.decoder) is kind)
    if found.decoder.guided != (options.guide is not None):
        raise ValueError(f"--decoder {name} needs --guide PATH, an autoregressive model" if options.guide is None else
                         f"--guide {options.guide}: --decoder {name} takes no guide; accepted with --decoder guided, "
                         "or asynclane and --set 'commit=GuideAgrees()'")
    length = found.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    return name, dataclasses.replace(found, max_new_tokens=length)


def catalogue() -> str:
    """Returns every decoder with its fields and their parts, and every preset with its source, for `--list`."""
    from dlm_jax.decode import DECODERS, names

    lines = []
    for name, kind in DECODERS.items():
        lines.append(f"{name}: {kind.__doc__.splitlines()[0]}")
        default, hints = kind(), typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            lines.append(f"    {field.name} = {text.show(getattr(default, field.name))}")
            calls = [call.replace(" ", "\0") for call in text.calls(hints[field.name], names.parts(kind))]  # kept whole
            wrapped = textwrap.wrap(", ".join(calls), 100)
            lines += ["        " + line.replace("\0", " ") for line in wrapped]
    lines.append("presets:")
    lines += [f"    {name}: {entry.source}\n        {text.brief(entry.decoder)}" for name, entry in presets().items()]
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a command line decodes with.

    Attributes:
      model, params: the module and its parameters; of a guided decoder the pair.
      tokenizer: the (drafter's) tokenizer. guide_tokenizer: its guide's, None without one.
      chat: arguments of the chat template.
    """

    model: Any
    params: Any
    tokenizer: Any
    guide_tokenizer: Any
    chat: Mapping[str, Any]

    def encode(self, messages: Messages, raw: bool = False) -> Any:
        """Returns a prompt as the model reads it: ids, or a `decode.Pair` of the drafter's and the guide's.

        Args:
          messages: {"role", "content"} each.
          raw: the last message's text alone, without the chat template.
        """
        from dlm_jax.data import tokenizer as tokenizers

        ids = lambda tokenizer: tokenizer(messages[-1]["content"])["input_ids"] if raw else tokenizers.encode_prompt(
            tokenizer, messages, **self.chat)
        if self.guide_tokenizer is None:
            return ids(self.tokenizer)
        from dlm_jax.decode import Pair

        return Pair(ids(self.tokenizer), ids(self.guide_tokenizer))


def load(options: argparse.Namespace) -> Subject:
    """Reads the model that a command line names, and its guide beside it.

    Args:
      options: of `add_options`.

    Raises:
      ValueError: no model, one that cannot be read, or one that the mesh does not fit.
    """
    if not options.model:
        raise ValueError("--model is missing: a Hugging Face directory or hub id")
    import jax.numpy as jnp

    import dlm_jax
    from dlm_jax.data import tokenizer as tokenizers
    from dlm_jax.io import folders

    tokenizer, guide_tokenizer = tokenizers.load(folders.resolve(options.model)), None
    arguments = chat(options, tokenizer)
    how = dict(dtype=None if options.dtype is None else jnp.dtype(options.dtype), mesh=make_mesh(options.mesh))
    model, params = dlm_jax.load(options.model, **how)
    if options.guide is not None:
        guide_tokenizer = tokenizers.load(folders.resolve(options.guide))
        model, params = join(model, params, tokenizer, *dlm_jax.load(options.guide, **how), guide_tokenizer)
    return Subject(model, params, tokenizer, guide_tokenizer, arguments)


def join(model: Any, params: Any, tokenizer: Any, guide: Any, guide_params: Any, guide_tokenizer: Any
         ) -> tuple[Any, Any]:
    """Joins a drafter and its guide, whose tokenizers may differ, and says how much of a vocabulary they share.

    Args:
      model, params, tokenizer: the drafter's.
      guide, guide_params, guide_tokenizer: the guide's.

    Returns:
      The pair as one model, and its parameters.

    Raises:
      ValueError: a guide that cannot guide this drafter.
    """
    from dlm_jax import decode
    from dlm_jax.data import vocabulary_map

    shared = vocabulary_map.build(tokenizer, guide_tokenizer, draft_size=model.config.vocab_size,
                                  guide_size=guide.config.vocab_size)
    cli.log.info("the guide knows %.1f%% of the drafter's tokens", 100 * shared.coverage())
    return decode.join(model, params, guide, guide_params, shared)


def make_mesh(axes: str | None) -> Any:
    """Returns the mesh that "data=2,tensor=4" describes; axes that it does not name have one device; None for None.

    Raises:
      ValueError: unknown axes, or sizes whose product is not the number of devices.
    """
    if axes is None:
        return None
    from dlm_jax.train import sharding
    from dlm_jax.train.config import MeshConfig

    return sharding.make_mesh(text.override(MeshConfig(data=1), axes.split(","), flag="--mesh"))


def chat(options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Returns the arguments of the chat template that a command line gives.

    Args:
      options: of `add_options`.
      tokenizer: whose template is meant.

    Raises:
      ValueError: another form, or a name that the template never reads.
    """
    found = {}
    for setting in options.chat:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--chat {setting}: expected NAME=VALUE, such as enable_thinking=false")
        if name not in str(tokenizer.chat_template):
            raise ValueError(f"--chat {setting}: the tokenizer's chat template never reads {name!r}; leave it out")
        found[name] = text.parse(value, bool | int | float | str | None)
    return found
