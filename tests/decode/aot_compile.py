"""Compiles a decoder's prefill and loop for TPUs that are not here, and prints their memory as JSON.

  python -m tests.decode.aot_compile v6e:2x4 refusion
  python -m tests.decode.aot_compile v5e:1x1 ar_trust flare:qwen3_5_9b
"""

import os
import sys

for name, value in dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4",
                        TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                        TPU_LOG_DIR="disabled", XLA_FLAGS="").items():
    os.environ[name] = value  # before jax is imported

import importlib
import json
import math
import re
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import configs
from dlm_jax.decode import ARTrust, Autoregressive, DiffusionTrust, Orthrus, ReFusion, Sampler, executables, parts
from dlm_jax.decode.request import Request
from dlm_jax.models import build
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig


SAMPLED = Sampler(temperature=1.0, top_k=50, top_p=0.95)  # as FLARE's D.1
DECODERS = {
    "autoregressive": Autoregressive(), "refusion": ReFusion(slot_size=16, block_length=64),
    "orthrus": Orthrus(block_size=32), "ar_trust": ARTrust(horizon=4, sampler=SAMPLED),
    "diffusion_trust": DiffusionTrust(block_size=4, sampler=SAMPLED)}
SHAPES = {"orthrus": "orthrus:qwen3_8b", "ar_trust": "flare:qwen3_5_2b", "diffusion_trust": "flare:qwen3_5_2b"}


def row_mib(model, tokens: int) -> float:
    """Returns what the cache of one row of so many tokens takes, in bfloat16."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), build.abstract_params(model))
    cache = jax.eval_shape(lambda params: model.scorer(params).init_cache(1, tokens), params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) / 2**20


def main(topology: str, decoder: str, shape: str = "", batch: int = 8, prompt: int = 1024, capacity: int = 512) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    one = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **one).devices
    name = shape or SHAPES.get(decoder, "refusion:qwen3_8b")
    experiment, (file, _, size) = configs.load(name, ["train.objective.mask_id=5"]), name.partition(":")
    config = experiment.model or importlib.import_module(f"configs.{file}").MODELS[size]
    tensor = math.gcd(len(devices), config.num_kv_heads)
    mesh = sharding.make_mesh(MeshConfig(data=len(devices) // tensor, fsdp=1, tensor=tensor), devices)
    model = build.build(config)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=s),
                          build.abstract_params(model), sharding.params(model, mesh))
    everywhere = NamedSharding(mesh, PartitionSpec())
    array = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    request = Request(array((batch, prompt)), array((batch,)), array((batch,)), array(()), array(()),
                      jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=everywhere), capacity)
    chosen = DECODERS[decoder]
    chosen = jax.tree.map(lambda x: array((), x.dtype), parts.traced(chosen))
    arguments, report = (params, chosen, request), {
        "chips": len(devices), "row_mib": {tokens: row_mib(model, tokens) for tokens in (4096, 32768)}}
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
