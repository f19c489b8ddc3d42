"""The decoder protocol: every decoder follows it, and refuses special ids that it cannot work with."""

import inspect

import numpy as np
import pytest

from dlm_jax.decode import DECODERS
from dlm_jax.decode.state import Decoder

METHODS = [name for name, member in vars(Decoder).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_follows_the_protocol(name):
    assert {"check", "check_model", "check_request", "init", "step"} <= set(METHODS)
    for method in METHODS:
        ours, wanted = (inspect.signature(getattr(kind, method)) for kind in (DECODERS[name], Decoder))
        assert list(ours.parameters) == list(wanted.parameters), method


@pytest.mark.parametrize("name, needed, own", [
    ("autoregressive", False, False), ("orthrus", True, False), ("refusion", True, True), ("masked", True, True),
    ("guided", True, True)])
def test_a_mask_is_needed_and_differs_from_the_eos_where_it_stands_on_the_canvas(name, needed, own):
    check = lambda eos_id, mask_id: DECODERS[name]().check_request([[3, 4]], np.asarray([8]), eos_id, mask_id)
    check(1, 2)
    check(None, 2)
    for wrong, ids, message in ((needed, (1, None), "drafts from a mask token.*names none"),
                                (own, (2, 2), "mask_id = eos_id = 2")):
        if wrong:
            with pytest.raises(ValueError, match=message):
                check(*ids)
        else:
            check(*ids)
