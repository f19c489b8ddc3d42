"""Compiles forward and backward for TPU chips that need not be present; prints one JSON line per program.

Run with the environment of conftest.AOT_ENVIRONMENT:
  python aot.py delta CHIP SHAPE FORM BACKEND BLOCK...     (chips: v5e, v5p, v6e; SHAPE+documents packs documents)
  python aot.py attention CHIP SHAPE...       (shapes of attention.arg_specs, or two_stream:T or causal:T with :B rows)
  python aot.py sharded CHIP
"""
import json
import sys
import time

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from pallas_kernels import block_mask_attention, two_stream_gated_delta, use_backend
from pallas_kernels.attention import arg_specs as attention_specs
from pallas_kernels.gated_delta import arg_specs as delta_specs

ONE_CHIP = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}
FOUR_CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def chip_sharding(chip):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=ONE_CHIP[chip],
                                            chips_per_host_bounds=[1, 1, 1])
    return SingleDeviceSharding(topology.devices[0])


def compile_and_report(function, args, **labels):
    start = time.time()
    try:
        compiled = jax.jit(function).lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(json.dumps({**labels, "refused": " ".join(str(error).split())[:300]}), flush=True)
        return
    memory, mib = compiled.memory_analysis(), 2 ** 20
    print(json.dumps({**labels, "seconds": round(time.time() - start, 1),
                      "temporary_mib": round(memory.temp_size_in_bytes / mib, 2),
                      "argument_mib": round(memory.argument_size_in_bytes / mib, 2),
                      "output_mib": round(memory.output_size_in_bytes / mib, 2),
                      "mosaic_calls": compiled.as_text().count("tpu_custom_call")}), flush=True)


def delta_training(form, backend, block):
    def step(clean, noisy, cotangents, documents=None):
        def run(clean, noisy):
            result = two_stream_gated_delta(clean, noisy, block_size=block, form=form, documents=documents,
                                            backend=backend if form == "folded" else None)
            return (result.out,) if noisy is None else (result.out, result.noisy_out)
        outs, pullback = jax.vjp(run, clean, noisy)
        return outs, pullback(cotangents)
    return step


def delta(chip, shape, form, backend, *blocks):
    name, _, packed = shape.partition("+")
    sharding = chip_sharding(chip)
    clean, noisy = delta_specs.abstract_streams(delta_specs.SHAPES[name], sharding)
    more = (jax.ShapeDtypeStruct(clean.q.shape[:2], np.int32, sharding=sharding),) if packed else ()
    for block in map(int, blocks):
        if block == 0:  # the single-stream baseline
            compile_and_report(delta_training(form, backend, 1), (clean, None, (clean.v,)), chip=chip, form="single",
                               backend=backend, block=0)
        else:
            compile_and_report(delta_training(form, backend, block), (clean, noisy, (clean.v, noisy.v), *more),
                               chip=chip, shape=shape, form=form, backend=backend, block=block)


def attention_training(q, k, v, mask):
    with use_backend("tpu"):
        out, pullback = jax.vjp(lambda q, k, v: block_mask_attention(q, k, v, mask), q, k, v)
        return out, pullback(out)


def attention_only(q, k, v, mask):
    return block_mask_attention(q, k, v, mask, backend="tpu")


def attention(chip, *names):
    for name in names:
        base, *sizes = name.split(":")
        shape = attention_specs.SHAPES[base if not sizes else f"{base}_128"]
        if sizes:
            tokens, batch = int(sizes[0]), int((sizes + [1])[1])
            shape = shape._replace(tokens=tokens, keys=tokens, batch=batch)
        args = attention_specs.abstract_inputs(shape, chip_sharding(chip))
        if shape.layout == "decode":
            compile_and_report(attention_only, args, chip=chip, shape=name, direction="forward")
        compile_and_report(attention_training, args, chip=chip, shape=name, direction="both")


def sharded(chip):
    """Both operations under shard_map over four chips: batch over one axis, heads over the other."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=FOUR_CHIPS[chip]).devices
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"))
    at = lambda spec: NamedSharding(mesh, spec)
    place = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at(spec))
    heads, rows = P("data", None, "tensor"), P("data")
    shape = attention_specs.SHAPES["two_stream_128"]._replace(batch=2, tokens=2048, keys=2048)
    q, k, v, mask = attention_specs.abstract_inputs(shape)
    args = (*(place(a, heads) for a in (q, k, v)), jax.tree.map(lambda a: place(a, rows), mask))
    out = (heads, (heads,) * 3)
    compile_and_report(jax.shard_map(attention_training, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=out,
                                     check_vma=False), args, chip=chip, operation="attention")
    shape = delta_specs.SHAPES["paper"]._replace(batch=2, tokens=512)
    clean, noisy = delta_specs.abstract_streams(shape)
    views = P("data", None, None, "tensor")
    args = (jax.tree.map(lambda a: place(a, heads), clean), jax.tree.map(lambda a: place(a, views), noisy))
    args += ((args[0].v, args[1].v),)
    pair = (heads, views)
    compile_and_report(jax.shard_map(delta_training("folded", "tpu", 4), mesh=mesh, in_specs=(*pair, pair),
                                     out_specs=(pair, pair), check_vma=False), args, chip=chip, operation="delta")


if __name__ == "__main__":
    {"delta": delta, "attention": attention, "sharded": sharded}[sys.argv[1]](*sys.argv[2:])
