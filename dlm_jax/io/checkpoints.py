"""Checkpoints of a run: state, data position and configuration in one, saved in the background by orbax.

A damaged checkpoint is recognised by a digest of its arrays, set aside, and the one before it used.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array
from jax.experimental import multihost_utils

# how tensorstore begins errors that say nothing about the files
_MACHINE_CODES = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED")


@jax.jit
def digest(tree: Any) -> Array:
    """Returns a number that changes with any bit of any array, and does not depend on sharding.

    Args:
      tree: arrays of 8, 16 or 32 bit elements.

    Returns:
      () uint32.
    """
    total = jnp.uint32(len(jax.tree.leaves(tree)))
    for leaf in jax.tree.leaves(tree):
        leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        # odd factors that differ along every axis: integer sums are the same in any order
        weight = jnp.uint32(1)
        for axis in range(bits.ndim):
            index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            weight = weight * jnp.uint32(31) + 2 * index * jnp.uint32(0x9E3779B1)
        total = total * jnp.uint32(0x01000193) + jnp.sum(bits * weight, dtype=jnp.uint32)
    return total


def layer_chunks(tree: Any) -> Any:
    """Returns how orbax is to store arrays: every layer of a stack apart, so that one is read without the others.

    Args:
      tree: arrays, those of stacked layers under a key "layers".
    """
    stacked = lambda path, leaf: leaf.ndim > 1 and any(getattr(key, "key", None) == "layers" for key in path)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: ocp.SaveArgs(shard_axes=(0,) if stacked(path, leaf) else ()), tree)


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, directory: Path | str, keep: int = 2):
        """Opens or creates a directory of checkpoints.

        Args:
          directory: where they live.
          keep: newest ones kept.
        """
        self.directory = Path(directory).resolve()
        self._keep = keep
        self._open()

    def _open(self) -> None:
        # a killed save leaves a temporary directory that orbax never mistakes for a checkpoint
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, enable_async_checkpointing=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts saving; returns as soon as the arrays may be overwritten.

        Args:
          step: steps done.
          state: tree of arrays.
          meta: JSON values to keep beside it, such as the configuration and the data position.
        """
        meta = {"user": meta, "digest": int(digest(state))}
        state = ocp.args.StandardSave(state, save_args=layer_chunks(state))
        self._manager.save(step, args=ocp.args.Composite(state=state, meta=ocp.args.JsonSave(meta)), force=True)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads one checkpoint onto the shardings of `like`, whatever mesh it was saved from.

        Args:
          step: which.
          like: tree of `jax.ShapeDtypeStruct` with shardings.

        Returns:
          The state and its meta.

        Raises:
          ValueError: arrays that are not those that were saved. Other errors where files are missing or unreadable.
        """
        found = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like), meta=ocp.args.JsonRestore()))
        if int(digest(found.state)) != found.meta["digest"]:
            raise ValueError("its arrays are not the ones that were saved")
        return found.state, found.meta["user"]

    def meta(self, step: int) -> dict[str, Any]:
        """Returns the meta of one checkpoint without reading its arrays."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta["user"]

    def restore_newest(self, like: Any, check=lambda meta: None) -> tuple[int, Any, dict[str, Any]] | None:
        """Reads the newest usable checkpoint.

        Damaged ones newer than it are moved to a directory `damaged` beside the others, with a warning.

        Args:
          like: see `restore`.
          check: called with the meta before arrays are read; what it raises is passed on.

        Returns:
          Step, state and meta; None where there is no checkpoint at all.

        Raises:
          ValueError: there are checkpoints but none can be read. Errors of memory, permission or devices are passed
            on as they are. Nothing has been moved then.
        """
        steps, damaged = self.steps(), {}
        for step in reversed(steps):
            try:
                meta = self.meta(step)
            except Exception as error:  # orbax, tensorstore and json each have their own
                damaged[step] = _damage(error, self.directory / str(step))
                continue
            check(meta)
            try:
                state, meta = self.restore(step, like)
            except Exception as error:
                damaged[step] = _damage(error, self.directory / str(step))
                continue
            if damaged:
                self._set_aside(damaged, step)
            return step, state, meta
        if steps:
            reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
            raise ValueError(f"none of the checkpoints {steps} in {self.directory} can be read ({reasons}); they stay "
                             "where they are; start again in another directory")
        return None

    def _set_aside(self, damaged: dict[int, str], usable: int) -> None:
        folder = self.directory.parent / f"{self.directory.name}_damaged"
        if jax.process_index() == 0:
            folder.mkdir(exist_ok=True)
            for step in damaged:
                number = len(list(folder.iterdir()))
                (self.directory / str(step)).rename(folder / f"{step}.{number}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {sorted(damaged)}")
        self._manager.close()
        self._open()
        for step, reason in damaged.items():
            warnings.warn(f"checkpoint {step} in {self.directory} is damaged ({reason}); moved to {folder}, "
                          f"using {usable}", stacklevel=3)

    def wait(self) -> None:
        """Returns once every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes saves and releases the directory."""
        self._manager.wait_until_finished()
        self._manager.close()


def _damage(error: Exception, where: Path) -> str:
    """Returns why a checkpoint is damaged, or raises the error again where the machine is at fault."""
    cause: BaseException | None = error
    while cause is not None:
        missing = isinstance(cause, (FileNotFoundError, NotADirectoryError))
        if (isinstance(cause, (MemoryError, OSError, RuntimeError)) and not missing
                or any(code in str(cause) for code in _MACHINE_CODES)):
            error.add_note(f"{where} could not be read; it may be whole, and nothing was moved")
            raise error
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
