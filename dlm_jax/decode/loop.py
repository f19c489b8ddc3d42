"""Three loops from one `step`: compiled whole, compiled a step at a time (streaming), and plain Python.

Executables are compiled once per model, static hyperparameters and shapes; thresholds, temperatures, lengths,
special ids and keys are traced values of the decoder and the request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.decode.state import Decoder, Request
from dlm_jax.types import Params

Bind = Callable[[Any, Params], Any]  # (model, params) -> Scorer


def traced(decoder: Decoder) -> Decoder:
    """Returns the decoder with its defaults filled in and its numbers as arrays, so that they become arguments."""
    decoder = decoder.resolved()
    dtypes = {"float": np.float32, "int": np.int32}  # of numpy: they travel with the call, a transfer each costs more
    arrays = {f.name: np.asarray(getattr(decoder, f.name), dtypes[f.type.split(" ")[0]])
              for f in dataclasses.fields(decoder) if not f.metadata.get("static")}
    return dataclasses.replace(decoder, **arrays)


class Executables:
    """Compiled init, step and loop of each (model, decoder statics, shapes); the least recently used one goes first.

    XLA's code for a CPU takes about 400 memory maps an executable, and Linux grants a process 65,530
    (vm.max_map_count): who sweeps settings without a bound ends in "LLVM compilation error: Cannot allocate memory".

    Attributes:
      compiled: executables compiled so far, those that went included.
      most: executables kept at once; 64 take about 26,000 maps, and the rest of a program needs some.
    """

    def __init__(self, most: int = 64):
        if most < 1:
            raise ValueError(f"most = {most} executables: expected at least 1")
        self.compiled, self.most = 0, most
        self._cache: dict[Any, Any] = {}  # the least recently used one first

    def __len__(self) -> int:
        return len(self._cache)

    def clear(self) -> None:
        """Forgets every executable and the memory it holds."""
        self._cache.clear()

    def get(self, bind: Bind, model: Any, which: str, arguments: tuple) -> tuple[Any, float]:
        """Returns the executable for these arguments and the seconds spent compiling it now (0 if it was there).

        Args:
          bind: joins model and parameters into a scorer; part of the key.
          model: hashable description of the network.
          which: "init", "step" or "loop".
          arguments: (params, decoder, request) and, but for "init", the state.
        """
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
        key = (bind, model, which, structure, shapes)
        executable = self._cache.pop(key, None)
        if executable is not None:
            self._cache[key] = executable
            return executable, 0.0
        while len(self._cache) >= self.most:  # before the new one needs its memory
            self._cache.pop(next(iter(self._cache)), None)
        start = time.perf_counter()
        self.compiled += 1
        executable = self._cache[key] = jitted(bind, model, which).lower(*arguments).compile()
        return executable, time.perf_counter() - start


def jitted(bind: Bind, model: Any, which: str) -> Any:
    """Returns the jitted "init", "step" or "loop" of a model; the latter two reuse their state's memory."""
    function = {"init": _init, "step": _step, "loop": _loop}[which]
    donate = () if which == "init" else (3,)
    return jax.jit(lambda *args: function(lambda params: bind(model, params), *args), donate_argnums=donate)


def _init(score_of, params, decoder, request):
    return decoder.init(score_of(params), request)


def _step(score_of, params, decoder, request, state):
    return decoder.step(score_of(params), request, state)


def _loop(score_of, params, decoder, request, state):
    score = score_of(params)
    return jax.lax.while_loop(
        lambda s: ~jnp.all(s.done), lambda s: decoder.step(score, request, s), state)


def python_loop(score: Any, decoder: Decoder, request: Request) -> Any:
    """Runs `init` and `step` without compiling them; the reference for the other two loops.

    Args:
      score: a `scoring.Scorer`.
      decoder: the decoder.
      request: the batch.

    Returns:
      The final state.
    """
    decoder = decoder.resolved()
    state = decoder.init(score, request)
    while not bool(jnp.all(state.done)):
        state = decoder.step(score, request, state)
    return state


def step_loop(executables: Executables, bind: Bind, model: Any, params: Params, decoder: Decoder,
              request: Request) -> Iterator[Any]:
    """Yields the state after prefill and after every forward; a yielded state is dead after the next one.

    Args:
      executables: where compiled steps are kept.
      bind, model, params: the model.
      decoder: the decoder, `traced`.
      request: the batch.
    """
    start, _ = executables.get(bind, model, "init", (params, decoder, request))
    state = start(params, decoder, request)
    yield state
    advance, _ = executables.get(bind, model, "step", (params, decoder, request, state))
    while not bool(jnp.all(state.done)):
        state = advance(params, decoder, request, state)
        yield state
