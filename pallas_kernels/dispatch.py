"""Which implementation runs: by platform unless a backend is asked for by name."""
from __future__ import annotations

import contextlib
import warnings

import jax

BACKENDS = ("xla", "tpu", "gpu", "interpret")

_override: list[str] = []
_warned: set[tuple[str, str]] = set()


@contextlib.contextmanager
def use_backend(name: str):
    """Sets the backend that None means while tracing inside the block, for compiling ahead of time for an absent chip.

    Args:
      name: one of BACKENDS.
    Raises:
      ValueError: for another name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; accepted: {', '.join(BACKENDS)}.")
    _override.append(name)
    try:
        yield
    finally:
        _override.pop()


def automatic_backend() -> str:
    """The backend for this process: an override, Mosaic on TPU, XLA elsewhere.

    The GPU kernels are lowered in tests but have not been timed on a device, so they run only when asked for by name.
    """
    if _override:
        return _override[-1]
    return "tpu" if jax.default_backend() == "tpu" else "xla"


def device_problem(backend: str) -> str | None:
    """Why this process's chip cannot run the backend's kernels, or None; absent chips are not judged."""
    if backend != jax.default_backend():
        return None
    device = jax.devices()[0]
    if backend == "tpu" and any(old in device.device_kind for old in ("TPU v2", "TPU v3")):
        return f"chip {device.device_kind!r} is older than TPU v4"
    if backend == "gpu":
        capability = getattr(device, "compute_capability", "")
        if not capability[:1].isdigit() or float(capability) < 8.0:
            return f"GPU {device.device_kind!r} is not an NVIDIA one of compute capability 8.0 or later"
    return None


def shared_memory() -> int:
    """Bytes of shared memory a GPU block may hold: of this process's GPU, of a Hopper one ahead of time."""
    device = jax.devices()[0] if jax.default_backend() == "gpu" else None
    return getattr(device, "shared_memory_per_block_optin", 227 * 1024)


def choose(operation: str, backend: str | None, problem) -> str:
    """Resolves a backend request.

    Args:
      operation: name for messages.
      backend: None for automatic, or one of BACKENDS.
      problem: function of a backend name giving the reason it cannot take this call, or None.
    Returns:
      The backend to run. Automatic choices that cannot take the call become "xla" with one warning per reason.
    Raises:
      ValueError: for an unknown name, or a named backend that cannot take the call.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{operation}: backend {backend!r} is unknown; accepted: None, {', '.join(BACKENDS)}.")
    chosen = automatic_backend() if backend is None else backend
    reason = None if chosen == "xla" else device_problem(chosen) or problem(chosen)
    if reason is None:
        return chosen
    if backend is not None:
        raise ValueError(f"{operation}: backend {backend!r} cannot take this call: {reason}. "
                         "Use backend='xla' or None.")
    if (operation, reason) not in _warned:
        _warned.add((operation, reason))
        warnings.warn(f"{operation}: using the XLA form instead of {chosen!r}: {reason}.", stacklevel=3)
    return "xla"
