"""The decoder protocol: every decoder follows it, and refuses special ids and models that it cannot work with."""

import inspect

import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.decode import Decoder, Needs, Sampler
from tests.conftest import tiny_config

METHODS = [name for name, member in vars(Decoder).items() if inspect.isfunction(member) and not name.startswith("_")]
# whether drafts need a mask, and whether it stands on the canvas
MASKS = {"autoregressive": (False, False), "orthrus": (True, False), "refusion": (True, True), "masked": (True, True),
         "guided": (True, True), "asynclane": (True, True), "ar_trust": (True, False), "diffusion_trust": (True, False),
         "blocks": (True, True), "self_speculation": (True, False)}


@pytest.mark.parametrize("kind", decode.DECODERS.values())
def test_every_decoder_follows_the_protocol(kind):
    assert {"check_model", "check_request", "init", "step"} <= set(METHODS) and isinstance(kind.needs, Needs)
    for method in METHODS:
        ours, wanted = (inspect.signature(getattr(each, method)) for each in (kind, Decoder))
        assert list(ours.parameters) == list(wanted.parameters), method


@pytest.mark.parametrize("name", decode.DECODERS)
def test_a_mask_is_needed_and_differs_from_the_eos_where_it_stands_on_the_canvas(name):
    needed, own = MASKS[name]
    check = lambda eos_id, mask_id: decode.DECODERS[name]().check_request([[3, 4]], np.asarray([8]), eos_id, mask_id)
    check(1, 2)
    check(None, 2)
    for wrong, ids, message in ((needed, (1, None), "drafts from a mask token.*names none"),
                                (own, (2, 2), "mask_id = eos_id = 2")):
        if wrong:
            with pytest.raises(ValueError, match=message):
                check(*ids)
        else:
            check(*ids)


@pytest.mark.parametrize("name", ["Autoregressive", "ReFusion", "ARTrust", "DiffusionTrust"])
def test_a_model_of_another_kind_is_refused(name):
    getattr(decode, name)().check_model(tiny_config("qwen3"))
    with pytest.raises(ValueError, match=f"{name} needs a causal model, this llada one is bidirectional"):
        getattr(decode, name)().check_model(tiny_config("llada"))


@pytest.mark.parametrize("kind", [decode.Autoregressive, decode.Orthrus, decode.ReFusion])
def test_a_sampler_is_spelt_long_or_short(kind):
    assert kind(temperature=0.7, top_k=3) == kind(sampler=Sampler(temperature=0.7, top_k=3))
    assert kind(sampler=Sampler(0.7, 3), top_p=0.5).sampler == Sampler(0.7, 3, 0.5)
    with pytest.raises(ValueError, match="temperature = nan"):
        kind(temperature=float("nan"))
