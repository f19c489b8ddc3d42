"""What a step of masked-diffusion decoding costs LLaDA-8B on TPUs that are not here, by the compiler's own count.

  python -m tests.decode.aot_masked v6e:2x4 --output launch/results/masked_tpu_compiler.md

Memory is that of the compiled loop. The compiler counts the body of a loop once, and of several branches the most
costly: so flops and bytes are those of a greedy step compiled for one window width, with one and with two layers
outside a scan, continued in a straight line to the layers there are.
"""

from launch.compile import environment

environment.prepare()  # before jax is imported

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from configs.llada import LLADA_8B
from dlm_jax.decode import MaskedDiffusion, Sampler, executables, sampling
from dlm_jax.decode.masked import Blocks, Dual, Free, Never, NoCache, Prefix
from dlm_jax.decode.masked import decoder as masked
from dlm_jax.models import build
from dlm_jax.train import sharding
from dlm_jax.train.config import MeshConfig
from launch.compile import chips, programs
from pallas_kernels import use_backend

POLICIES = {"none": NoCache(), "prefix": Prefix(), "dual": Dual(), "free": Free()}


def arguments_of(config, mesh, decoder, options, scan: bool):
    """Returns the module, and abstract parameters, decoder and request."""
    model = dataclasses.replace(build.build(config), scan=scan)
    return model, programs.decoding_arguments(model, mesh, decoder, options.batch, options.prompt, options.answer)


def compiled(function, model, arguments, *more):
    """Returns the executable of `executables.step` or `loop`; `init` is compiled before, for the state's shardings."""
    lowered = executables.jitted(executables.init, model).lower(*arguments)
    start = lowered.compile()
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                         lowered.out_info, start.output_shardings)
    return executables.jitted(function, model).lower(*arguments, state, *more).compile(), state


def step_cost(config, mesh, decoder, options, width: int) -> dict[str, float]:
    """Returns flops and bytes accessed of one step of that window width, a chip."""
    found = []
    ask = masked.ask
    narrow = lambda score, request, queries, cache, wanted, widths: ask(
        score, request, jax.tree.map(lambda x: x[:, :width], queries), cache, wanted)
    one_branch = mock.patch.object(masked, "ask", narrow)
    greedy = mock.patch.object(Sampler, "draw", lambda self, logits, keys: sampling.likeliest(logits))
    for layers in (1, 2):
        with one_branch, greedy:
            model, arguments = arguments_of(config.replace(num_layers=layers), mesh, decoder, options, scan=False)
            cost = compiled(executables.step, model, arguments)[0].cost_analysis()
        found.append({"flops": cost["flops"], "bytes": cost["bytes accessed"]})
    one, two = found
    return {name: one[name] + (config.num_layers - 1) * (two[name] - one[name]) for name in one}


def windows(policy: str, widths: tuple[int, ...], options) -> dict[int, int]:
    """Returns how many steps of each width an answer takes, one token a step."""
    taken = dict.fromkeys(widths, 0)
    for step in range(options.answer):
        begin = step // options.block * options.block
        full = policy == "none" or step == 0 or (policy != "free" and step == begin)
        ahead = options.block if policy == "dual" else options.answer - begin
        need = options.prompt + options.answer if full else ahead
        taken[min(w for w in widths if w >= need)] += 1
    return {width: count for width, count in taken.items() if count}


def measure(options) -> dict:
    """Compiles everything, one program at a time; returns memory by policy and cost by width."""
    jax.config.update("jax_enable_compilation_cache", False)
    _, devices = chips.devices(options.topology)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=len(devices)), devices)
    config = LLADA_8B.replace(num_layers=options.layers)
    report: dict = {"chips": len(devices), "policies": {}, "steps": {}}
    costs: dict[tuple[bool, int], dict] = {}
    for policy in options.policies:
        decoder = MaskedDiffusion(schedule=Blocks(options.block), cache=POLICIES[policy], stop=Never())
        begun = time.time()
        model, arguments = arguments_of(config, mesh, decoder, options, scan=True)
        steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
        executable, state = compiled(executables.loop, model, arguments, steps)
        memory, cache = executable.memory_analysis(), jax.tree.leaves(state.cache)
        request = arguments[2]
        sizes = decoder.cache.widths(request, options.block, decoder.schedule.several)
        widths = (*(size for size in sizes if size < request.entries), request.entries)
        counts = windows(policy, widths, options)
        for width in counts:
            if (policy != "none", width) not in costs:  # with a cache, a step depends on its width alone
                costs[policy != "none", width] = step_cost(config, mesh, decoder, options, width)
                print(policy, width, costs[policy != "none", width], f"{time.time() - begun:.0f} s", file=sys.stderr,
                      flush=True)
        whole = lambda name: sum(n * costs[policy != "none", w][name] for w, n in counts.items())
        report["policies"][policy] = {
            "arguments_gib": memory.argument_size_in_bytes / 2**30,
            "temporaries_gib": memory.temp_size_in_bytes / 2**30,
            "aliased_gib": memory.alias_size_in_bytes / 2**30,
            "cache_gib": sum(x.size * x.dtype.itemsize for x in cache) / 2**30 / len(devices),
            "windows": counts, "seconds": time.time() - begun,
            "step": {name: whole(name) / options.answer for name in ("flops", "bytes")}}
        print(json.dumps({policy: report["policies"][policy]}), file=sys.stderr, flush=True)
    report["steps"] = [{"cache": cached, "width": width, **cost} for (cached, width), cost in costs.items()]
    return report


def markdown(report: dict, options) -> str:
    """Returns the report as a page."""
    version = importlib.metadata.version
    first = report["policies"][options.policies[0]]["step"]
    lines = [
        "# Masked-diffusion decoding of LLaDA-8B as the TPU compiler counts it", "",
        f"`python -m tests.decode.aot_masked {' '.join(options.command)}`, {time.strftime('%Y-%m-%d')}, "
        f"jax {jax.__version__}, libtpu {version('libtpu')}. Nothing was run on a TPU.", "",
        f"{options.topology}, {report['chips']} chips, tensor-parallel; bfloat16, batch {options.batch}, prompt "
        f"{options.prompt}, answer {options.answer}, blocks of {options.block}, {options.layers} layers. All numbers "
        "are a chip's.", "",
        "An answer of one token a step, greedy; flops and bytes accessed are means over its steps. Arguments are "
        "weights and cache, temporaries those of the compiled loop. Bytes accessed are the operands and results of "
        "every operation, also of those in the chip's fast memory.", "",
        "| cache | windows (steps x queries a row) | TFLOP a step | GB a step | FLOPs against none | arguments GiB "
        "| cache GiB | temporaries GiB |", "|---|---|---|---|---|---|---|---|"]
    for policy, r in report["policies"].items():
        shown = ", ".join(f"{n} x {w}" for w, n in sorted(r["windows"].items(), reverse=True))
        lines.append(
            f"| {policy} | {shown} | {r['step']['flops'] / 1e12:.3f} | {r['step']['bytes'] / 1e9:.2f} | 1 / "
            f"{first['flops'] / r['step']['flops']:.1f} | {r['arguments_gib']:.2f} | {r['cache_gib']:.2f} | "
            f"{r['temporaries_gib']:.2f} |")
    lines += ["", "One step, by the width of its window (flops and bytes of one and of two layers outside a scan, "
              f"continued to {options.layers}):", "", "| keys cached | queries a row | TFLOP | GB |",
              "|---|---|---|---|"]
    lines += [f"| {'yes' if s['cache'] else 'no'} | {s['width']} | {s['flops'] / 1e12:.3f} | {s['bytes'] / 1e9:.2f} |"
              for s in sorted(report["steps"], key=lambda s: (s["cache"], -s["width"]))]
    return "\n".join(lines) + "\n"


def main(command: list[str]) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("topology")
    for name, value in (("batch", 8), ("prompt", 1024), ("answer", 256), ("block", 32), ("layers", 32)):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--policies", nargs="+", choices=POLICIES, default=[*POLICIES])
    p.add_argument("--output", help="write the tables as Markdown")
    options = p.parse_args(command)
    options.command = command
    with use_backend("tpu"):
        report = measure(options)
    if options.output:
        Path(options.output).write_text(markdown(report, options))
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
