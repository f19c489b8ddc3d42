"""Exact log-likelihoods against whole rows of logits, batch by batch, and what is refused."""

import numpy as np
import pytest

import dlm_jax
from dlm_jax.evals import causal_likelihood
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config

PROMPTS, ANSWERS = [[4, 7, 2, 9], [3], [5, 5]], [[5, 11, 1], [8, 8, 9, 2, 1], [6]]


def by_hand(model, params, prompt, answer):
    logits = np.asarray(dlm_jax.forward(model, params, [[*prompt, *answer]]), np.float64)[0, len(prompt) - 1: -1]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(answer)), answer].sum(), (logits.argmax(-1) == answer).all()


def test_every_token_is_scored_behind_those_before_it_in_any_batch(tiny):
    model, params = tiny
    best = [list(dlm_jax.generate(model, params, [[7, 8]], dlm_jax.decode.Autoregressive(), max_new_tokens=4,
                                  eos_id=-1).tokens[0])]
    prompts, answers = [*PROMPTS, [7, 8]], [*ANSWERS, *best]
    wanted = [by_hand(model, params, *row) for row in zip(prompts, answers)]
    for size in (1, 3, 8):
        found, greedy = causal_likelihood.log_likelihood(model, params, prompts, answers, batch_size=size)
        np.testing.assert_allclose(found, [value for value, _ in wanted], rtol=2e-5)
        assert greedy.tolist() == [same for _, same in wanted]
    assert greedy.tolist()[-1] and not greedy[0]
    assert causal_likelihood.log_likelihood(model, params, [], [])[0].shape == (0,)


@pytest.mark.parametrize("changes, message", [
    (dict(prompts=[[]]), "prompt 0 is empty.*beginning"), (dict(answers=[[]]), "answer 0 is empty.*end of sequence"),
    (dict(answers=[[97]]), "token id 97, outside the vocabulary of 97"), (dict(answers=[[1], [1]]), "1 prompts but 2"),
    (dict(answers=[[1] * 512]), "row 0 reads 513 tokens.*512"), (dict(batch_size=0), "batch_size = 0")])
def test_bad_input_is_refused(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        causal_likelihood.log_likelihood(*tiny, **{"prompts": [[4, 5]], "answers": [[6]], **changes})


def test_a_model_without_a_causal_view_is_refused():
    model = build.build(tiny_config("llada", mask_token_id=96))
    with pytest.raises(ValueError, match="Autoregressive needs a causal model"):
        causal_likelihood.log_likelihood(model, random_params(model), [[1]], [[2]])
