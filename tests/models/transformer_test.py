"""The dense stack: against the authors' numbers, against transformers, and against itself in other forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax.models import build
from dlm_jax.models.layers import Layer
from dlm_jax.nn import visibility as vis
from dlm_jax.nn.norms import rms_norm
from dlm_jax.scoring import Pass
from tests.oracle import qwen3
from tests.conftest import ROOT, random_params, tiny_config

FAMILIES = [("qwen3", False), ("qwen3", True), ("qwen2", False), ("qwen2", True)]


def make(family="qwen3", tied=False, seed=0, **changes):
    model = build.build(tiny_config(family, tie_word_embeddings=tied, **changes))
    return model, random_params(model, seed)


def draw_tokens(batch=2, length=11, seed=0, vocab=97):
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


def folders():
    beside = sorted((ROOT.parent / "shared" / "oracle").glob("qwen3_*/cases.npz"))
    ours = sorted((ROOT / "tests" / "golden").glob("qwen3_*/cases.npz"))
    return [f.parent for f in [*ours, *beside] if "Qwen3ForCausalLM" in (f.parent / "config.json").read_text()]


@pytest.mark.parametrize("folder", folders(), ids=lambda f: f.name)
def test_reference_numbers(folder):
    passed, worst, detail = qwen3.run(folder)
    assert passed, detail
    assert 0 < worst < 2e-4


@pytest.mark.parametrize("folder", folders(), ids=lambda f: f.name)
def test_block_causal_rule_gives_the_reference_block_mask(folder):
    case = qwen3.read_cases(folder / "cases.npz")["blockmask"]
    # a causal prefix of 8 is 8 blocks of one token; then blocks of 4
    block = np.array([i if i < 8 else 8 + (i - 8) // 4 for i in range(case["mask"].shape[-1])])
    block = jnp.asarray(np.broadcast_to(block, case["input_ids"].shape), jnp.int32)
    rule = vis.by_rank(jnp.zeros_like(block), block, block)
    np.testing.assert_array_equal(rule.dense(), case["mask"][:, 0])
    np.testing.assert_allclose(dlm_jax.forward(*dlm_jax.load(folder), case["input_ids"], visibility=rule),
                               case["logits"], atol=2e-4, rtol=1e-4)


def test_reference_numbers_catch_a_wrong_model(monkeypatch):
    folder = folders()[0]
    right = dlm_jax.load(folder)
    wrong = (build.build(right[0].config.replace(rope_theta=3e4)), right[1])
    monkeypatch.setattr(dlm_jax, "load", lambda _: wrong)
    passed, worst, detail = qwen3.run(folder)
    assert not passed and worst > 1e-2 and "causal logits" in detail


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_matches_transformers(family, tied, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from transformers import AutoModelForCausalLM

    model, params = make(family, tied)
    dlm_jax.save(tmp_path / "model", model, params)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    tokens = draw_tokens()
    positions = np.random.default_rng(1).permuted(np.tile(np.arange(3, 25, 2), (2, 1)), axis=1)
    with torch.no_grad():
        plain = theirs(torch.tensor(tokens).long()).logits.numpy()
        # the all-ones mask keeps transformers from taking jumps in position for packed documents
        moved = theirs(torch.tensor(tokens).long(), position_ids=torch.tensor(positions),
                       attention_mask=torch.ones_like(torch.tensor(tokens))).logits.numpy()
    assert np.abs(plain - moved).max() > 1e-2
    np.testing.assert_allclose(dlm_jax.forward(model, params, tokens), plain, atol=2e-4)
    np.testing.assert_allclose(dlm_jax.forward(model, params, tokens, positions), moved, atol=2e-4)


def test_qwen2_biases_matter():
    model, params = make("qwen2")
    for name in ("q_bias", "k_bias", "v_bias"):
        attention = params["layers"]["attention"] | {name: jnp.zeros_like(params["layers"]["attention"][name])}
        without = params | {"layers": params["layers"] | {"attention": attention}}
        change = dlm_jax.forward(model, without, draw_tokens()) - dlm_jax.forward(model, params, draw_tokens())
        assert float(jnp.abs(change).max()) > 1e-3, name


def test_tied_head_is_the_embedding():
    tied, params = make(tied=True)
    untied = build.build(tied.config.replace(tie_word_embeddings=False))
    assert "lm_head" not in params
    np.testing.assert_array_equal(dlm_jax.forward(tied, params, draw_tokens()),
                                  dlm_jax.forward(untied, params | {"lm_head": params["embed"]}, draw_tokens()))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_scanned_layers_equal_a_python_loop(family):
    model, params = make(family)
    tokens = draw_tokens()
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rule = vis.causal(jnp.ones(tokens.shape, bool))
    x = params["embed"][tokens]
    for i in range(model.config.num_layers):
        layer = jax.tree.map(lambda p: p[i], params["layers"])
        x, _ = Layer(model.config).apply({"params": layer}, x, Pass(positions, rule), None, i)
    logits = rms_norm(x, params["final_norm"], model.config.rms_norm_eps) @ params["lm_head"].T
    np.testing.assert_allclose(dlm_jax.forward(model, params, tokens), logits, atol=1e-5)


def test_remat_changes_neither_loss_nor_gradient():
    config, (_, params) = tiny_config(), make()
    tokens = draw_tokens()

    def loss(params, remat):
        logits = build.build(config, remat=remat).scorer(params)(tokens)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 5])

    plain, again = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, remat) for remat in (False, True))
    np.testing.assert_allclose(plain[0], again[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(again[1]), strict=True):
        assert float(jnp.abs(a).max()) > 0
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4)
    count = lambda remat: str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params, remat)).count("remat")
    assert count(True) > count(False)


@pytest.mark.parametrize("seed", range(2))
def test_a_cache_filled_in_any_order_gives_the_same_logits(seed):
    model, params = make()
    tokens, draw = draw_tokens(seed=seed), np.random.default_rng(seed)
    B, T = tokens.shape
    S = T + 3
    slots = np.stack([draw.permutation(S)[:T] for _ in range(B)])  # where each token's entry lies
    rank = np.full((B, S), vis.NONE)
    np.put_along_axis(rank, slots, np.arange(T)[None], axis=1)

    @jax.jit
    def feed(piece, index, slots, cache):
        score = model.scorer(params)
        hidden, cache = score.hidden(
            piece, Pass(index, vis.by_rank(jnp.zeros_like(index), index, jnp.asarray(rank)), slots), cache)
        return score.head(hidden), cache

    cache, out = model.scorer(params).init_cache(B, S), []
    for start, stop in [(0, 4), (4, 8), (8, 9), (9, 10), (10, 11)]:
        index = jnp.broadcast_to(jnp.arange(start, stop), (B, stop - start))
        logits, cache = feed(tokens[:, start:stop], index, jnp.asarray(slots[:, start:stop]), cache)
        out.append(logits)
    np.testing.assert_allclose(jnp.concatenate(out, 1), dlm_jax.forward(model, params, tokens), atol=1e-5)


def test_physical_order_is_free_when_rank_and_position_move_along():
    model, params = make()
    tokens = draw_tokens()
    B, T = tokens.shape
    order = np.random.default_rng(3).permutation(T)
    rank = jnp.broadcast_to(jnp.asarray(order), (B, T)).astype(jnp.int32)
    shuffled = dlm_jax.forward(model, params, tokens[:, order], rank, vis.by_rank(jnp.zeros_like(rank), rank, rank))
    np.testing.assert_allclose(shuffled, dlm_jax.forward(model, params, tokens)[:, order], atol=1e-5)


def test_rows_padding_and_a_shift_of_positions_change_nothing():
    model, params = make()
    tokens = draw_tokens()
    alone = dlm_jax.forward(model, params, tokens[:1])
    np.testing.assert_allclose(alone, dlm_jax.forward(model, params, tokens)[:1], atol=1e-5)
    padded, valid = np.pad(tokens, ((0, 0), (4, 3))), np.zeros((2, 18), bool)
    valid[:, 4:15] = True
    positions = np.broadcast_to(np.arange(18) + 100, (2, 18))
    got = dlm_jax.forward(model, params, padded, positions, vis.causal(jnp.asarray(valid)))
    np.testing.assert_allclose(got[:1, 4:15], alone, atol=2e-4)


def test_computation_dtype_and_float32_logits():
    model, params = make()
    half = build.build(model.config, dtype=jnp.bfloat16)
    exact, rough = dlm_jax.forward(model, params, draw_tokens()), dlm_jax.forward(half, params, draw_tokens())
    assert exact.dtype == rough.dtype == jnp.float32
    assert half.scorer(params).init_cache(1, 2).members[0].keys.dtype == jnp.bfloat16
    difference = np.abs(exact - rough)
    assert 0 < difference.max() < 0.3 * np.abs(exact).max()
