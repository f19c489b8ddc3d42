"""The tables of tensor names: complete, and their layouts invertible."""

import jax
import numpy as np
import pytest

from dlm_jax.io import names
from dlm_jax.models import build
from tests.conftest import tiny_config

SIZES = {"A": 2, "B": 3, "C": 4, "L": 2, "E": 3}


@pytest.mark.parametrize("family", sorted(names.TABLES))
@pytest.mark.parametrize("tied", [True, False])
def test_tables_cover_exactly_the_parameter_tree(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
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


def test_a_linear_layer_keeps_its_meaning():
    draw = np.random.default_rng(0)
    weight, x = draw.standard_normal((6, 4)), draw.standard_normal((5, 4))
    parameter = names.parameter(("w", "w", "(A B) C -> C A B"), SIZES)
    ours = np.einsum("tc,cab->tab", x, parameter.from_stored(weight))
    np.testing.assert_allclose(ours, (x @ weight.T).reshape(5, 2, 3))
