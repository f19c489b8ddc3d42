"""What a Hugging Face model directory is: where it comes from, its configuration, and the files beside the weights."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dlm_jax.io import names, tensor_files
from dlm_jax.models import hf_config as configs
from dlm_jax.models.config import TransformerConfig

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
RUN_TOKENIZER = "tokenizer"  # directory of a training run
SAFE_FILES = (CONFIG, GENERATION, "*.safetensors", tensor_files.INDEX, *TOKENIZER_FILES)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(path: str | Path) -> Path:
    """Finds a model directory, downloading it if `path` is a Hugging Face hub id.

    Args:
      path: a local directory, or an id such as "Qwen/Qwen3-0.6B"; only configuration, safetensors and tokenizer
        files of a hub repository are fetched, weights last.

    Returns:
      The local directory.

    Raises:
      ValueError: neither a directory nor an id that can be fetched, or a configuration that is not supported.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; expected the directory that holds {CONFIG} and the weights")
    if not _HUB_ID.fullmatch(str(path)):
        raise ValueError(f"{str(path)!r} is neither a directory nor a hub id (owner/name); check the path")
    import huggingface_hub  # here, because only hub ids need it

    try:
        fetch = functools.partial(huggingface_hub.snapshot_download, str(path), etag_timeout=10)
        load_config(fetch(allow_patterns=[CONFIG]))  # refuses what is not supported before gigabytes are fetched
        return Path(fetch(allow_patterns=list(SAFE_FILES)))
    except (OSError, huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"{str(path)!r} is not a directory here, and fetching it as a hub id failed "
                         f"({type(error).__name__}: {reason[0] if reason else 'no detail'}); "
                         "check the path, or connect, or give a downloaded directory") from None


def read_config(folder: str | Path) -> dict[str, Any]:
    """Returns the parsed `config.json` of a directory; ValueError where it is missing or malformed."""
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise ValueError(f"{file} does not exist; expected a Hugging Face model directory")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}; expected a JSON object")
    return raw


def load_config(path: str | Path) -> TransformerConfig:
    """Reads a directory's configuration.

    Args:
      path: local directory.

    Returns:
      The configuration.

    Raises:
      ValueError: missing or malformed file, unsupported model type or feature; where nothing says which family the
        model is of, with those that its tensors fit.
    """
    raw = read_config(path)
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantised checkpoints are not supported; accepted: plain float weights")
    try:
        return configs.from_hf(raw)
    except ValueError as error:
        fitting = "" if raw.get("model_type") else _fitting(path)
        raise ValueError(f"{Path(path) / CONFIG}: {error}{fitting}") from None


def _fitting(path: str | Path) -> str:
    """Returns a sentence on the families that the tensors of a directory fit, which may be none or several."""
    try:
        found = names.fitting(tensor_files.read_folder(Path(path)))
    except ValueError:  # no weights, or not yet
        return ""
    return (f". Its tensors fit {' and '.join(found)}, and tell no conventions: write the model_type of the one that "
            "it is into config.json" if found else "")


def ends(path: str | Path, raw: Mapping[str, Any]) -> list[int]:
    """Returns the ids that end an answer, as config.json and generation_config.json list them.

    Args:
      path: local directory.
      raw: its parsed config.json.
    """
    file = Path(path) / GENERATION
    with contextlib.suppress(ValueError):  # malformed: a file that nothing else reads
        told = json.loads(file.read_text()) if file.is_file() else {}
        values = (raw.get("eos_token_id"), told.get("eos_token_id") if isinstance(told, dict) else None)
        listed = [x for value in values for x in (value if isinstance(value, list) else [value]) if x is not None]
        return list(dict.fromkeys(listed))
    return []


def has_tokenizer(folder: str | Path) -> bool:
    """Tells whether a directory holds any file of a tokenizer."""
    return any((Path(folder).expanduser() / name).is_file() for name in TOKENIZER_FILES)


def merge_config(original: Mapping[str, Any], config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Writes a configuration over an original `config.json`, changing only what means something else.

    Args:
      original: the parsed file the weights came from, or an empty dict.
      config: what the result must mean.
      dtype: name of the weights' dtype.

    Returns:
      The content of `config.json`: every field of the original, in order, unknown ones included.
    """
    new = configs.to_hf(config, dtype)
    if not original or configs.from_hf(original).family != config.family:
        return new
    stored_dtype = original.get("dtype", original.get("torch_dtype"))
    old = configs.to_hf(configs.from_hf(original), stored_dtype)
    changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
    kept = {key: value for key, value in original.items() if key not in old or key in new}
    if stored_dtype is not None:
        # one of the two names of the dtype is enough where the original had one
        changed = {k: v for k, v in changed.items() if k not in ("dtype", "torch_dtype") or k in original}
    return kept | changed


def check_free(path: str | Path, overwrite: bool = False) -> None:
    """Raises ValueError where a directory cannot be made at `path`, or one with content would be replaced unasked."""
    target = Path(path).expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a directory to save to")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{target} exists and is not empty; give a fresh directory, or overwrite=True")


def check_sources(tokenizer_from: Any, config_from: str | Path | None) -> None:
    """Raises ValueError for a source of `describe` that is neither a directory nor a tokenizer."""
    for name, value in (("tokenizer_from", tokenizer_from), ("config_from", config_from)):
        if isinstance(value, (str, Path)) and not Path(value).expanduser().is_dir():
            raise ValueError(f"{name} = {str(value)!r} is not a directory")
    if not isinstance(tokenizer_from, (str, Path, type(None))) and not hasattr(tokenizer_from, "save_pretrained"):
        raise ValueError(f"tokenizer_from is a {type(tokenizer_from).__name__}; expected a directory or a tokenizer")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields an empty directory that takes the place of `path` if the block ends well, and is removed otherwise."""
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        made, old = Path(scratch) / "new", Path(scratch) / "old"
        made.mkdir()
        yield made
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def describe(
    folder: Path, config: TransformerConfig, dtype: str, tokenizer_from: Any, config_from: str | Path | None
) -> None:
    """Writes what stands beside the weights: config.json, generation_config.json and the tokenizer's files.

    Args:
      folder: existing directory.
      config: what config.json must mean.
      dtype: name of the weights' dtype.
      tokenizer_from, config_from: see `hf.save`.
    """
    from_folder = isinstance(tokenizer_from, (str, Path))
    if config_from is None and from_folder:
        config_from = tokenizer_from
    copies = []
    if from_folder:
        copies += [Path(tokenizer_from).expanduser() / name for name in TOKENIZER_FILES]
    elif tokenizer_from is not None:
        tokenizer_from.save_pretrained(str(folder))
    original = {}
    if config_from is not None:
        source = Path(config_from).expanduser()
        copies.append(source / GENERATION)
        original = read_config(source) if (source / CONFIG).is_file() else {}
    for file in copies:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / CONFIG).write_text(json.dumps(merge_config(original, config, dtype), indent=2) + "\n")
