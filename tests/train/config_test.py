"""Training configurations: what they refuse, and how two of them are compared."""

import json

import pytest

from dlm_jax.objectives import Autoregressive, ReFusion
from dlm_jax.train.config import MeshConfig, TrainConfig, differences, to_dict

AR = Autoregressive()


@pytest.mark.parametrize("changes, message", [
    ({"steps": 0}, "steps = 0: expected at least 1"),
    ({"batch_size": 0}, "batch_size = 0"),
    ({"grad_accumulation": 3}, "grad_accumulation = 3: expected a divisor of batch_size = 8"),
    ({"learning_rate": 0.0}, "learning_rate"), ({"learning_rate": float("nan")}, "learning_rate"),
    ({"warmup_steps": 11}, "warmup_steps = 11: expected 0 to steps = 10"),
    ({"schedule": "linear"}, "'linear'.*cosine.*constant"), ({"weight_decay": -1.0}, "weight_decay"),
    ({"beta2": 1.0}, "beta2"), ({"epsilon": 0.0}, "epsilon"), ({"clip_norm": 0.0}, "clip_norm"),
    ({"compute_dtype": "float16"}, "'float16'.*float32.*bfloat16"), ({"seed": -1}, "seed"),
    ({"trainable": "("}, "not a regular expression"),
    ({"objective": "refusion"}, "objective = 'refusion': expected.*Autoregressive.*ReFusion"),
])
def test_bad_values_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"objective": AR, "steps": 10, "batch_size": 8} | changes)


@pytest.mark.parametrize("sizes, message", [
    ({"tensor": 0}, "mesh.tensor = 0"), ({"data": -1, "fsdp": -1}, "at most one size of -1")])
def test_bad_meshes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**sizes)


def test_a_configuration_survives_json_and_differences_name_the_fields():
    one = TrainConfig(objective=ReFusion(mask_id=3), steps=10, batch_size=8)
    other = TrainConfig(objective=ReFusion(mask_id=4), steps=10, batch_size=8, mesh=MeshConfig(fsdp=2))
    assert json.loads(json.dumps(to_dict(one))) == to_dict(one)
    assert to_dict(one)["objective"]["name"] == "refusion"
    assert differences(to_dict(one), to_dict(one)) == []
    assert differences(to_dict(one), to_dict(other)) == ["mesh.fsdp: 1 -> 2", "objective.mask_id: 3 -> 4"]
    assert "objective.name: 'refusion' -> 'autoregressive'" in differences(
        to_dict(one), to_dict(TrainConfig(objective=AR, steps=10, batch_size=8)))
