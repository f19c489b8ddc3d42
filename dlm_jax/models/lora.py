"""Low-rank adapters as trees: kept beside the parameters, to be on for one pass and off for another, or merged.

An adapter has for every weight that it changes `a` (..., inputs, r), `b` (..., r, outputs) and `scale` (...); the dots
are the axes that layers and experts are stacked on. Under the key `KEY` of a parameter tree it belongs to the view
"diffusion" of the model (`scoring.Scorer.view`) and is off elsewhere.

Source: Hu et al., "LoRA" (arXiv 2106.09685), Sec. 4.1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dlm_jax.models.owner import ADAPTER as KEY
from dlm_jax.models.owner import adapted
from dlm_jax.types import Params


def attach(params: Params, adapter: Params) -> Params:
    """Returns parameters with an adapter that their model's view "diffusion" has on.

    Args:
      params: parameter tree.
      adapter: its tree.

    Raises:
      ValueError: an adapter for weights that there are not, or of other shapes; or there is one already.
    """
    if KEY in params:
        raise ValueError("these parameters have an adapter already: detach it first, or merge it")
    for path, node in _nodes(adapter):
        _check(path, _at(params, path), node)
    return {**params, KEY: adapter}


def detach(params: Params) -> tuple[Params, Params | None]:
    """Returns parameters without their adapter, and the adapter; None where there is none."""
    return {name: value for name, value in params.items() if name != KEY}, params.get(KEY)


def merge(params: Params, adapter: Params | None = None) -> Params:
    """Returns parameters into which an adapter has gone for good; weights that it does not change are shared.

    Args:
      params: parameter tree, with an adapter attached where none is given.
      adapter: its tree.

    Raises:
      ValueError: no adapter, or one that does not fit, see `attach`.
    """
    if adapter is None:
        params, adapter = detach(params)
        if adapter is None:
            raise ValueError("these parameters have no adapter: give one")
    merged = attach(params, adapter)
    merged = {name: value for name, value in merged.items() if name != KEY}
    for path, node in _nodes(adapter):
        merged = _replaced(merged, path, adapted(_at(params, path), node))
    return merged


def _nodes(tree: Params, path: tuple[str, ...] = ()):
    """Yields the path and the factors of every weight that is adapted."""
    if {*tree} == {"a", "b", "scale"}:
        yield path, tree
        return
    for name, below in tree.items():
        if not isinstance(below, Mapping):
            raise ValueError(f"{'.'.join((*path, name))} of an adapter is no factor; expected a, b and scale")
        yield from _nodes(below, (*path, name))


def _at(params: Params, path: tuple[str, ...]):
    try:
        return functools.reduce(lambda tree, key: tree[key], path, params)
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"the adapter changes {'.'.join(path)}, which these parameters do not have; was it made for "
                         "another model, or are layers unrolled?") from None


def _check(path: tuple[str, ...], weight, node) -> None:
    try:
        made = jax.eval_shape(adapted, weight, node)
    except (TypeError, ValueError):
        made = None
    if made is None or made.shape != weight.shape or node["a"].shape[-1] != node["b"].shape[node["scale"].ndim]:
        raise ValueError(f"{'.'.join(path)} is of shape {jnp.shape(weight)} and the adapter's factors of "
                         f"{jnp.shape(node['a'])} and {jnp.shape(node['b'])}; was it made for another size?")


def _replaced(tree: Params, path: tuple[str, ...], value) -> Params:
    first, *rest = path
    return {**tree, first: _replaced(tree[first], tuple(rest), value) if rest else value}
