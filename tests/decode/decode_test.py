"""Properties every decoder keeps: all loops agree, rows and padding do not matter, one compile a bucket."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.decode import (
    ARTrust, Autoregressive, Constant, DiffusionTrust, Orthrus, ReFusion, Runner, Sampler, generate, stream)
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.decode.runner import python_loop
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


# what is traced differs, where it can: those compile once
DECODERS = {
    "greedy": Autoregressive(),
    "sampled": Autoregressive(temperature=0.8, top_k=12, top_p=0.9),
    "refusion": ReFusion(slot_size=4, block_length=16, slot_threshold=0.25, token_threshold=0.15),
    "refusion_mean": ReFusion(slot_size=4, block_length=8, slot_threshold=0.2, certainty="mean"),
    "refusion_redraft": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, completion="redraft"),
    "refusion_compat": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, reference_compat=True),
    "refusion_recompute": ReFusion(slot_size=4, block_length=16, slot_threshold=0.2, kv="recompute"),
    "refusion_fixed": ReFusion(slot_size=4, block_length=16, confidence_aware=False, slots_per_round=2),
    "refusion_sampled": ReFusion(
        slot_size=4, block_length=16, slot_threshold=0.2, token_threshold=0.2, temperature=0.7, top_k=30, top_p=0.95),
    "orthrus": Orthrus(block_size=4),
    "orthrus_sampled": Orthrus(block_size=4, temperature=0.9, top_k=20, top_p=0.95),
    "ar_trust": ARTrust(horizon=3, on_reject="hold", tile=16),
    "ar_trust_sampled": ARTrust(horizon=3, on_reject="hold", temperature=0.9, top_k=20, top_p=0.95, tile=16),
    "diffusion_trust": DiffusionTrust(block_size=8, steps=5, thresholds=Constant(0.3)),
    "diffusion_trust_sampled": DiffusionTrust(first="judged", thresholds=Constant(0.2), temperature=0.9, top_p=0.9),
}


@pytest.mark.parametrize("name", DECODERS)
def test_streaming_equals_the_compiled_loop(network, name):
    model, params = network
    rows, decoder = prompts(1, 3), DECODERS[name]
    compiled = generate(model, params, rows, decoder, max_new_tokens=[20, 19, 13], seed=3)
    streamed, forwards = np.full_like(compiled.canvas, -1), np.zeros(3, int)
    for event in stream(model, params, rows, decoder, max_new_tokens=[20, 19, 13], seed=3):
        forwards[event.row] = max(forwards[event.row], event.forward)
        if event.committed:
            for place, token in zip(event.numbers, event.tokens):
                streamed[event.row, place] = token
                assert compiled.committed_at[event.row, place] == event.forward
    inside = np.arange(20) < np.array([[20], [19], [13]])  # a slot may reach beyond its row's limit
    np.testing.assert_array_equal(streamed, np.where(inside & (compiled.committed_at >= 0), compiled.canvas, -1))
    np.testing.assert_array_equal(forwards, compiled.ledger.after_prefill())


@pytest.mark.parametrize("name", ["greedy", "orthrus", "ar_trust", "diffusion_trust",
                                  pytest.param("refusion", marks=pytest.mark.slow),
                                  pytest.param("refusion_compat", marks=pytest.mark.slow)])
def test_compiled_loop_equals_the_python_loop(network, name):
    model, params = network
    rows, decoder = prompts(1, 3), DECODERS[name]
    compiled = generate(model, params, rows, decoder, max_new_tokens=20, seed=3)
    state = python_loop(model.scorer(params), decoder,
                        Runner(model, params, decoder).request(rows, max_new_tokens=20, seed=3))
    canvas = state.canvas
    for ours, plain in ((compiled.canvas, canvas.tokens), (compiled.committed_at, canvas.committed_at),
                        (compiled.origin, canvas.origin)):
        np.testing.assert_array_equal(ours, np.asarray(plain)[:3, :20])
    np.testing.assert_array_equal(compiled.ledger.after_prefill(), np.asarray(state.counts.after_prefill())[:3])


@pytest.mark.parametrize("name", DECODERS)
def test_rows_do_not_depend_on_neighbours_or_padding(network, name):
    model, params = network
    rows, decoder, limits = prompts(1, 3), DECODERS[name], [20, 9, 17]
    together = generate(model, params, rows, decoder, max_new_tokens=limits, seed=5)
    runner = Runner(model, params, decoder)
    for i, capacity in ((0, 48), (1, 16)):  # longer and shorter canvas, wider prompt bucket, batch of one
        request = runner.request([rows[i]], max_new_tokens=limits[i], capacity=capacity, seed=5, first_row=i,
                                 prompt_capacity=20)
        alone = runner.read(runner.run(runner.start(request)), [0])
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
    count = EXECUTABLES.compiled
    knob = {"sampler": Sampler(temperature=0.5)} if name == "greedy" else {
        "slot_threshold": 0.9, "token_threshold": 0.05, "sampler": Sampler(temperature=0.3, top_k=7)}
    generate(model, params, prompts(5, 3, 3, 12), dataclasses.replace(decoder, **knob), max_new_tokens=24, eos_id=7,
             seed=9)
    if name == "refusion":
        for knob in ({"slots_per_round": 2}, {"slot_threshold": 1}, {"token_threshold": 0}):
            generate(model, params, prompts(5, 3, 3, 12), dataclasses.replace(decoder, **knob), max_new_tokens=24)
    generate(model, params, prompts(6, 3, 1, 16), decoder, max_new_tokens=[20, 3, 24], eos_id=-1)
    assert EXECUTABLES.compiled == count
    generate(model, params, prompts(6, 3, 20, 24), decoder, max_new_tokens=17)
    assert EXECUTABLES.compiled == count + 2  # another prompt bucket: init and loop


@pytest.mark.parametrize("name", DECODERS)
def test_limits_hold_and_no_mask_is_returned(network, name):
    model, params = network
    out = generate(model, params, prompts(7, 4), DECODERS[name], max_new_tokens=[1, 2, 7, 21], eos_id=-1)
    for tokens, limit in zip(out.tokens, [1, 2, 7, 21]):
        assert len(tokens) == limit
        assert name == "refusion_compat" or not name.startswith("refusion") or MASK not in tokens
    assert (out.ledger.committed == [1, 2, 7, 21]).all()
    if isinstance(DECODERS[name], Autoregressive):
        assert (out.ledger.committing() == [1, 2, 7, 21]).all() and out.ledger.tokens_per_forward() == 1.0


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
        assert name != "greedy" or out.ledger.tokens_per_forward() == 1.0
        ended = [t for t in out.tokens if eos in t]
        assert ended and all((t == eos).sum() == 1 and t[-1] == eos for t in ended)
        if name != "refusion_compat":  # the released code may leave holes before an EOS
            for tokens, at in zip(out.tokens, out.committed_at):
                assert (at[: len(tokens)] >= 0).all()


def test_cached_decoding_equals_recomputing_everything(network):
    model, params = network
    likeliest = jax.jit(lambda params, tokens: jnp.argmax(model.scorer(params)(tokens), -1))
    for row in prompts(9, 4):
        out = generate(model, params, [row], Autoregressive(), max_new_tokens=16, eos_id=-1).tokens[0]
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(row)] = row
        for place, token in enumerate(out, len(row)):
            assert likeliest(params, ids)[0, place - 1] == token  # what comes after, a causal model never sees
            ids[0, place] = token


@pytest.mark.parametrize("call, message", [
    (dict(prompts=[]), "no prompts"),
    (dict(prompts=[[]]), "prompt 0 is empty"),
    (dict(prompts=[[1, 2], [3, V]]), f"prompt 1 holds token id {V}"),
    (dict(prompts=[[-1]]), "token id -1"),
    (dict(prompts=[[2], [V]], batch_size=1), f"prompt 1 holds token id {V}"),
    (dict(prompts=[[2**40]]), f"token id {2**40}"),
    (dict(prompts=[[1.7]]), "expected a list of integer token ids"),
    (dict(decoder=ReFusion), "decoder is the class ReFusion"),
    (dict(decoder="refusion"), "decoder = 'refusion': expected a Decoder"),
    (dict(max_new_tokens=4.9), "max_new_tokens = 4.9"),
    (dict(max_new_tokens=0), "max_new_tokens = 0"),
    (dict(max_new_tokens=600), "max_position_embeddings"),
    (dict(eos_id=V), "eos_id"),
    (dict(mask_id=EOS, decoder=DECODERS["refusion"]), "must be a token of its own"),
])
def test_bad_input_is_named_before_any_compile(network, call, message):
    model, params = network
    count = EXECUTABLES.compiled
    arguments = dict(prompts=[[2, 3]], decoder=Autoregressive(), max_new_tokens=4) | call
    with pytest.raises(ValueError, match=message):
        generate(model, params, **arguments)
    arguments.pop("batch_size", None)
    with pytest.raises(ValueError, match=message):
        stream(model, params, **arguments)
    assert EXECUTABLES.compiled == count


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
    (dict(reference_compat=True, confidence_aware=False), "reference_compat"),
    (dict(slot_threshold=1.5), "slot_threshold = 1.5"),
    (dict(token_threshold=-0.1), "token_threshold = -0.1"),
    (dict(slots_per_round=0), "slots_per_round = 0"),
    (dict(temperature=-1), "temperature = -1"),
])
def test_refusion_refuses_nonsense(changes, message):
    with pytest.raises(ValueError, match=message):
        ReFusion(**changes)


def test_threads_share_executables(network):
    """Threads that ask for the same programs at once compile each of them once, and all get the same answers."""
    model, params = network
    rows, answers, count = prompts(30, 3, 25, 30), [None] * 4, EXECUTABLES.compiled
    together = threading.Barrier(4)

    def ask(place):
        together.wait()
        answers[place] = generate(model, params, rows, DECODERS["sampled"], max_new_tokens=9, eos_id=-1, seed=2)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert EXECUTABLES.compiled == count + 2  # init and loop
    for answer in answers:
        np.testing.assert_array_equal(answer.canvas, answers[0].canvas)
        np.testing.assert_array_equal(answer.committed_at, answers[0].committed_at)


COMING_AND_GOING = ["greedy", "sampled", "refusion", "refusion_sampled", "orthrus", "orthrus_sampled",
                    "ar_trust_sampled", "diffusion_trust"]


def same_row(a, i, b, j, width):
    """Holds row i of one generation to be row j of another, bit by bit."""
    np.testing.assert_array_equal(a.tokens[i], b.tokens[j])
    for name in ("canvas", "committed_at", "origin"):
        np.testing.assert_array_equal(getattr(a, name)[i, :width], getattr(b, name)[j, :width], err_msg=name)
    for kind in a.ledger.forwards:
        assert a.ledger.forwards[kind][i] == b.ledger.forwards[kind][j], kind
        assert a.ledger.positions[kind][i] == b.ledger.positions[kind][j], kind
    assert a.ledger.committing()[i] == b.ledger.committing()[j]


@pytest.mark.parametrize("name", COMING_AND_GOING)
def test_rows_come_and_go_without_a_trace(network, name):
    runner, ask = Runner(*network, DECODERS[name]), dict(max_new_tokens=20, eos_id=-1, seed=3)
    first, newcomer = prompts(1, 3), prompts(2, 1)[0]
    undisturbed = runner.read(runner.run(runner.start(runner.request(first, **ask))), [0, 1, 2])

    rows = runner.start(runner.request(first, **ask))
    for _ in range(2):
        rows = runner.step(rows)
    early, rows = runner.release(rows, [1])
    known = early.committed_at[0] >= 0
    np.testing.assert_array_equal(early.canvas[0][known], undisturbed.canvas[1][known])
    np.testing.assert_array_equal(early.committed_at[0][known], undisturbed.committed_at[1][known])
    assert len(early.tokens) == 1 and 0 < early.ledger.after_prefill()[0] < undisturbed.ledger.after_prefill()[1]
    assert rows.done.tolist() == [False, True, False]
    rows = runner.step(rows)
    assert runner.read(rows, [1]).ledger.after_prefill() == early.ledger.after_prefill()  # a free place does nothing
    rows = runner.admit(rows, 1, newcomer, max_new_tokens=13, seed=9, number=4)
    assert rows.done.tolist() == [False, False, False]
    rows = runner.run(rows, steps=2)  # in pieces, then to the end
    out = runner.read(runner.run(rows), [0, 1, 2])
    for row in (0, 2):
        same_row(out, row, undisturbed, row, 20)

    alone = runner.start(runner.request([newcomer], max_new_tokens=13, eos_id=-1, seed=9, first_row=4, batch=3,
                                        capacity=20, prompt_capacity=13))
    same_row(out, 1, runner.read(runner.run(alone), [0]), 0, 13)


@pytest.mark.parametrize("name", COMING_AND_GOING)
def test_a_run_in_pieces_is_the_whole_run(network, name):
    runner, ask = Runner(*network, DECODERS[name]), dict(max_new_tokens=[20, 19, 13], seed=3)
    whole = runner.read(runner.run(runner.start(runner.request(prompts(1, 3), **ask))), [0, 1, 2])
    rows = runner.start(runner.request(prompts(1, 3), **ask))
    for pieces in range(20):
        before = runner.read(rows, [0, 1, 2]).ledger.after_prefill()
        rows = runner.run(rows, steps=3)
        gained = runner.read(rows, [0, 1, 2]).ledger.after_prefill() - before
        assert gained.max() <= 3 * (2 if "orthrus" in name else 1)
        if rows.done.all():
            break
    assert pieces > 1
    for row in range(3):
        same_row(runner.read(rows, [0, 1, 2]), row, whole, row, 20)


@pytest.mark.parametrize("changes, message", [
    (dict(row=3), "row = 3: the batch has rows 0 to 2"),
    (dict(row=-1), "row = -1"),
    (dict(row=0), "row 0 is still being decoded"),
    (dict(prompt=[2] * 17), "prompt: 17 tokens do not fit a batch made for 16"),
    (dict(max_new_tokens=25), "max_new_tokens: 25 tokens do not fit a batch made for 24"),
    (dict(max_new_tokens=0), "max_new_tokens = 0"),
    (dict(prompt=[]), "prompt 0 is empty"),
    (dict(prompt=[V]), f"token id {V}"),
    (dict(number=-1), "number = -1"),
])
def test_an_admission_that_does_not_fit_is_refused(network, changes, message):
    runner = Runner(*network, DECODERS["greedy"])
    _, rows = runner.release(runner.start(runner.request(prompts(1, 3), max_new_tokens=20, eos_id=-1)), [1])
    count = EXECUTABLES.compiled
    with pytest.raises(ValueError, match=message):
        runner.admit(rows, **(dict(row=1, prompt=[2, 3], max_new_tokens=4) | changes))
    assert EXECUTABLES.compiled == count


def test_rows_that_are_not_there_are_not_released(network):
    runner = Runner(*network, DECODERS["greedy"])
    rows = runner.start(runner.request(prompts(1, 3), max_new_tokens=20))
    for wrong in ([3], [-1], [0, 7]):
        with pytest.raises(ValueError, match="the batch has rows 0 to 2"):
            runner.release(rows, wrong)
