"""Measure decoders and kernels on whatever device is here.

Examples:

    # AR and ReFusion on a random 60 M-parameter model, batch 1 and 8, beside eager PyTorch if torch is installed
    python -m launch.benchmark decode --output results.json

    # the kernels: attention, and forms of the two-stream gated delta rule by block size; on an accelerator at the
    # paper's shape, beside cuDNN and, if it is installed, flash-linear-attention
    python -m launch.benchmark kernels --output kernels.md

    # masked diffusion: vanilla, caches, thresholds, block diffusion and a guide, beside eager PyTorch's loops
    python -m launch.benchmark masked --output masked.json

    # a smaller decoding benchmark, in seconds
    python -m launch.benchmark decode --width 128 --layers 2 --vocab 1024 --new-tokens 32

Every number of a table comes from one run: medians over repeats, interleaved, device-synchronised, compile apart.
Columns: `ms/forward` is the loop's wall time over its forwards; `bare` the same model call without the decoder
around it, in a loop of its own; `floor` only that call's matrix products, on the same weights; `eager` the same
call in eager PyTorch (transformers) on the same weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dlm_jax.scoring import Pass
from launch import cli


def model_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns a random model of the size asked for."""
    from dlm_jax.models import build
    from dlm_jax.models.config import TransformerConfig

    heads = max(2, options.width // 64)
    config = TransformerConfig(
        vocab_size=options.vocab, hidden_size=options.width, intermediate_size=3 * options.width,
        num_layers=options.layers, num_heads=heads, num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=64, tie_word_embeddings=True, eos_token_id=0, mask_token_id=options.vocab - 1)
    model = build.build(config)
    return model, jax.jit(build.init_params, static_argnums=0)(model, jax.random.key(0))


def bare_loop(model: Any, batch: int, tokens: int, capacity: int, forwards: int):
    """Returns a compiled function of params that calls the model `forwards` times on these shapes."""
    from dlm_jax.nn import visibility as vis

    position = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    rank = jnp.broadcast_to(jnp.arange(capacity), (batch, capacity))

    @jax.jit
    def run(params):
        score = model.scorer(params)

        def body(_, carry):
            cache, ids = carry
            rule = vis.by_rank(jnp.zeros_like(position), position, rank)
            hidden, cache = score.hidden(ids, Pass(position, rule, position), cache)
            return cache, jnp.argmax(score.head(hidden), axis=-1).astype(jnp.int32)

        start = (score.init_cache(batch, capacity), jnp.zeros((batch, tokens), jnp.int32))
        return jax.lax.fori_loop(0, forwards, body, start)[1]

    return run


def floor_loop(config: Any, batch: int, tokens: int, capacity: int, forwards: int):
    """Returns a compiled function of unrolled params that does only the matrix products of such a call."""
    c = config
    N, K, H, D = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size

    @jax.jit
    def run(params, memory):
        layers = [params[f"layers_{i}"] for i in range(c.num_layers)]

        def body(_, x):
            first = x
            for w, kv in zip(layers, memory):
                a, m = w["attention"], w["mlp"]
                q = x @ a["q_proj"].reshape(D, N * H)
                kv_new = x @ a["k_proj"].reshape(D, K * H) + x @ a["v_proj"].reshape(D, K * H)
                q = q.reshape(batch, tokens, K, N // K, H)
                logits = jnp.einsum("btkgh,bksh->bkgts", q, kv)
                seen = jnp.einsum("bkgts,bksh->btkgh", logits, kv).reshape(-1, N * H)
                x = x + seen @ a["o_proj"].reshape(N * H, D) + jnp.sum(kv_new, axis=1, keepdims=True)
                x = x + ((x @ m["gate_proj"]) * (x @ m["up_proj"])) @ m["down_proj"]
            logits = x @ params["embed"].T
            return first + 1e-30 * jnp.max(logits, axis=1, keepdims=True)

        return jax.lax.fori_loop(0, forwards, body, jnp.full((batch * tokens, D), 1e-3))

    memory = [jnp.full((batch, K, capacity, H), 1e-6) for _ in range(c.num_layers)]
    return lambda params: run(params, memory)


def eager_call(folder: str, batch: int, tokens: int, capacity: int):
    """Returns a function that makes one cached call of that shape in eager PyTorch, None without torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache
    except ImportError:
        return None
    torch.set_grad_enabled(False)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    past = DynamicCache(config=network.config)
    context = capacity - tokens
    network(input_ids=torch.ones((batch, context), dtype=torch.long), past_key_values=past, use_cache=True)
    ids = torch.ones((batch, tokens), dtype=torch.long)
    place = torch.arange(context, capacity)[None].expand(batch, -1)

    def call():
        network(input_ids=ids, position_ids=place, past_key_values=past, use_cache=True).logits.argmax(-1)
        past.crop(-tokens)

    return call


def seconds(functions: dict[str, Any], repeats: int, warm_up: bool = True) -> dict[str, float]:
    """Returns the median wall seconds of each function, called in turn `repeats` times, by default after a warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + warm_up):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            if turn >= warm_up:
                taken[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in taken.items()}


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Times every decoder at every batch size; returns the table as plain values."""
    import dlm_jax
    from dlm_jax.decode import Autoregressive, ReFusion
    from dlm_jax.decode.state import bucket
    from dlm_jax.models import build

    stacked = model_of(options)
    model, params = build.unroll(*stacked)
    k, block, new = 8, 32, options.new_tokens
    systems = {  # name: decoder, queries of one of its forwards
        "AR": (Autoregressive(), 1),
        "ReFusion all accepted": (
            ReFusion(slot_size=k, block_length=block, slot_threshold=0.0, token_threshold=0.0), block + block // k),
        "ReFusion none accepted": (
            ReFusion(slot_size=k, block_length=block, slot_threshold=0.0, token_threshold=1.0), None),
    }
    draw = np.random.default_rng(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dlm_jax.save(folder + "/model", *stacked)
        for batch in options.batch:
            prompts = [draw.integers(1, options.vocab - 1, options.prompt).tolist() for _ in range(batch)]
            for name, (decoder, queries) in systems.items():
                make = lambda: dlm_jax.generate(model, params, prompts, decoder, max_new_tokens=new, eos_id=-1)
                cold = make()
                steps = int(cold.ledger.after_prefill().max())
                row = {"system": name, "batch": batch, "tokens_per_forward": cold.ledger.tokens_per_forward(),
                       "forwards": steps, "compile_seconds": cold.seconds["compile"]}
                capacity = bucket(options.prompt) + decoder.generation_capacity(bucket(new))
                measured, calls = {}, {"loop": lambda: measured.setdefault("runs", []).append(make())}
                if queries:
                    shape = (batch, queries, capacity, steps)
                    bare, least = bare_loop(model, *shape), floor_loop(model.config, *shape)
                    calls |= {"bare": lambda: bare(params), "floor": lambda: least(params)}
                    eager = eager_call(folder + "/model", *shape[:3])
                    if eager:
                        calls["eager"] = lambda: [eager() for _ in range(min(steps, 16))]
                taken = seconds(calls, options.repeats)
                warm = measured["runs"][1:]
                loop = float(np.median([r.seconds["decode"] for r in warm]))
                row |= {"tokens_per_second": float(np.median([r.tokens_per_second for r in warm])),
                        "ms_per_forward": 1e3 * loop / steps}
                for key, count in (("bare", steps), ("floor", steps), ("eager", min(steps, 16))):
                    if key in taken:
                        row[f"{key}_ms"] = 1e3 * taken[key] / count
                rows.append(row)
    size = sum(x.size for x in jax.tree.leaves(params))
    return {"command": "python -m launch.benchmark " + " ".join(sys.argv[1:]), "parameters": size,
            "machine": machine(), "rows": rows}


def machine() -> dict[str, str]:
    """Returns the device and the versions that a result depends on."""
    versions = {"jax": jax.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    try:
        import torch

        versions["torch"] = torch.__version__
    except ImportError:
        pass
    return {"device": jax.devices()[0].device_kind, "backend": jax.default_backend(), **versions}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a result as a table."""
    names = ["system", "batch", "tokens_per_second", "tokens_per_forward", "ms_per_forward", "bare_ms", "floor_ms",
             "eager_ms", "compile_seconds"]
    table = Table(title=f"{result['parameters'] / 1e6:.0f} M parameters on {result['machine']['device']}")
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "system" else "right",
                         no_wrap=name == "system")
    for row in result["rows"]:
        cell = lambda v: "" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v)
        table.add_row(*(cell(row.get(name)) for name in names))
    console.print(table)


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m launch.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("decode", "kernels", "masked"),
                   help="what to measure; `kernels --help` and `masked --help` have options of their own")
    p.add_argument("--width", type=int, default=512, help="hidden size, a multiple of 64 (default: %(default)s)")
    p.add_argument("--layers", type=int, default=16, help="layers (default: %(default)s)")
    p.add_argument("--vocab", type=int, default=16384, help="vocabulary (default: %(default)s)")
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    p.add_argument("--prompt", type=int, default=96, help="prompt length, tokens (default: %(default)s)")
    p.add_argument("--new-tokens", type=int, default=96, help="answer length, tokens (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=5, help="timed repeats of each number (default: %(default)s)")
    p.add_argument("--output", metavar="FILE", help="write the table as JSON")
    return p


def run(options: argparse.Namespace) -> None:
    """Does what the command line of `decode` says."""
    for name in ("layers", "vocab", "prompt", "new_tokens", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    if options.width % 64 or options.width < 64:
        raise ValueError(f"--width {options.width}: a positive multiple of 64")
    result = decode(options)
    show(result, Console())
    if options.output:
        with open(options.output, "w") as file:
            json.dump(result, file, indent=1)


def main(arguments: list[str] | None = None) -> int:
    """Runs the launcher; returns the exit status, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["kernels"]:
        from launch.kernel_peers import PEERS
        from pallas_kernels import benchmark as kernels

        peers = PEERS if jax.default_backend() == "gpu" else None
        kernels.main(arguments[1:], "python -m launch.benchmark kernels", peers)
        return 0
    if arguments[:1] == ["masked"]:
        from launch import benchmark_masked

        return benchmark_masked.main(arguments[1:])
    options = parser().parse_args(arguments)
    return cli.exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
