"""The contract of stacks that mix attention with recurrence, kept by a toy layer: a leaky sum over the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import dlm_jax
from dlm_jax.decode import Autoregressive, Runner, generate
from dlm_jax.io import names
from dlm_jax.models import build, layers
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Cache, Pass
from tests.conftest import random_params, tiny_config

LEAK = 0.5


@struct.dataclass
class SumCache:
    """State of every layer before and after the last pass, (L, B, D) each."""

    before: jax.Array
    after: jax.Array
    capacity: int = struct.field(pytree_node=False)

    @property
    def batch(self):
        return self.after.shape[1]

    def grow(self, capacity):
        return self.replace(capacity=capacity)

    def take(self, rows):
        return self.replace(before=self.before[:, rows], after=self.after[:, rows])

    def insert(self, rows, other):
        put = lambda mine, theirs: mine.at[:, rows].set(theirs)
        return self.replace(before=put(self.before, other.before), after=put(self.after, other.after))

    def commit(self, accepted):  # whole passes only: enough for one token at a time
        kept = jnp.where((accepted > 0)[:, None], self.after, self.before)
        return self.replace(before=kept, after=kept)


class LeakySum(layers.Owner):
    """h_t = LEAK h_(t-1) + W x_t over the tokens that are written; the others neither read nor change the state."""

    form: str = "auto"

    @layers.nn.compact
    def __call__(self, x, told, cache, layer, context, wanted):
        D = self.config.hidden_size
        x = x @ self.weight("in_proj", (D, D), ("embed", None))
        writes = jnp.ones(x.shape[:2], bool) if cache is None else told.slots < cache.capacity
        start = jnp.zeros_like(x[:, 0]) if cache is None else cache.after[layer]

        def one(state, inputs):
            token, write = inputs
            state = jnp.where(write[:, None], LEAK * state + token, state)
            return state, state

        last, out = jax.lax.scan(one, start, (jnp.swapaxes(x, 0, 1), writes.T))
        if cache is not None:
            cache = cache.replace(before=cache.before.at[layer].set(start), after=cache.after.at[layer].set(last))
        return layers.chosen(jnp.swapaxes(out, 0, 1), wanted), cache

    @staticmethod
    def init_cache(config, params, batch, capacity, dtype, window):
        periods = params["in_proj"].reshape(-1, *params["in_proj"].shape[-2:]).shape[0]
        empty = jnp.zeros((periods, batch, config.hidden_size), dtype)
        return SumCache(empty, empty, capacity)


@pytest.fixture(scope="module")
def hybrid():
    layers.MIXERS["sum"] = LeakySum
    try:
        model = build.build(tiny_config(num_layers=8, pattern=("sum", "sum", "sum", "attention")))
        yield model, random_params(model)
    finally:
        del layers.MIXERS["sum"]


def test_a_period_lies_under_one_scan_and_unrolls(hybrid):
    model, params = hybrid
    assert sorted(params["layers"]) == [f"layer_{i}" for i in range(4)]
    assert params["layers"]["layer_0"]["sum"]["in_proj"].shape == (2, 32, 32)
    assert params["layers"]["layer_3"]["attention"]["q_proj"].shape[0] == 2
    tokens = np.random.default_rng(0).integers(0, 97, (2, 9))
    plain, unrolled = dlm_jax.forward(model, params, tokens), dlm_jax.forward(*build.unroll(model, params), tokens)
    np.testing.assert_allclose(plain, unrolled, atol=1e-5)


@pytest.mark.parametrize("unrolled", [False, True])
def test_wanted_outputs_are_those_of_the_whole_pass(hybrid, unrolled):
    model, params = build.unroll(*hybrid) if unrolled else hybrid
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 9)))
    index = jnp.broadcast_to(jnp.arange(9), (2, 9))
    wanted = jnp.array([[8, 2], [0, 5]])

    @jax.jit
    def run(params, wanted):
        score = model.scorer(params)
        told = Pass(index, vis.causal(jnp.ones((2, 9), bool)), index)
        return score.hidden(tokens, told, score.init_cache(2, 9), wanted)

    (some, left), (every, right) = run(params, wanted), run(params, None)
    np.testing.assert_allclose(some, jnp.take_along_axis(every, wanted[..., None], axis=1), atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), left, right)
    assert isinstance(left, Cache)


@pytest.mark.parametrize("unrolled", [False, True])
def test_cached_decoding_equals_recomputing_everything(hybrid, unrolled):
    """Ragged rows, of which one ends early: neither padding nor a finished row reaches a state."""
    model, params = build.unroll(*hybrid) if unrolled else hybrid
    rows, limits = [[5, 6, 7, 8, 9], [3], [4, 4]], [6, 9, 2]
    out = generate(model, params, rows, Autoregressive(), max_new_tokens=limits, eos_id=-1)
    for row, tokens, limit in zip(rows, out.tokens, limits):
        ids = list(row)
        for _ in range(limit):
            ids.append(int(jnp.argmax(dlm_jax.forward(model, params, np.array([ids]))[0, -1])))
        assert tokens.tolist() == ids[len(row):]


def test_rows_come_and_go(hybrid):
    rows, newcomer = [[5, 6, 7, 8, 9], [3]], [8, 1, 4]
    whole = generate(*hybrid, rows, Autoregressive(), max_new_tokens=[3, 9], eos_id=-1)
    alone = generate(*hybrid, [newcomer], Autoregressive(), max_new_tokens=6, eos_id=-1)
    runner = Runner(*hybrid, Autoregressive())
    batch = runner.run(runner.start(runner.request(rows, max_new_tokens=[3, 9], eos_id=-1)), steps=4)
    first, batch = runner.release(batch, [0])
    batch = runner.run(runner.admit(batch, 0, newcomer, max_new_tokens=6))
    done = runner.read(batch, [0, 1])
    for got, want in ((first.tokens[0], whole.tokens[0]), (done.tokens[1], whole.tokens[1]),
                      (done.tokens[0], alone.tokens[0])):
        np.testing.assert_array_equal(got, want)


def test_a_table_of_names_says_every_fourth_layer():
    row = ("model.layers.{L:3::4}.self_attn.q_proj.weight", "layers.layer_3.attention.q_proj", "(N H) D -> D N H")
    made = names.parameter(row, {"L": 8, "N": 2, "H": 4, "D": 6})
    assert made.names == ("model.layers.3.self_attn.q_proj.weight", "model.layers.7.self_attn.q_proj.weight")
    assert made.shape == (2, 6, 2, 4) and made.path == ("layers", "layer_3", "attention", "q_proj")


def test_patterns_that_make_no_stack_are_refused():
    with pytest.raises(ValueError, match="num_layers = 3 is not a multiple of the 2 layers"):
        tiny_config(num_layers=3, pattern=("attention", "attention"))
    with pytest.raises(ValueError, match="'mamba' is no kind of layer; accepted"):
        build.build(tiny_config(num_layers=2, pattern=("mamba",)))
