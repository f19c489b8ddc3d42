"""Compiled programs of decoding: one for each model, kinds of parts and shapes.

Thresholds, temperatures, lengths, special ids and keys are traced values of the decoder and the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.nn import devices
from dlm_jax.scoring import Cache


def init(model, params, decoder, request):
    """Returns the state after prefill."""
    return decoder.init(model.scorer(params), request)


def step(model, params, decoder, request, state):
    """Returns the state one round later."""
    return decoder.step(model.scorer(params), request, state)


def loop(model, params, decoder, request, state, steps):
    """Returns the state after at most so many rounds, fewer where every row is done."""
    score = model.scorer(params)
    going = lambda carry: ~jnp.all(carry[0].done) & (carry[1] < steps)
    advance = lambda carry: (decoder.step(score, request, carry[0]), carry[1] + 1)
    return jax.lax.while_loop(going, advance, (state, jnp.int32(0)))[0]


def provisional(model, decoder, state):
    """Returns the latest drafts, see `Decoder.provisional`."""
    del model
    return decoder.provisional(state)


def insert(model, request, state, row, one):
    """Returns request and state of a batch with those of a batch of one in place of a row."""
    del model
    batch = request.batch

    def put(mine, theirs):
        if isinstance(mine, Cache):  # guidance keeps several copies of a row, a batch apart
            return mine.insert(row + batch * jnp.arange(mine.batch // batch), theirs)
        return mine.at[row].set(theirs[0]) if mine.ndim else mine

    return jax.tree.map(put, (request, state), one, is_leaf=lambda x: isinstance(x, Cache))


DONATED = {init: (), step: (3,), loop: (3,), provisional: (), insert: (1,)}  # arguments whose memory is reused


def jitted(function: Callable, model: Any) -> Any:
    """Returns one of this module's functions, jitted for a model."""
    return jax.jit(lambda *arguments: function(model, *arguments), donate_argnums=DONATED[function])


class Executables:
    """Compiled programs, the least recently used of which goes first; threads may share them.

    XLA's code for a CPU takes about 400 memory maps an executable, and Linux grants a process 65,530
    (vm.max_map_count): who sweeps settings without a bound ends in "LLVM compilation error: Cannot allocate memory".

    Attributes:
      compiled: programs compiled so far, those that went included.
      most: programs kept at once; 64 take about 26,000 maps, and the rest of a process needs some.
    """

    def __init__(self, most: int = 64):
        if most < 1:
            raise ValueError(f"most = {most} executables: expected at least 1")
        self.compiled, self.most = 0, most
        self._kept: dict[Any, Any] = {}  # the least recently used one first
        self._lock = threading.Lock()
        self._compiling: dict[Any, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forgets every executable and the memory it holds."""
        with self._lock:
            self._kept.clear()

    def get(self, function: Callable, model: Any, arguments: tuple) -> tuple[Any, float]:
        """Returns the executable for these arguments and the seconds spent compiling it now (0 if it was there).

        Threads that ask for the same one compile it once.

        Args:
          function: one of this module's.
          model: hashable description of the network, the function's first argument.
          arguments: the others.
        """
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
        key = (function, model, structure, shapes)
        found = self._find(key)
        if found is not None:
            return found, 0.0
        with self._lock:
            gate = self._compiling.setdefault(key, threading.Lock())
        with gate:
            found = self._find(key)
            if found is not None:
                return found, 0.0
            start = time.perf_counter()
            try:
                self._evict()  # before the new one needs its memory
                here = devices.alone(all(
                    len(x.sharding.device_set) == 1 for x in leaves if isinstance(x, jax.Array)))
                with here:
                    made = jitted(function, model).lower(*arguments).compile()
                self._evict()  # other threads may have compiled meanwhile
                with self._lock:
                    self.compiled += 1
                    self._kept[key] = made
            finally:
                with self._lock:
                    self._compiling.pop(key, None)
            return made, time.perf_counter() - start

    def _evict(self) -> None:
        with self._lock:
            while len(self._kept) >= self.most:
                self._kept.pop(next(iter(self._kept)))

    def _find(self, key: Any) -> Any:
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None:
                self._kept[key] = found
            return found


EXECUTABLES = Executables()
