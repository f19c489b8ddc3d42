"""Safetensors files: read and written as the official library does, and refused when damaged."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dlm_jax.io import tensor_files
from dlm_jax.io.tensor_files import Pending

DRAW = np.random.default_rng(0)
TENSORS = {
    "a": DRAW.standard_normal((3, 5)).astype(np.float32),
    "b": DRAW.standard_normal(7).astype(np.float16),
    "c": DRAW.standard_normal((2, 2, 2)).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(3, np.int64),
    "flags": np.array([True, False, True]),
}


def pending(tensors):
    return [Pending(name, x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()]


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert (got[name].shape, got[name].dtype) == (x.shape, x.dtype), name
        assert got[name].tobytes() == x.tobytes(), name


def test_official_library_reads_what_we_write(tmp_path):
    tensor_files.write_folder(tmp_path, pending(TENSORS), 10**9)
    assert_same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), TENSORS)
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_official_library_writes(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors", {"format": "np"})
    assert_same(tensor_files.read_folder(tmp_path), TENSORS)


@pytest.mark.parametrize("limit, files", [(10**9, 1), (60, 3), (1, 6)])
def test_shards_round_trip_and_respect_the_limit(tmp_path, limit, files):
    tensor_files.write_folder(tmp_path, pending(TENSORS), limit)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) <= files and (len(shards) > 1) == (limit < 10**9)
    assert_same(tensor_files.read_folder(tmp_path), TENSORS)
    for shard in shards if len(shards) > 1 else ():
        held = tensor_files.read_file(shard)
        assert len(held) == 1 or sum(x.nbytes for x in held.values()) <= limit
    if len(shards) > 1:
        index = json.loads((tmp_path / tensor_files.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
        assert index["weight_map"].keys() == TENSORS.keys()


def test_mixed_dtypes_stay_aligned(tmp_path):
    odd = {"x": np.zeros(3, ml_dtypes.bfloat16), "y": np.ones(2, np.float32), "z": np.ones(1, np.float64)}
    tensor_files.write_file(tmp_path / "f.safetensors", pending(odd))
    for x in tensor_files.read_file(tmp_path / "f.safetensors").values():
        assert x.flags.aligned


def test_views_are_read_only(tmp_path):
    tensor_files.write_folder(tmp_path, pending(TENSORS), 10**9)
    with pytest.raises(ValueError, match="read-only"):
        tensor_files.read_folder(tmp_path)["a"][0, 0] = 1


@pytest.mark.parametrize("keep", [0, 5, 30, -1, -40])
def test_truncated_files_are_refused(tmp_path, keep):
    tensor_files.write_folder(tmp_path, pending(TENSORS), 10**9)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        tensor_files.read_folder(tmp_path)


@pytest.mark.parametrize("header, message", [
    (b"not json", "bad header"),
    (b"[]", "bad header"),
    (b'{"a": 3}', "bad header"),
    (b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}', "'a' has dtype 'F4'"),
    (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "takes 12 bytes but 8"),
    (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}', "ends at byte"),
    (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', r"'a' has shape \[-1\]"),
    (b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', r"'a' has shape \[1.0\]"),
    (b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', "'a' has shape 1"),
    (b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', r"'a' has dtype \['F32'\]; accepted: F64"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}', "'a' has data_offsets"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}', "'a' has data_offsets"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}', "'a' has data_offsets"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}', "ends at byte"),
])
def test_damaged_headers_are_refused(tmp_path, header, message):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(ValueError, match=message):
        tensor_files.read_folder(tmp_path)


def test_broken_shard_sets_are_refused(tmp_path):
    tensor_files.write_folder(tmp_path, pending(TENSORS), 60)
    index = tmp_path / tensor_files.INDEX
    whole = json.loads(index.read_text())
    shard = whole["weight_map"]["a"]

    def refused(weight_map, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            tensor_files.read_folder(tmp_path)

    refused(whole["weight_map"] | {"new": shard}, "lacks tensor 'new'")
    refused(whole["weight_map"] | {"a": 3}, "places tensor 'a' in 3")
    refused(whole["weight_map"] | {"a": "../model.safetensors"}, "names shard '../model.safetensors'")
    (tmp_path / shard).unlink()
    refused(whole["weight_map"], f"names shard '{shard}', which is not a file")
    index.write_text("{")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        tensor_files.read_folder(tmp_path)


def test_folders_without_an_index(tmp_path):
    with pytest.raises(ValueError, match="holds no weights; expected model.safetensors"):
        tensor_files.read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="only pytorch_model.bin: pickled weights can run code"):
        tensor_files.read_folder(tmp_path)
    tensor_files.write_file(tmp_path / "x.safetensors", pending({"a": TENSORS["a"]}))
    tensor_files.write_file(tmp_path / "y.safetensors", pending({"b": TENSORS["b"]}))
    assert_same(tensor_files.read_folder(tmp_path), {k: TENSORS[k] for k in "ab"})
    tensor_files.write_file(tmp_path / "y.safetensors", pending({"a": TENSORS["a"]}))
    with pytest.raises(ValueError, match="repeats tensor 'a'"):
        tensor_files.read_folder(tmp_path)


@pytest.mark.parametrize("slab", [1, 100, 10**9])
@pytest.mark.parametrize("turn", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_copies_of_turned_views(monkeypatch, slab, turn):
    monkeypatch.setattr(tensor_files, "SLAB", slab)
    view = DRAW.standard_normal((5, 7, 3)).astype(np.float32).transpose(turn)[1:]
    copy = tensor_files.contiguous(view, ml_dtypes.bfloat16)
    assert copy.flags.c_contiguous and copy.flags.writeable and not np.shares_memory(copy, view)
    np.testing.assert_array_equal(copy, view.astype(ml_dtypes.bfloat16))
    for odd in (np.float32(3).reshape(()), np.zeros((0, 4)), np.arange(4)[::2]):
        np.testing.assert_array_equal(tensor_files.contiguous(odd), odd, strict=True)


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="complex64, which safetensors cannot hold"):
        tensor_files.write_file(tmp_path / "f", pending({"x": np.zeros(2, np.complex64)}))
    with pytest.raises(ValueError, match="announced as"):
        tensor_files.write_file(tmp_path / "f", [Pending("x", (3,), np.dtype("float32"), lambda: np.zeros(2))])
