"""PEFT adapters: read, attached, merged and written, against their definition in NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax.io import lora, names, tensor_files
from dlm_jax.models import build
from dlm_jax.models import lora as trees
from dlm_jax.models.config import MoE
from tests.conftest import random_params, tiny_config

EXPERTS = MoE(experts=4, active=2, width=10, shared_width=10, scores="sigmoid", bias="selection")
DENSE = tiny_config(num_layers=2)
SPARSE = tiny_config("llada2_moe", num_layers=3, pattern=("attention", *("attention+moe",) * 2), moe=EXPERTS,
                     partial_rotary_factor=0.5, block_size=4)
# modules of each layer, as checkpoints name them
TARGETS = {"dense": (DENSE, ["self_attn.o_proj", "self_attn.q_proj", "mlp.down_proj"]),
           "sparse": (SPARSE, ["attention.query_key_value", "attention.dense"])}


def write(folder, tensors, **changes):
    folder.mkdir(exist_ok=True)
    tensor_files.write_file(folder / lora.WEIGHTS, [
        tensor_files.Pending(name, x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()])
    said = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": sorted(
        {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}), "bias": "none"}
    (folder / lora.CONFIG).write_text(json.dumps(said | changes))
    return folder


def shapes(config):
    return {name: p.stored_shape for p in names.parameters(config) for name in p.names}


def factors(config, modules, rank=3, seed=0):
    """Returns PEFT's tensors for modules of every layer."""
    draw, found = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        if name.endswith(tuple(f".{module}.weight" for module in modules)):
            module = "base_model.model." + name.removesuffix(".weight")
            found[f"{module}.lora_A.weight"] = draw.standard_normal((rank, shape[1])).astype(np.float32)
            found[f"{module}.lora_B.weight"] = draw.standard_normal((shape[0], rank)).astype(np.float32)
    return found


@pytest.fixture(scope="module", params=TARGETS)
def case(request, tmp_path_factory):
    config, modules = TARGETS[request.param]
    model = build.build(config)
    folder = tmp_path_factory.mktemp(request.param)
    return config, model, random_params(model), factors(config, modules), folder


def test_merging_is_the_definition(case):
    config, model, params, tensors, folder = case
    dlm_jax.save(folder / "model", model, params)
    stored = {name: x.copy() for name, x in tensor_files.read_folder(folder / "model").items()}
    for name in tensors:
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            stored[weight] += 12 / 3 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    (folder / "want").mkdir()
    (folder / "want" / "config.json").write_text((folder / "model" / "config.json").read_text())
    tensor_files.write_folder(folder / "want", [
        tensor_files.Pending(name, x.shape, x.dtype, lambda x=x: x) for name, x in stored.items()], 1 << 30)
    told, adapter = lora.load(write(folder / "adapter", tensors), config)
    merged = trees.merge(params, adapter)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), merged,
                 dlm_jax.load(folder / "want")[1])
    assert told.scale == 4 and merged["embed"] is params["embed"], "what is not changed is shared"


def test_an_attached_adapter_is_on_in_one_view_alone(case):
    config, model, params, tensors, folder = case
    _, adapter = lora.load(write(folder / "adapter", tensors), config)
    both = trees.attach(params, adapter)
    tokens = jnp.asarray([[3, 5, 7, 11, 2]])

    @jax.jit
    def run(params):
        score = model.scorer(params)
        return score(tokens), score.view("ar")(tokens), score.view("diffusion")(tokens)

    plain, off, on = run(both)
    np.testing.assert_array_equal(plain, off)
    want = jax.jit(lambda params: model.scorer(params)(tokens))
    np.testing.assert_allclose(plain, want(params), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(on, want(trees.merge(both)), rtol=1e-4, atol=1e-4)
    assert np.abs(on - off).max() > 0.1
    unrolled, spread = build.unroll(model, both)
    np.testing.assert_allclose(unrolled.scorer(spread).view("diffusion")(tokens), on, rtol=1e-4, atol=1e-4)
    assert trees.detach(both)[0].keys() == params.keys()


def test_a_round_trip_is_bit_identical(case, tmp_path):
    config, _, _, tensors, folder = case
    told, adapter = lora.load(write(folder / "adapter", tensors), config)
    lora.save(tmp_path / "again", config, adapter, told)
    again = tensor_files.read_file(tmp_path / "again" / lora.WEIGHTS)
    assert again.keys() == tensors.keys()
    for name, x in again.items():
        np.testing.assert_array_equal(x, tensors[name])
    assert lora.load(tmp_path / "again", config)[0] == told


def test_layers_may_be_left_out_and_experts_adapted(tmp_path):
    tensors = factors(SPARSE, ["experts.1.up_proj", "experts.3.up_proj"])
    tensors = {name: x for name, x in tensors.items() if ".layers.2." in name}
    told, adapter = lora.load(write(tmp_path / "a", tensors), SPARSE)
    assert {*adapter["layers"]} == {"layer_2"}
    node = adapter["layers"]["layer_2"]["moe"]["up_proj"]
    assert node["a"].shape == (1, 4, 32, 3) and node["b"].shape == (1, 4, 3, 10)
    np.testing.assert_array_equal(node["scale"], [[0, 4, 0, 4]])
    lora.save(tmp_path / "again", SPARSE, adapter, told)
    assert tensor_files.read_file(tmp_path / "again" / lora.WEIGHTS).keys() == tensors.keys()
    params = random_params(build.build(SPARSE))
    merged = trees.merge(params, adapter)["layers"]["layer_2"]["moe"]["up_proj"]
    changed = np.any(np.asarray(merged != params["layers"]["layer_2"]["moe"]["up_proj"]), axis=(2, 3))
    np.testing.assert_array_equal(changed, [[False, True, False, True]])


@pytest.mark.parametrize("stabilised, scale", [(False, 4.0), (True, 12 / np.sqrt(3))])
def test_both_scales(tmp_path, stabilised, scale):
    tensors = factors(DENSE, ["self_attn.o_proj"])
    told, _ = lora.load(write(tmp_path / "a", tensors, use_rslora=stabilised), DENSE)
    assert np.isclose(told.scale, scale)


@pytest.mark.parametrize("changes, message", [
    (dict(peft_type="IA3"), "peft_type = 'IA3'; accepted: 'LORA'"), (dict(use_dora=True), "use_dora = True"),
    (dict(r=4), "lora_A of model.layers.0.self_attn.o_proj has shape .3, 48., expected .4, 48."),
    (dict(r=None), "r = None of an adapter"), (dict(modules_to_save=["embed"]), "modules_to_save"),
    (dict(target_modules=["o_proj", "v_proj"]), "v_proj has no tensors"),
    (dict(target_modules=["q_proj"]), "o_proj is none of them")])
def test_other_adapters_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        lora.load(write(tmp_path / "a", factors(DENSE, ["self_attn.o_proj"]), **changes), DENSE)


@pytest.mark.parametrize("config, message", [
    (DENSE.replace(num_heads=2), r"lora_A of model.layers.0.self_attn.o_proj has shape \(3, 48\), expected \(3, 24\)"),
    (DENSE.replace(num_layers=1), "adapts model.layers.1.self_attn.o_proj, which a qwen3 model"),
    (SPARSE, "adapts model.layers.0.self_attn.o_proj, .* which a llada2_moe model")])
def test_adapters_of_other_models_are_refused(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        lora.load(write(tmp_path / "a", factors(DENSE, ["self_attn.o_proj"])), config)


def test_damage_is_named(tmp_path):
    tensors = factors(DENSE, ["self_attn.o_proj"])
    with pytest.raises(ValueError, match="holds no adapter"):
        lora.load(tmp_path, DENSE)
    half = {name: x for name, x in tensors.items() if "lora_A" in name}
    with pytest.raises(ValueError, match="one side only of model.layers.0.self_attn.o_proj"):
        lora.load(write(tmp_path / "half", half), DENSE)
    with pytest.raises(ValueError, match="holds 'strange'"):
        lora.load(write(tmp_path / "strange", tensors | {"strange": np.zeros(2, np.float32)}), DENSE)
    norm = {f"base_model.model.model.norm.lora_{side}.weight": np.zeros((3, 3), np.float32) for side in "AB"}
    with pytest.raises(ValueError, match="no linear layer"):
        lora.load(write(tmp_path / "norm", norm), DENSE)


def test_trees_that_do_not_fit_are_refused(tmp_path):
    _, adapter = lora.load(write(tmp_path / "a", factors(DENSE, ["self_attn.o_proj"])), DENSE)
    params = random_params(build.build(DENSE))
    with pytest.raises(ValueError, match="have an adapter already"):
        trees.attach(trees.attach(params, adapter), adapter)
    with pytest.raises(ValueError, match="have no adapter"):
        trees.merge(params)
    with pytest.raises(ValueError, match="layers.attention.o_proj is of shape"):
        trees.attach(random_params(build.build(DENSE.replace(head_dim=8))), adapter)
    with pytest.raises(ValueError, match="changes layers.attention.o_proj, which these parameters do not have"):
        trees.attach(random_params(build.build(SPARSE)), adapter)
