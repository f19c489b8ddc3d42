"""Compiled programs: which of them are kept."""

import jax.numpy as jnp
import pytest
from flax import struct

from dlm_jax.decode import executables
from dlm_jax.decode.executables import Executables


@struct.dataclass
class Times:
    """A decoder whose drafts are a multiple of its state."""

    number: int = struct.field(pytree_node=False)

    def provisional(self, state):
        return state * self.number


def call(kept, number, model=None):
    """Runs Times(number); returns whether it had to be compiled."""
    arguments = (Times(number), jnp.arange(3))
    run, seconds = kept.get(executables.provisional, model, arguments)
    assert run(*arguments).tolist() == [0, number, 2 * number]
    return seconds > 0


def test_the_least_recently_used_executable_goes():
    kept = Executables(3)
    assert [call(kept, number) for number in (1, 2, 3)] == [True] * 3
    assert not call(kept, 1)  # now the newest
    assert call(kept, 4) and len(kept) == 3
    assert [call(kept, number) for number in (1, 3, 4)] == [False] * 3
    assert call(kept, 2)  # the one that went; now 1 does
    assert len(kept) == 3 and call(kept, 1)
    kept.clear()
    assert len(kept) == 0 and call(kept, 1) and kept.compiled == 7


def test_models_have_executables_of_their_own():
    kept = Executables()
    assert call(kept, 1, "a") and call(kept, 1, "b") and not call(kept, 1, "a")


def test_no_executables_at_all_is_refused():
    with pytest.raises(ValueError, match="most = 0"):
        Executables(0)
