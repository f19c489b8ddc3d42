"""Properties every decoder keeps: three loops agree, rows and padding do not matter, one compile a bucket."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import Autoregressive, Orthrus, ReFusion, api, generate, loop, stream
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig

V, MASK, EOS = 64, 63, 1


def peaked(seed: int, **changes):
    """A random dual model whose confidences spread over (0, 1), so that every branch of a decoder is walked."""
    config = TransformerConfig(
        family="orthrus", vocab_size=V, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, rope_theta=1e4, initializer_range=0.35, max_position_embeddings=512, eos_token_id=EOS,
        mask_token_id=MASK, **changes)
    model = build.build(config)
    return model, build.init_params(model, jax.random.key(seed))


@pytest.fixture(scope="module")
def network():
    return peaked(0)


def prompts(seed: int, count: int, low: int = 1, high: int = 14):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, V - 1, rng.integers(low, high)).tolist() for _ in range(count)]


DECODERS = {
    "greedy": Autoregressive(),
    "sampled": Autoregressive(temperature=0.8, top_k=12, top_p=0.9),
    "refusion": ReFusion(slot_size=4, block_length=16, slot_threshold=0.25, token_threshold=0.15),
    "refusion_mean": ReFusion(slot_size=4, block_length=8, slot_threshold=0.2, certainty="mean"),
    "refusion_redraft": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, completion="redraft"),
    "refusion_compat": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, reference_compat=True),
    "refusion_recompute": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, kv="recompute"),
    "refusion_fixed": ReFusion(slot_size=4, block_length=16, confidence_aware=False, slots_per_round=2),
    "refusion_sampled": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, temperature=0.7),
    "orthrus": Orthrus(block_size=4),
    "orthrus_sampled": Orthrus(block_size=3, temperature=0.9, top_k=20, top_p=0.95),
}


def request_for(model, rows, decoder, new_tokens, seed=3):
    eos, mask, capacity = api._check(model, rows, decoder, new_tokens, None, None)
    return api.make_request(rows, max_new_tokens=new_tokens, capacity=capacity, eos_id=eos,
                            mask_id=mask, seed=seed)


@pytest.mark.parametrize("name", DECODERS)
def test_streaming_equals_the_compiled_loop(network, name):
    model, params = network
    rows, decoder = prompts(1, 3), DECODERS[name]
    compiled = generate(model, params, rows, decoder, max_new_tokens=[20, 19, 13], seed=3)
    streamed, forwards = np.full_like(compiled.canvas, -1), np.zeros(3, int)
    for event in stream(model, params, rows, decoder, max_new_tokens=[20, 19, 13], seed=3):
        forwards[event.row] = max(forwards[event.row], event.forward)
        if event.committed:
            for place, token in zip(event.positions, event.tokens):
                streamed[event.row, place] = token
                assert compiled.committed_at[event.row, place] == event.forward
    inside = np.arange(20) < np.array([[20], [19], [13]])  # a slot may reach beyond its row's limit
    np.testing.assert_array_equal(streamed, np.where(inside & (compiled.committed_at >= 0), compiled.canvas, -1))
    np.testing.assert_array_equal(forwards, compiled.ledger.after_prefill())


@pytest.mark.parametrize("name", ["greedy", "orthrus", pytest.param("refusion", marks=pytest.mark.slow),
                                  pytest.param("refusion_compat", marks=pytest.mark.slow)])
def test_compiled_loop_equals_the_python_loop(network, name):
    model, params = network
    rows, decoder = prompts(1, 3), DECODERS[name]
    compiled = generate(model, params, rows, decoder, max_new_tokens=20, seed=3)
    request = request_for(model, rows, decoder, 20)
    state = loop.python_loop(model.scorer(params), decoder, request)
    canvas = decoder.finish(request, state)
    for ours, plain in ((compiled.canvas, canvas.tokens), (compiled.committed_at, canvas.committed_at),
                        (compiled.origin, canvas.origin)):
        np.testing.assert_array_equal(ours, np.asarray(plain)[:3, :20])
    np.testing.assert_array_equal(compiled.ledger.after_prefill(), np.asarray(state.counts.after_prefill())[:3])


@pytest.mark.parametrize("name", DECODERS)
def test_rows_do_not_depend_on_neighbours_or_padding(network, name):
    model, params = network
    rows, decoder, limits = prompts(1, 3), DECODERS[name], [20, 9, 17]
    together = generate(model, params, rows, decoder, max_new_tokens=limits, seed=5)
    for i, capacity in ((0, 48), (1, 16)):  # longer and shorter canvas, wider prompt bucket, batch of one
        request = api.make_request([rows[i]], max_new_tokens=limits[i], capacity=capacity, eos_id=EOS,
                                   mask_id=MASK, seed=5, first_row=i, prompt_capacity=20)
        alone = api._run(model, params, decoder, request, 1, limits[i], EOS)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        for kind in alone.ledger.forwards:
            assert alone.ledger.forwards[kind][0] == together.ledger.forwards[kind][i], kind
            assert alone.ledger.positions[kind][0] == together.ledger.positions[kind][i], kind


def test_batches_are_joined_in_order(network):
    model, params = network
    rows = prompts(3, 5)
    whole = generate(model, params, rows, DECODERS["sampled"], max_new_tokens=12, seed=1)
    parts = generate(model, params, rows, DECODERS["sampled"], max_new_tokens=12, seed=1, batch_size=2)
    for a, b in zip(whole.tokens, parts.tokens):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.ledger.after_prefill(), parts.ledger.after_prefill())


@pytest.mark.parametrize("name", ["greedy", "refusion"])
def test_one_compile_per_bucket(network, name):
    model, params = network
    decoder = DECODERS[name]
    generate(model, params, prompts(4, 3, 5, 9), decoder, max_new_tokens=17, seed=0)
    count = api.EXECUTABLES.compiled
    knob = {"temperature": 0.5} if name == "greedy" else {"slot_threshold": 0.9, "token_threshold": 0.05,
                                                          "temperature": 0.3}
    generate(model, params, prompts(5, 3, 3, 12), dataclasses.replace(decoder, **knob), max_new_tokens=24, eos_id=7,
             seed=9)
    if name == "refusion":
        for knob in ({"token_threshold": None}, {"slot_threshold": 1}, {"token_threshold": 0}):
            generate(model, params, prompts(5, 3, 3, 12), dataclasses.replace(decoder, **knob), max_new_tokens=24)
    generate(model, params, prompts(6, 3, 1, 16), decoder, max_new_tokens=[20, 3, 24], eos_id=-1)
    assert api.EXECUTABLES.compiled == count
    generate(model, params, prompts(6, 3, 20, 24), decoder, max_new_tokens=17)
    assert api.EXECUTABLES.compiled == count + 2  # another prompt bucket: init and loop


@pytest.mark.parametrize("name", DECODERS)
def test_limits_hold_and_no_mask_is_returned(network, name):
    model, params = network
    out = generate(model, params, prompts(7, 4), DECODERS[name], max_new_tokens=[1, 2, 7, 21], eos_id=-1)
    for tokens, limit in zip(out.tokens, [1, 2, 7, 21]):
        assert len(tokens) == limit
        assert name == "refusion_compat" or not name.startswith("refusion") or MASK not in tokens
    assert (out.ledger.committed == [1, 2, 7, 21]).all()


@pytest.mark.parametrize("name", ["greedy", "refusion"])
def test_unrolled_layers_decode_alike(network, name):
    rows = prompts(14, 3)
    scanned = generate(*network, rows, DECODERS[name], max_new_tokens=20)
    unrolled = generate(*build.unroll(*network), rows, DECODERS[name], max_new_tokens=20)
    for a, b in zip(scanned.tokens, unrolled.tokens):
        np.testing.assert_array_equal(a, b)


def test_eos_ends_an_answer_and_stays(network):
    model, params = network
    free = generate(model, params, prompts(8, 6), DECODERS["refusion"], max_new_tokens=32, eos_id=-1)
    eos = int(np.bincount(np.concatenate(free.tokens)).argmax())  # a token that does come
    for name in ("greedy", "refusion", "refusion_redraft", "refusion_compat"):
        out = generate(model, params, prompts(8, 6), DECODERS[name], max_new_tokens=32, eos_id=eos)
        ended = [t for t in out.tokens if eos in t]
        assert ended and all((t == eos).sum() == 1 and t[-1] == eos for t in ended)
        if name != "refusion_compat":  # the released code may leave holes before an EOS
            for tokens, at in zip(out.tokens, out.committed_at):
                assert (at[: len(tokens)] >= 0).all()


def test_cached_decoding_equals_recomputing_everything(network):
    model, params = network
    score = model.scorer(params)
    for row in prompts(9, 4):
        out = generate(model, params, [row], Autoregressive(), max_new_tokens=16, eos_id=-1).tokens[0]
        ids = list(row)
        for token in out:
            assert int(jnp.argmax(score(jnp.array([ids]))[0, -1])) == token
            ids.append(int(token))


@pytest.mark.parametrize("call, message", [
    (dict(prompts=[]), "no prompts"),
    (dict(prompts=[[]]), "prompt 0 is empty"),
    (dict(prompts=[[1, 2], [3, V]]), f"prompt 1 holds token id {V}"),
    (dict(prompts=[[-1]]), "token id -1"),
    (dict(prompts=[[2], [V]], batch_size=1), f"prompt 1 holds token id {V}"),
    (dict(prompts=[[2**40]]), f"token id {2**40}"),
    (dict(prompts=[[1.7]]), "expected a list of integer token ids"),
    (dict(decoder=ReFusion), "decoder is the class ReFusion"),
    (dict(decoder=Autoregressive(temperature=float("nan"))), "temperature = nan"),
    (dict(decoder=Autoregressive(top_k=2.5)), "top_k = 2.5: expected an int"),
    (dict(max_new_tokens=4.9), "max_new_tokens = 4.9"),
    (dict(max_new_tokens=0), "max_new_tokens = 0"),
    (dict(max_new_tokens=600), "max_position_embeddings"),
    (dict(eos_id=V), "eos_id"),
    (dict(mask_id=EOS, decoder=DECODERS["refusion"]), "must be a token of its own"),
    (dict(decoder=Autoregressive(temperature=-1)), "temperature"),
    (dict(decoder=Autoregressive(top_p=0.0)), "top_p"),
    (dict(decoder=ReFusion(slot_threshold=1.5)), "slot_threshold"),
])
def test_bad_input_is_named_before_any_compile(network, call, message):
    model, params = network
    count = api.EXECUTABLES.compiled
    arguments = dict(prompts=[[2, 3]], decoder=Autoregressive(), max_new_tokens=4) | call
    with pytest.raises(ValueError, match=message):
        generate(model, params, **arguments)
    arguments.pop("batch_size", None)
    with pytest.raises(ValueError, match=message):
        stream(model, params, **arguments)
    assert api.EXECUTABLES.compiled == count


def test_missing_mask_token():
    model, params = peaked(0)
    model = dataclasses.replace(model, config=model.config.replace(mask_token_id=None))
    with pytest.raises(ValueError, match="config names none"):
        generate(model, params, [[2]], ReFusion(), max_new_tokens=4)


@pytest.mark.parametrize("changes, message", [
    (dict(slot_size=5, block_length=32), "block_length = 32 is not a multiple of slot_size = 5"),
    (dict(slot_size=1), "slot_size = 1"),
    (dict(certainty="last"), "certainty"),
    (dict(reference_compat=True, kv="recompute"), "reference_compat"),
])
def test_refusion_refuses_nonsense(changes, message):
    with pytest.raises(ValueError, match=message):
        ReFusion(**changes)
