"""Parts that the library does not know, written as users would: they run batched, compiled and streamed like ours."""

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import decode
from dlm_jax.decode import MaskedDiffusion, Runner, generate, stream
from dlm_jax.decode import parts as decode_parts
from dlm_jax.decode.executables import EXECUTABLES
from dlm_jax.decode.runner import python_loop
from tests.decode.masked_test import LIMITS, MASK, peaked, prompts


@flax.struct.dataclass
class EveryOther(decode.CommitRule):
    """Commits every other candidate, and all once the surest reaches a bar."""

    bar: float = 0.9

    def choose(self, drafts, clock):
        everyone = jnp.any(drafts.reach(self.bar), axis=1, keepdims=True)
        return drafts.eligible & (everyone | (jnp.cumsum(drafts.eligible, axis=1) % 2 == 1))


@flax.struct.dataclass
class Patient(decode.CommitRule):
    """Never commits anything."""

    def choose(self, drafts, clock):
        return jnp.zeros_like(drafts.eligible)


@flax.struct.dataclass
class SecondBest(decode.Confidence):
    """How unlikely the runner-up is."""

    def of(self, drafts):
        others = jnp.where(jnp.arange(drafts.logits.shape[-1]) == drafts.tokens[..., None], -jnp.inf, drafts.logits)
        return -jnp.max(others, axis=-1)


@flax.struct.dataclass
class Around(decode.CachePolicy):
    """The open block and some tokens on either side."""

    reach: int = 4

    def window(self, now):
        return now.begin - self.reach, now.end + self.reach


@flax.struct.dataclass
class Blind(decode.CachePolicy):
    """A window that holds no token to decode."""

    def window(self, now):
        return now.first, now.first + 1


@flax.struct.dataclass
class AtToken(decode.Stop):
    """Fills the answer with EOS behind a token of the user's."""

    token: int = 0

    def fill(self, board):
        return board.behind

    def ends(self, board, finished):
        return jnp.any(board.eos, axis=1)


@flax.struct.dataclass
class Growing(decode.Schedule):
    """Blocks of the user's, opened two at a time."""

    size: int = flax.struct.field(default=4, pytree_node=False)
    several = True

    def block_length(self, capacity):
        return self.size

    def opened(self, opened, masked, tokens, ended):
        return jnp.maximum(opened, 2)


OWN = {
    "commit": dict(commit=EveryOther(0.5), schedule=decode.Blocks(8), cache=decode.Dual()),
    "confidence": dict(confidence=SecondBest(), commit=decode.TopN(2), schedule=decode.Whole(), cache=decode.Prompt()),
    "cache": dict(cache=Around(3), commit=decode.Quota(), schedule=decode.Blocks(8), stop=decode.Never()),
    "stop": dict(stop=AtToken(), commit=decode.Threshold(0.3), schedule=decode.Blocks(8)),
    "schedule": dict(schedule=Growing(), commit=decode.Threshold(0.3), cache=decode.Free()),
}


@pytest.fixture(scope="module")
def network():
    return peaked(family="a2d-qwen3", logit_shift=1)


@pytest.mark.parametrize("name", OWN)
def test_parts_of_users_run_like_ours(network, name):
    decoder, rows = MaskedDiffusion(**OWN[name], temperature=0.3), prompts(1, 3)
    together = generate(*network, rows, decoder, max_new_tokens=LIMITS, seed=4)
    assert all(MASK not in tokens for tokens in together.tokens)
    runner = Runner(*network, decoder)
    alone = runner.request([rows[2]], max_new_tokens=LIMITS[2], seed=4, first_row=2, batch=4, capacity=max(LIMITS))
    alone = runner.read(runner.run(runner.start(alone)), [0])
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[2])
    if name not in ("commit", "cache"):
        return
    streamed = np.full_like(together.canvas, -1)
    for event in stream(*network, rows, decoder, max_new_tokens=LIMITS, seed=4):
        for number, token in zip(event.numbers, event.tokens) if event.committed else ():
            streamed[event.row, number] = token
    np.testing.assert_array_equal(streamed, np.where(together.committed_at >= 0, together.canvas, -1))


def test_numbers_of_a_users_part_are_traced(network):
    made = lambda bar: MaskedDiffusion(schedule=decode.Blocks(8), commit=EveryOther(bar))
    run = lambda bar: generate(*network, prompts(1, 3), made(bar), max_new_tokens=LIMITS, eos_id=-1)
    many = run(0.9)
    compiled = EXECUTABLES.compiled
    few = run(0.05)
    assert EXECUTABLES.compiled == compiled
    assert few.ledger.after_prefill().sum() < many.ledger.after_prefill().sum()


@pytest.mark.parametrize("parts", [dict(commit=Patient()), dict(cache=Blind())])
def test_a_part_that_gets_nowhere_does_not_hang(network, parts):
    decoder = MaskedDiffusion(schedule=decode.Blocks(4), **parts)
    out = generate(*network, prompts(1, 2), decoder, max_new_tokens=9, eos_id=-1)
    assert [len(tokens) for tokens in out.tokens] == [9, 9]


def test_a_users_rule_in_the_plain_loop(network):
    model, params = network
    decoder = MaskedDiffusion(schedule=decode.Blocks(4), commit=EveryOther(0.5))
    runner = Runner(model, params, decoder)
    request = runner.request([prompts(1, 1)[0]], max_new_tokens=6)
    plain = python_loop(model.scorer(params), decoder, request)
    compiled = runner.run(runner.start(request))
    np.testing.assert_array_equal(plain.canvas.tokens, compiled.state.canvas.tokens)
    np.testing.assert_array_equal(plain.canvas.committed_at, compiled.state.canvas.committed_at)


@flax.struct.dataclass
class Named(decode.CommitRule):
    """A rule with a text that is not marked as compiled in."""

    name: str = "mine"

    def choose(self, drafts, clock):
        return drafts.eligible


def test_a_text_among_the_numbers_is_named(network):
    with pytest.raises(ValueError, match=r"commit.name = 'mine' of Named is no number: .*decode.static\('mine'\)"):
        generate(*network, [[2]], MaskedDiffusion(commit=Named()), max_new_tokens=4)


@flax.struct.dataclass
class Flat(decode.CommitRule):
    """A rule that answers for rows instead of candidates."""

    def choose(self, drafts, clock):
        return clock.step == 0


@flax.struct.dataclass
class FlatStop(decode.Stop):
    """A stop that answers for rows instead of tokens."""

    def fill(self, board):
        return board.length > 0


class Bare(decode.CommitRule):
    """A rule that nobody decorated."""

    def choose(self, drafts, clock):
        return drafts.eligible


@pytest.mark.parametrize("parts, message", [
    (dict(commit=Flat()), r"Flat.choose returned an array of shape \(1,\): expected \(1, 16\)"),
    (dict(stop=FlatStop()), r"FlatStop.fill returned an array of shape \(1,\): expected \(1, 16\)"),
    (dict(commit=Bare()), "put @flax.struct.dataclass above class Bare"),
])
def test_parts_that_are_not_as_agreed_are_named(network, parts, message):
    with pytest.raises(ValueError, match=message):
        generate(*network, [[2]], MaskedDiffusion(**parts), max_new_tokens=4)


def test_whole_numbers_serve_where_a_part_has_a_fraction():
    dtypes = [decode_parts.traced(EveryOther(bar)).bar.dtype for bar in (1, 1.0)]
    assert dtypes == [np.float32, np.float32]


def test_the_short_spelling_keeps_the_rest_of_a_decoders_own_sampler():
    @decode.decoder
    class Mine(decode.Decoder):
        sampler: decode.Sampler = decode.Sampler(top_p=0.9)

    assert Mine(temperature=0.7).sampler == decode.Sampler(temperature=0.7, top_p=0.9)
    assert Mine(sampler=decode.Sampler(top_k=3), temperature=0.7).sampler == decode.Sampler(temperature=0.7, top_k=3)
