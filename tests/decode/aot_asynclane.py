"""What a step of AsyncLane costs LLaDA-8B on a TPU that is not here, beside a block-wise one with a dual cache.

  python -m tests.decode.aot_asynclane v6e:1x1 --output launch/results/asynclane_tpu_compiler.md

A step is compiled for each number of lanes at once, without a refresh, and once as a refresh alone; flops, bytes and
estimated cycles are those of one and of two layers outside a scan, continued in a straight line to all layers.
"""

from tests.decode import aot_masked as aot  # first: it prepares the environment for jax

import argparse
import contextlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from configs.llada import LLADA_8B
from dlm_jax.decode import AsyncLane, MaskedDiffusion, Sampler, Threshold, executables, sampling
from dlm_jax.decode.asynclane import Boundary, forward
from dlm_jax.decode.asynclane.state import Rooms
from dlm_jax.decode.masked import Blocks, Dual, Never
from dlm_jax.decode.masked import decoder as masked
from dlm_jax.models import build
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from launch.compile import chips
from launch.compile.hlo import Program
from pallas_kernels import use_backend


def lanes(count: int) -> list:
    """Returns the patches under which a step reads so many lanes and refreshes nothing."""
    idle = lambda score, request, state, due, stop, number: (
        jnp.zeros((*number.shape, LLADA_8B.hidden_size), jnp.bfloat16), state.cache)
    return [mock.patch.object(forward, "_refresh", idle),
            mock.patch.object(Rooms, "counts", property(lambda self: (count,)))]


def refresh(width: int) -> list:
    """Returns the patches under which a step is a refresh of that width and one lane's reading of it."""
    ask = forward.ask
    narrow = lambda score, request, queries, cache, wanted, **_: ask(
        score, request, jax.tree.map(lambda x: x[:, :width], queries), cache, wanted)
    idle = lambda score, request, state, seats, asking, view, policy, rooms, cache: (
        jnp.zeros((*view.number.shape, LLADA_8B.hidden_size), jnp.bfloat16), cache,
        jnp.zeros(request.batch, jnp.int32))
    return [mock.patch.object(forward, "_lanes", idle), mock.patch.object(forward, "ask", narrow),
            mock.patch.object(Rooms, "counts", property(lambda self: (1,)))]


def dual(width: int) -> list:
    """Returns the patches under which a block-wise step reads one window."""
    ask = masked.ask
    return [mock.patch.object(masked, "ask", lambda score, request, queries, cache, wanted, widths: ask(
        score, request, jax.tree.map(lambda x: x[:, :width], queries), cache, wanted))]


def cost(decoder, patches: list, mesh, options) -> dict[str, float]:
    """Returns flops, bytes accessed and estimated cycles of a step, and the seconds they took to find."""
    found, begun = [], time.time()
    greedy = mock.patch.object(Sampler, "draw", lambda self, logits, keys: sampling.likeliest(logits))
    for layers in (1, 2):
        config = LLADA_8B.replace(num_layers=layers)
        with contextlib.ExitStack() as stack:
            for patch in (greedy, *patches):
                stack.enter_context(patch)
            model, arguments = aot.arguments_of(config, mesh, decoder.fitted(config), options, scan=False)
            executable = aot.compiled(executables.step, model, arguments)[0]
        counted = executable.cost_analysis()
        found.append({"flops": counted["flops"], "bytes": counted["bytes accessed"],
                      "cycles": Program(executable.as_text()).cost().cycles})
    one, two = found
    whole = {name: one[name] + (options.layers - 1) * (two[name] - one[name]) for name in one}
    return whole | {"seconds": time.time() - begun}


def steps(options) -> dict:
    """Returns name -> (queries, decoder, patches) of every step that is compiled."""
    B, G = options.block, options.answer
    whole, part = options.prompt + G, options.prompt + G // 4
    block = MaskedDiffusion(schedule=Blocks(B), cache=Dual(), commit=Threshold(0.9), stop=Never())
    of = lambda count: AsyncLane(boundary=Boundary(delimiters=(13,)), block_size=B, lookahead=B, lane_capacity=count)
    return {
        "block-wise, dual cache: a block": (B, block, dual(B)),
        "block-wise, dual cache: a new block": (whole, block, dual(whole)),
        **{f"AsyncLane: {n} lane{'s' * (n > 1)}": (2 * B * n, of(n), lanes(n)) for n in options.lanes},
        "AsyncLane: a refresh of a quarter": (part, of(1), refresh(part))}


def markdown(found: dict, options) -> str:
    """Returns the report as a page."""
    chip = chips.CHIPS[options.topology.split(":")[0]]
    weights = 2 * build.parameter_shares(build.build(LLADA_8B))["total"]  # bytes
    lines = [
        "# AsyncLane on LLaDA-8B as the TPU compiler counts it", "",
        f"`python -m tests.decode.aot_asynclane {' '.join(options.command)}`, {time.strftime('%Y-%m-%d')}, "
        f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}. Nothing was run on a TPU.", "",
        f"{options.topology}, one chip; bfloat16, batch 1, prompt {options.prompt}, answer {options.answer}, blocks, "
        f"lanes and lookahead of {options.block}, {options.layers} layers. Flops, bytes and the compiler's estimated "
        "cycles of one greedy step, those of one and of two layers outside a scan continued to all. Bytes accessed are "
        "the operands and results of every operation, also of those in the chip's fast memory; kernels have no "
        f"estimate of cycles here. The floor is the longer of reading {weights / 1e9:.1f} GB of weights once and "
        "of the flops at peak.", "",
        "| step | queries | TFLOP | GB | M cycles | ms | floor, ms |", "|---|---|---|---|---|---|---|"]
    for name, row in found.items():
        floor = max(weights / chip.bandwidth, row["flops"] / chip.flops)
        lines.append(f"| {name} | {row['queries']} | {row['flops'] / 1e12:.3f} | {row['bytes'] / 1e9:.2f} | "
                     f"{row['cycles'] / 1e6:.2f} | {row['cycles'] / chip.clock * 1e3:.1f} | {floor * 1e3:.1f} |")
    return "\n".join(lines) + "\n"


def main(command: list[str]) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("topology")
    for name, value in (("batch", 1), ("prompt", 1024), ("answer", 256), ("block", 32), ("layers", 32)):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--output", help="write the table as Markdown")
    options = p.parse_args(command)
    options.command = command
    jax.config.update("jax_enable_compilation_cache", False)
    _, devices = chips.devices(options.topology)
    mesh, found = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=len(devices)), devices), {}
    with use_backend("tpu"):
        for name, (queries, decoder, patches) in steps(options).items():
            found[name] = {"queries": queries, **cost(decoder, patches, mesh, options)}
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    if options.output:
        Path(options.output).write_text(markdown(found, options))


if __name__ == "__main__":
    main(sys.argv[1:])
