"""The tables of tensor names: complete, and their layouts invertible."""

import jax
import numpy as np
import pytest

from dlm_jax.io import names
from dlm_jax.models import build
from tests.conftest import tiny_config
from tests.models.hybrids import KINDS, hybrid_config

SIZES = {"A": 2, "B": 3, "C": 4, "L": 2, "E": 3}


@pytest.mark.parametrize("family", sorted(names.TABLES))
@pytest.mark.parametrize("tied", [True, False])
def test_tables_cover_exactly_the_parameter_tree(family, tied):
    config = (hybrid_config if family in KINDS else tiny_config)(family, tie_word_embeddings=tied)
    flat = jax.tree_util.tree_flatten_with_path(build.abstract_params(build.build(config)))[0]
    assert {p.path: p.shape for p in names.parameters(config)} == {
        tuple(entry.key for entry in path): x.shape for path, x in flat}


@pytest.mark.parametrize("layout, expected", [
    ("A B -> A B", lambda x: x),
    ("A B -> B A", lambda x: x.T),
    ("(A B) C -> C A B", lambda x: x.reshape(2, 3, 4).transpose(2, 0, 1)),
    ("C (A B) -> A B C", lambda x: x.reshape(4, 2, 3).transpose(1, 2, 0)),
    ("(A B) -> A B", lambda x: x.reshape(2, 3)),
])
def test_layouts_mean_what_they_say_and_invert(layout, expected):
    parameter = names.parameter(("w", "a.b", layout), SIZES)
    stored = np.arange(np.prod(parameter.stored_shape)).reshape(parameter.stored_shape)
    part = parameter.from_stored(stored)
    assert np.shares_memory(part, stored), "a view, or the loader would hold a second copy"
    np.testing.assert_array_equal(part, expected(stored))
    assert part.shape == parameter.part_shape == parameter.shape
    np.testing.assert_array_equal(parameter.to_stored(part), stored)


def test_braces_stack_over_several_letters_in_order():
    parameter = names.parameter(("layer.{L}.expert.{E}.w", "w", "A B -> B A"), SIZES)
    assert parameter.shape == (2, 3, 3, 2)
    assert parameter.names[:4] == ("layer.0.expert.0.w", "layer.0.expert.1.w", "layer.0.expert.2.w",
                                   "layer.1.expert.0.w")


@pytest.mark.parametrize("name, rows", [
    ("conv1d.weight[q]", [0, 1, 2, 3]), ("conv1d.weight[k]", [4, 5, 6, 7]), ("conv1d.weight[v]", list(range(8, 20))),
    ("in_proj_qkvz.weight[k]", [2, 3, 18, 19]), ("in_proj_qkvz.weight[z]", [*range(10, 16), *range(26, 32)])])
def test_pieces_are_rows_of_a_tensor(name, rows):
    """2 key heads of 2 and 4 value heads of 3: [q q|k k|v 6|z 6] twice over, or all q, all k, all v."""
    sizes = {"Hk": 2, "dk": 2, "Hv": 4, "dv": 3, "R": 2, "C": 5}
    parameter = names.parameter(("a." + name, "w", f"(Hk {'dk' if name[-2] in 'qk' else 'E'}) C -> C Hk "
                                 f"{'dk' if name[-2] in 'qk' else 'E'}"), sizes | {"E": 6})
    stored = np.arange(np.prod(parameter.stored_shape)).reshape(parameter.stored_shape)
    part = parameter.from_stored(stored)
    np.testing.assert_array_equal(part.reshape(5, -1).T, stored[rows])
    again = np.zeros_like(stored)
    parameter.piece.put(again, parameter.to_stored(part))
    np.testing.assert_array_equal(again[rows], stored[rows])
    assert again.sum() == stored[rows].sum()


def test_a_linear_layer_keeps_its_meaning():
    draw = np.random.default_rng(0)
    weight, x = draw.standard_normal((6, 4)), draw.standard_normal((5, 4))
    parameter = names.parameter(("w", "w", "(A B) C -> C A B"), SIZES)
    ours = np.einsum("tc,cab->tab", x, parameter.from_stored(weight))
    np.testing.assert_allclose(ours, (x @ weight.T).reshape(5, 2, 3))
