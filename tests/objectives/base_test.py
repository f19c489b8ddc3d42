"""What every objective promises: its name, what it reads of a batch, and that anyone may bring another."""

import dataclasses

import jax.numpy as jnp
import pytest

from dlm_jax import objectives
from dlm_jax.data import packing
from dlm_jax.objectives.base import KEYS, PACKED_KEYS, require

B, T = 2, 8
BATCH = {"tokens": jnp.zeros((B, T), jnp.int32), "loss_mask": jnp.ones((B, T), bool), "length": jnp.full(B, T),
         "prompt_length": jnp.full(B, 2), "example_id": jnp.arange(B)}
EVERY = [
    (objectives.Flare(mask_id=3), {"loss_mask", "example_id"}),
    (objectives.Autoregressive(), {"loss_mask"}),
    (objectives.ReFusion(mask_id=3), {"prompt_length", "example_id"}),
    (objectives.Orthrus(mask_id=3, block_size=2), {"example_id"}),
    (objectives.Orthrus(mask_id=3, block_size=2, anchors="response"), {"prompt_length", "example_id"}),
    (objectives.MaskedDiffusion(mask_id=3, eos_id=1), {"loss_mask", "example_id"}),
    (objectives.MaskedDiffusion(mask_id=3, eos_id=1, target="all", block_length=4), {"example_id"}),
    (objectives.MaskedDiffusion(mask_id=3, eos_id=1, block_length=4), {"loss_mask", "prompt_length", "example_id"}),
    (objectives.BlockDiffusion(mask_id=3, eos_id=1, block_size=4), {"loss_mask", "prompt_length", "example_id"}),
    (objectives.BlockDiffusion(mask_id=3, eos_id=1, block_size=4, align="row", target="all"), {"example_id"}),
]


def test_objectives_are_found_by_name_and_say_what_they_need():
    assert {name: (kind.name, kind.trains, kind.ids) for name, kind in objectives.OBJECTIVES.items()} == {
        "autoregressive": ("autoregressive", None, ()),
        "block_diffusion": ("block_diffusion", None, ("mask_id", "eos_id")),
        "flare": ("flare", None, ("mask_id",)),
        "masked_diffusion": ("masked_diffusion", None, ("mask_id", "eos_id")),
        "orthrus": ("orthrus", "diffusion", ("mask_id",)),
        "refusion": ("refusion", None, ("mask_id",))}
    assert [kind().block_size for kind in objectives.OBJECTIVES.values()] == [None, 32, 4, None, 32, None]


class _Seen(dict):
    """A batch that remembers what was read of it."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("objective, more", EVERY)
def test_an_objective_reads_what_it_says_and_refuses_a_batch_without(objective, more):
    batch = _Seen(BATCH)
    objective.prepare(batch, jnp.zeros(2, jnp.uint32))
    assert batch.read == set(objective.reads) == {"tokens", "length"} | more
    for key in objective.reads:
        short = {name: value for name, value in BATCH.items() if name != key}
        with pytest.raises(ValueError, match=rf"objective '{objective.name}' reads batch\['{key}'\].* the batch has "
                                             rf"only .*{sorted(short)[-1]}.*: add it, or take.*Pipeline"):
            objective.prepare(short, jnp.zeros(2, jnp.uint32))


def test_a_packed_batch_without_a_key_is_refused():
    batch = BATCH | {"documents": jnp.zeros((B, T), jnp.int32), "positions": jnp.zeros((B, T), jnp.int32)}
    with pytest.raises(ValueError, match=r"'flare' reads batch\['start'\], \(B, N\) int32 index.*packing.Packer"):
        objectives.Flare(mask_id=3).prepare(batch, jnp.zeros(2, jnp.uint32))


def test_keys_are_those_that_the_pipeline_yields_and_each_is_described():
    assert set(KEYS) == set(BATCH) and set(PACKED_KEYS) == set(packing.OF_PACKS)
    with pytest.raises(ValueError, match=r"the trainer reads batch\['length'\], \(B,\) int32 tokens of prompt"):
        require({"tokens": 0}, ("tokens", "length"), "the trainer")


def test_an_objective_is_compared_and_hashed_by_its_fields():
    one, other = objectives.ReFusion(mask_id=3), objectives.ReFusion(mask_id=4)
    assert one != other and dataclasses.replace(other, mask_id=3) == one and len({one, other, one}) == 2
    with pytest.raises(TypeError, match="abstract"):
        objectives.Objective()
