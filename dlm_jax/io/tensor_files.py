"""Safetensors files, read as memory-mapped views and written as streams, one tensor in memory at a time.

The format: 8 bytes of little-endian header size, a JSON header {name: {dtype, shape, data_offsets}}, raw data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

SLAB = 1 << 20  # bytes of the source copied at once, small enough to stay in cache
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}
_CODES = {np.dtype(value): key for key, value in DTYPES.items()}


def float_dtype(dtype: Any) -> np.dtype | None:
    """Returns a dtype that parameters may have, given by name or type, or None for None; ValueError for others."""
    if dtype is None:
        return None
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jax.dtypes.issubdtype(found, np.floating):
        raise ValueError(f"dtype = {dtype!r}: parameters are floats; accepted: float32, bfloat16, float16")
    return found


class Pending(NamedTuple):
    """A tensor to be written: its description now, its data when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    data: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Opens a checkpoint folder: one file, or shards with an index.

    Args:
      folder: directory with `model.safetensors`, or `model.safetensors.index.json` and its shards, or else any
        `*.safetensors` files.

    Returns:
      Tensor name -> read-only view of the mapped file; no data is read yet.

    Raises:
      ValueError: no safetensors, a missing shard, or a damaged file, each named.
    """
    if (folder / SINGLE).is_file():
        return read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_sharded(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} holds no safetensors, only {', '.join(pickles[:3])}: pickled weights can run code when "
                "opened and are never loaded; convert them with transformers' save_pretrained first")
        raise ValueError(f"{folder} holds no weights; expected {SINGLE} or {INDEX} with its shards")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        part = read_file(file)
        twice = tensors.keys() & part.keys()
        if twice:
            raise ValueError(f"{file} repeats tensor {min(twice)!r} of another file; keep one, or add {INDEX}")
        tensors |= part
    return tensors


def _read_sharded(folder: Path) -> dict[str, np.ndarray]:
    index = folder / INDEX
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from None
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ValueError(f"{index} places tensor {tensor!r} in {name!r}; expected the name of a file")
    shards = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{index} names shard {name!r}, which is not a file in {folder}; fetch it again")
        shards[name] = read_file(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ValueError(f"{folder / name} lacks tensor {tensor!r}, which {INDEX} places there")
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def read_file(file: Path) -> dict[str, np.ndarray]:
    """Maps one safetensors file.

    Args:
      file: its path.

    Returns:
      Tensor name -> read-only view.

    Raises:
      ValueError: the file is truncated, damaged or of an unknown dtype.
    """
    size = file.stat().st_size
    damaged = lambda why: ValueError(f"{file} is not a whole safetensors file ({why}); fetch or write it again")
    with file.open("rb") as stream:
        head = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= head <= size - 8:
            raise damaged(f"a header of {head} bytes cannot fit in {size} bytes")
        try:
            header = json.loads(stream.read(head))
            entries = {name: (e["dtype"], e["shape"], e["data_offsets"])
                       for name, e in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(f"bad header: {error!r}") from None
    start = 8 + head
    data = np.memmap(file, np.uint8, "r", offset=start) if size > start else np.empty(0, np.uint8)
    tensors = {}
    for name, (code, shape, offsets) in entries.items():
        if not isinstance(code, str) or code not in DTYPES:
            raise ValueError(f"{file}: tensor {name!r} has dtype {code!r}; accepted: {', '.join(DTYPES)}")
        if not _counts(shape):
            raise damaged(f"tensor {name!r} has shape {shape!r}; expected a list of whole numbers")
        if not _counts(offsets) or len(offsets) != 2:
            raise damaged(f"tensor {name!r} has data_offsets {offsets!r}; expected its first and last byte")
        shape, (begin, end) = tuple(shape), offsets
        expected = math.prod(shape) * np.dtype(DTYPES[code]).itemsize
        if not 0 <= begin <= end <= data.size:
            raise damaged(f"tensor {name!r} ends at byte {start + end} of {size}")
        if end - begin != expected:
            raise damaged(f"tensor {name!r} of shape {shape} takes {expected} bytes but {end - begin} are stored")
        tensors[name] = np.ndarray(shape, DTYPES[code], buffer=data, offset=begin)
    return tensors


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def contiguous(view: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Returns a C-contiguous copy of a view whose axes may have been turned.

    Args:
      view: any strided view, of any shape.
      dtype: of the copy; default the view's.

    Returns:
      A fresh array.
    """
    out = np.empty(view.shape, view.dtype if dtype is None else dtype)
    axis = int(np.argmax(view.strides)) if view.ndim else None
    if axis is None or not view.size:
        out[...] = view
        return out
    # slab by slab of the source: one whole transposing copy would miss the cache at every element, five times slower
    step = max(1, SLAB // view.strides[axis])
    for start in range(0, view.shape[axis], step):
        cut = (slice(None),) * axis + (slice(start, start + step),)
        out[cut] = view[cut]
    return out


def write_folder(folder: Path, tensors: Sequence[Pending], max_shard_bytes: int) -> None:
    """Writes tensors as one file, or as shards with an index when they exceed one file's size.

    Args:
      folder: existing directory.
      tensors: what to write, in order.
      max_shard_bytes: largest file, bytes of data; a larger single tensor gets a file of its own.
    """
    shards: list[list[Pending]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        write_file(folder / name, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)},
             "weight_map": {t.name: name for name, shard in zip(names, shards) for t in shard}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Path, tensors: Sequence[Pending]) -> None:
    """Writes one safetensors file, asking for each tensor's data only when its turn comes.

    Args:
      file: path to write.
      tensors: what to write, in order.

    Raises:
      ValueError: a dtype that the format does not have.
    """
    # wide dtypes first, so that every tensor starts at a multiple of its own item size
    tensors = sorted(tensors, key=lambda t: -np.dtype(t.dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on a format
    offset = 0
    for tensor in tensors:
        code = _CODES.get(np.dtype(tensor.dtype))
        if code is None:
            raise ValueError(f"tensor {tensor.name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape),
                               "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = np.asarray(tensor.data(), order="C")
            if data.shape != tensor.shape or data.dtype != tensor.dtype:
                raise ValueError(f"tensor {tensor.name!r} is {data.shape} {data.dtype}, "
                                 f"announced as {tensor.shape} {tensor.dtype}")
            stream.write(data.reshape(-1).view(np.uint8).data)
