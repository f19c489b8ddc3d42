"""Compiles a training step for TPUs that are not here, and prints what it needs of each as JSON.

  python -m tests.train.aot_compile v5p:4x4x4 fsdp=16 tensor=4 accumulation=32
  python -m tests.train.aot_compile v5p:4x4x4 config=orthrus:qwen3_8b dtype=bfloat16 fsdp=16 tensor=4 batch=64 \\
      accumulation=4 train.objective.head_chunk=256

Sizes are those of the mesh, of the batch and of the model (layers); `dtype` is that of the parameters the run starts
from; names with a dot are fields of the experiment.
"""

import os
import sys

for name, value in dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4",
                        TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                        TPU_LOG_DIR="disabled", XLA_FLAGS="").items():
    os.environ[name] = value  # before jax is imported

import dataclasses
import importlib
import json
import time

import jax
import numpy as np
from jax.experimental import topologies

import configs
from dlm_jax.models import build
from dlm_jax.train import sharding, step
from dlm_jax.train.config import MeshConfig
from pallas_kernels import use_backend


def main(topology: str, *settings: str) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    given = dict(setting.split("=", 1) for setting in settings)
    name, dtype = given.pop("config", "refusion:qwen3_8b"), given.pop("dtype", "float32")
    fields = [f"{field}={given.pop(field)}" for field in list(given) if "." in field]
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "accumulation": 1, "batch": 512, "slices": 1, "layers": None}
    if given.keys() - sizes.keys():
        raise SystemExit(f"{', '.join(given.keys() - sizes.keys())}: expected config, dtype, {', '.join(sizes)} or a "
                         "field")
    sizes |= {size: int(value) for size, value in given.items()}
    experiment = configs.load(name, ["train.objective.mask_id=151669", *fields])
    file, _, size = name.partition(":")
    shape = experiment.model or importlib.import_module(f"configs.{file}").MODELS[size]
    shape = shape if sizes["layers"] is None else shape.replace(num_layers=sizes["layers"])
    config = dataclasses.replace(
        experiment.train, batch_size=sizes["batch"], grad_accumulation=sizes["accumulation"],
        mesh=MeshConfig(**{axis: sizes[axis] for axis in sharding.AXES}))
    slices = {} if sizes["slices"] == 1 else {"num_slices": sizes["slices"]}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **slices).devices
    mesh = sharding.make_mesh(config.mesh, devices)
    model = build.build(shape)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), build.abstract_params(model))
    state = step.abstract_state(model, params, config, mesh)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype, sharding=sharding.rows(mesh))
    batch = {"tokens": array(np.int32, experiment.length), "loss_mask": array(bool, experiment.length)}
    batch |= {name: array(np.int32) for name in ("prompt_length", "length", "example_id")}
    run, start = step.make_step(model, config, mesh), time.time()
    with sharding.activate(mesh), use_backend("tpu"):
        compiled = run.jitted.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    if os.environ.get("DUMP_HLO"):
        open(os.environ["DUMP_HLO"], "w").write(compiled.as_text())
    print(json.dumps({
        "chips": len(devices), "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "trained": sum(x.size for x in jax.tree.leaves(state.trainable)),
        "seconds": time.time() - start,
        "arguments_gib": memory.argument_size_in_bytes / 2**30, "temporaries_gib": memory.temp_size_in_bytes / 2**30,
        "outputs_gib": memory.output_size_in_bytes / 2**30, "aliased_gib": memory.alias_size_in_bytes / 2**30,
        "peak_gib": getattr(memory, "peak_memory_in_bytes", 0) / 2**30,
    }))


if __name__ == "__main__":
    main(*sys.argv[1:])
