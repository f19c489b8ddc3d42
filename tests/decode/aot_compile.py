"""Compiles a decoder's prefill and loop at 8B for TPUs that are not here, and prints their memory as JSON.

  python -m tests.decode.aot_compile v6e:2x4 refusion
"""

import os
import sys

for name, value in dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4",
                        TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                        TPU_LOG_DIR="disabled", XLA_FLAGS="").items():
    os.environ[name] = value  # before jax is imported

import json
import re
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import configs
from dlm_jax.decode import Autoregressive, Orthrus, ReFusion, executables, parts
from dlm_jax.decode.request import Request
from dlm_jax.models import build
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig


def main(topology: str, decoder: str, batch: int = 8, prompt: int = 1024, capacity: int = 512) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=len(devices)), devices)
    config = configs.load("refusion:qwen3_8b", ["train.objective.mask_id=151669"]).model
    model = build.build(config.replace(family="orthrus") if decoder == "orthrus" else config)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=s),
                          build.abstract_params(model), sharding.params(model, mesh))
    everywhere = NamedSharding(mesh, PartitionSpec())
    array = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    request = Request(array((batch, prompt)), array((batch,)), array((batch,)), array(()), array(()),
                      jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=everywhere), capacity)
    chosen = {"autoregressive": Autoregressive(), "refusion": ReFusion(slot_size=16, block_length=64),
              "orthrus": Orthrus(block_size=32)}[decoder]
    chosen = jax.tree.map(lambda x: array((), x.dtype), parts.traced(chosen))
    arguments, report = (params, chosen, request), {"chips": len(devices)}
    for function in (executables.init, executables.loop):
        start = time.time()
        lowered = executables.jitted(function, model).lower(*arguments)
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        report[function.__name__] = {
            "seconds": time.time() - start, "arguments_gib": memory.argument_size_in_bytes / 2**30,
            "temporaries_gib": memory.temp_size_in_bytes / 2**30, "aliased_gib": memory.alias_size_in_bytes / 2**30,
            "all_reduces": len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text()))}
        if function is executables.init:
            state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                                 lowered.out_info, compiled.output_shardings)
            arguments += (state, array(()))
            cache = jax.tree.leaves(state.cache)
            report["cache_gib"] = sum(x.size * x.dtype.itemsize for x in cache) / 2**30
            report["cache_spec"] = str(cache[0].sharding.spec)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
