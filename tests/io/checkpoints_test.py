"""Checkpoints: exact on any mesh, and never trusted when damaged."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.io.checkpoints import Checkpoints, digest

# orbax leaves coroutines behind when a read fails; they have no effect
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine .* was never awaited:RuntimeWarning")


@pytest.fixture(autouse=True)
def _collect():
    """Lets those coroutines go here, where they are expected, and not in a test that comes later."""
    yield
    gc.collect()


def _mesh(shape):
    count = int(np.prod(shape))
    return jax.make_mesh(shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:count])


def _state(mesh, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    return {
        "w": put(jax.random.normal(keys[0], (64, 128)), "a", "b"),
        "half": put(jnp.ones((4, 4), jnp.bfloat16), None, "b"),
        "key": put(jax.random.key_data(keys[1])), "step": put(jnp.int32(seed)), "none": {}}


def _like(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _saved(folder, steps=(1, 2, 3), keep=3):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, _state(_mesh((1, 1)), step), {"data": {"next": step}})
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (2, 4)])
def test_restores_every_bit_onto_any_mesh(tmp_path, shape):
    checkpoints = Checkpoints(tmp_path / "c")
    saved, other = _state(_mesh((2, 2)), 7), _state(_mesh(shape), 0)
    checkpoints.save(7, saved, {"data": {"next": 7}})
    checkpoints.wait()
    step, state, meta = checkpoints.restore_newest(_like(other))
    assert step == 7 and meta == {"data": {"next": 7}}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), state, saved)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, other)
    checkpoints.close()


def test_arrays_may_be_overwritten_as_soon_as_save_returns(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    want = np.array(state["w"])
    checkpoints.save(1, state, {})
    like = _like(state)
    overwrite = jax.jit(lambda s: {"w": s["w"] * 0 - 1}, donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    np.testing.assert_array_equal(checkpoints.restore_newest(like)[1]["w"], want)
    checkpoints.close()


def test_keeps_the_newest(tmp_path):
    checkpoints = _saved(tmp_path / "c", steps=(1, 2, 3, 4), keep=2)
    assert checkpoints.steps() == [3, 4]
    checkpoints.close()


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.restore_newest(_like(_state(_mesh((1, 1))))) is None
    checkpoints.close()


def _largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _flip(folder):
    file = _largest(folder / "state")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _truncate(folder):
    file = _largest(folder / "state")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _remove_arrays(folder):
    _largest(folder / "state").unlink()


def _remove_meta(folder):
    next(p for p in (folder / "meta").rglob("*") if p.is_file()).unlink()


def _garble_meta(folder):
    next(p for p in (folder / "meta").rglob("*") if p.is_file()).write_text("{")


def _wrong_digest(folder):
    path = next(p for p in (folder / "meta").rglob("*") if p.is_file() and "digest" in p.read_text())
    path.write_text(path.read_text().replace('"digest": ', '"digest": 1'))


def _empty(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    "damage", [_flip, _truncate, _remove_arrays, _remove_meta, _garble_meta, _wrong_digest, _empty])
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path, damage):
    _saved(tmp_path / "c").close()
    damage(tmp_path / "c" / "3")
    checkpoints = Checkpoints(tmp_path / "c", 3)
    with pytest.warns(UserWarning, match="checkpoint 3 in .* is damaged"):
        step, state, meta = checkpoints.restore_newest(_like(_state(_mesh((1, 1)))))
    assert step == 2 and meta["data"] == {"next": 2}
    np.testing.assert_array_equal(state["w"], _state(_mesh((1, 1)), 2)["w"])
    assert checkpoints.steps() == [1, 2] and (tmp_path / "c_damaged" / "3.0").exists()
    # the step can be saved again
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.close()


def test_a_save_that_never_finished_is_not_a_checkpoint(tmp_path):
    _saved(tmp_path / "c").close()
    (tmp_path / "c" / "9.orbax-checkpoint-tmp").mkdir()
    checkpoints = Checkpoints(tmp_path / "c", 3)
    assert checkpoints.restore_newest(_like(_state(_mesh((1, 1)))))[0] == 3
    checkpoints.close()


def test_nothing_readable_is_an_error_and_nothing_is_deleted(tmp_path):
    _saved(tmp_path / "c", steps=(1, 2)).close()
    for step in "12":
        _truncate(tmp_path / "c" / step)
    checkpoints = Checkpoints(tmp_path / "c", 3)
    with pytest.raises(ValueError, match=r"none of the checkpoints \[1, 2\].*can be read"):
        checkpoints.restore_newest(_like(_state(_mesh((1, 1)))))
    assert checkpoints.steps() == [1, 2] and not (tmp_path / "c_damaged").exists()
    checkpoints.close()


def _wrapped(error):
    try:
        raise Exception("Encountered error while reading array") from error
    except Exception as outer:
        return outer


@pytest.mark.parametrize("error", [
    MemoryError(), PermissionError(13, "Permission denied"), OSError(5, "Input/output error"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), ValueError("RESOURCE_EXHAUSTED: no room"),
    _wrapped(ValueError("PERMISSION_DENIED: Error opening file"))])
@pytest.mark.parametrize("method", ["meta", "restore"])
def test_an_error_of_the_machine_is_passed_on_and_moves_nothing(tmp_path, monkeypatch, error, method):
    checkpoints = _saved(tmp_path / "c", steps=(1, 2))

    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoints, method, fail)
    with pytest.raises(type(error)) as raised:
        checkpoints.restore_newest(_like(_state(_mesh((1, 1)))))
    assert raised.value is error and "nothing was moved" in error.__notes__[-1]
    assert checkpoints.steps() == [1, 2] and not (tmp_path / "c_damaged").exists()
    checkpoints.close()


def test_what_the_check_raises_is_no_damage(tmp_path):
    checkpoints = _saved(tmp_path / "c")

    def refuse(meta):
        raise ValueError("another configuration")

    with pytest.raises(ValueError, match="another configuration"):
        checkpoints.restore_newest(_like(_state(_mesh((1, 1)))), refuse)
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.close()


def test_the_digest_sees_every_bit_and_every_place():
    rng = np.random.default_rng(0)
    base = {"a": rng.standard_normal((4, 6)).astype(np.float32), "b": np.asarray([True, False]),
            "c": rng.integers(0, 9, 5).astype(np.int32)}
    seen = {int(digest(base))}
    for name, array in base.items():
        for place in np.ndindex(array.shape):
            changed = array.copy()
            changed[place] = ~changed[place] if array.dtype == bool else np.nextafter(
                changed[place], np.inf) if array.dtype == np.float32 else changed[place] + 1
            seen.add(int(digest(base | {name: changed})))
    seen.add(int(digest(base | {"a": base["a"][::-1]})))
    seen.add(int(digest(base | {"a": base["a"][:, ::-1]})))
    assert len(seen) == 1 + 24 + 2 + 5 + 2
    on_mesh = jax.device_put(base["a"], NamedSharding(_mesh((4, 2)), PartitionSpec("a", "b")))
    assert digest(base | {"a": on_mesh}) == digest(base)
