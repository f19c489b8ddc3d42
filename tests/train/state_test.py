"""Splitting parameters into trained and frozen ones."""

import pytest

from dlm_jax.train.state import merge, partition

TREE = {"embed": 1, "layers": {"attention": {"q_proj": 2, "k_proj": 3}, "mlp": {"up_proj": 4}}}


def test_partition_follows_paths_and_merge_undoes_it():
    trainable, frozen = partition(TREE, "attention/q|^embed$")
    assert trainable == {"embed": 1, "layers": {"attention": {"q_proj": 2}}}
    assert frozen == {"layers": {"attention": {"k_proj": 3}, "mlp": {"up_proj": 4}}}
    assert merge(trainable, frozen) == TREE


def test_no_pattern_trains_all():
    assert partition(TREE, None) == (TREE, {})


def test_a_pattern_that_matches_nothing_is_refused_with_the_paths():
    with pytest.raises(ValueError, match="'q_projj' matches no parameter.*layers/attention/q_proj"):
        partition(TREE, "q_projj")
