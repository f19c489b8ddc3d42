"""Diffusion language models in JAX: load, train, decode.

`load`, `save`, `forward`, `generate`, `stream`, `check_lossless` and `init_from_ar` are the verbs; the subpackages hold
everything else. Names are imported when first used, so that `import dlm_jax` alone costs nothing.
"""

import importlib

_VERBS = {
    "load": "dlm_jax.api",
    "save": "dlm_jax.api",
    "forward": "dlm_jax.api",
    "generate": "dlm_jax.decode.api",
    "stream": "dlm_jax.decode.api",
    "check_lossless": "dlm_jax.decode.lossless",
    "init_from_ar": "dlm_jax.models.convert",
}
_PACKAGES = ("conventions", "data", "decode", "evals", "io", "models", "nn", "objectives", "train", "types")

__all__ = [*_VERBS, *_PACKAGES]


def __getattr__(name: str):
    if name in _VERBS:
        value = getattr(importlib.import_module(_VERBS[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"dlm_jax.{name}")
    else:
        raise AttributeError(f"dlm_jax has no {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
