"""How much is computed: products of the folded form against a single stream, from the traced programs."""
import math

import jax
import pytest

from pallas_kernels import two_stream_gated_delta
from pallas_kernels.gated_delta import arg_specs


def product_flops(jaxpr, times=1):
    """2 M N K of every dot_general, times scan lengths and kernel grids; of a branch the dearest arm."""
    total = 0
    for equation in jaxpr.eqns:
        inner, name = times, equation.primitive.name
        if name == "dot_general":
            (contract, contract_rhs), (_, batch) = equation.params["dimension_numbers"]
            left, right = (v.aval.shape for v in equation.invars)
            free = math.prod(d for i, d in enumerate(right) if i not in {*contract_rhs, *batch})
            total += times * 2 * math.prod(left) * free
        elif name == "scan":
            inner = times * equation.params["length"]
        elif name == "pallas_call":
            inner = times * math.prod(equation.params["grid_mapping"].grid)
        elif name == "cond":
            total += max(product_flops(b.jaxpr, times) for b in equation.params["branches"])
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    total += product_flops(part, inner)
    return total


def training_flops(clean, noisy, block, backend, forward_only=False):
    def step(clean, noisy):
        def run(clean, noisy):
            result = two_stream_gated_delta(clean, noisy, block_size=block, backend=backend)
            return tuple(x for x in result[:2] if x is not None)
        if forward_only:
            return run(clean, noisy)
        outs, pullback = jax.vjp(run, clean, noisy)
        return outs, pullback(outs)
    return product_flops(jax.make_jaxpr(step)(clean, noisy).jaxpr)


@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("block", [1, 8, 64])
def test_two_streams_cost_little_more_than_two(backend, block, forward_only):
    """At the paper's shape, products of clean stream and one noisy view are at most 2.2 times the clean stream's."""
    clean, noisy = arg_specs.abstract_streams(arg_specs.SHAPES["paper"])
    both = training_flops(clean, noisy, block, backend, forward_only)
    single = training_flops(clean, None, 1, backend, forward_only)
    assert both / single <= 2.2, both / single
