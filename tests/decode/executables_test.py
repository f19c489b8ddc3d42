"""Compiled loops: which executables are kept."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dlm_jax.decode import loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Times:
    """A decoder whose state is a multiple of its request."""

    number: int = dataclasses.field(metadata=dict(static=True))

    def init(self, score, request):
        return request * self.number


def bind(model, params):
    """The scorer of no model."""


def call(executables, number, model=None):
    """Runs Times(number); returns whether it had to be compiled."""
    arguments = (None, Times(number), jnp.arange(3))
    run, seconds = executables.get(bind, model, "init", arguments)
    assert run(*arguments).tolist() == [0, number, 2 * number]
    return seconds > 0


def test_the_least_recently_used_executable_goes():
    kept = loop.Executables(3)
    assert [call(kept, number) for number in (1, 2, 3)] == [True] * 3
    assert not call(kept, 1)  # now the newest
    assert call(kept, 4) and len(kept) == 3
    assert [call(kept, number) for number in (1, 3, 4)] == [False] * 3
    assert call(kept, 2)  # the one that went; now 1 does
    assert len(kept) == 3 and call(kept, 1)
    kept.clear()
    assert len(kept) == 0 and call(kept, 1)


def test_models_have_executables_of_their_own():
    kept = loop.Executables()
    assert call(kept, 1, "a") and call(kept, 1, "b") and not call(kept, 1, "a")


def test_no_executables_at_all_is_refused():
    with pytest.raises(ValueError, match="most = 0"):
        loop.Executables(0)
