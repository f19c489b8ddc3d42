"""Whether samples of a decoder are distributed as the model says: the joint law of the first tokens over a few ids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.decode import Sampler, generate

SMALL, FIRST, SAMPLES = 6, 3, 51_200  # ids, tokens whose joint distribution is compared, rows
PROMPT = [0, 2, 3]


@functools.cache
def triples():
    """(216, 3) every triple of first tokens."""
    return np.stack(np.meshgrid(*[np.arange(SMALL)] * FIRST, indexing="ij"), -1).reshape(-1, FIRST)


def exact(model, params, **controls):
    """Returns the probability of every triple of first tokens, from full forwards over all of them."""
    rows = jnp.asarray(np.concatenate([np.tile(PROMPT, (len(triples()), 1)), triples()], axis=1), jnp.int32)
    logits = model.scorer(params)(rows)[:, len(PROMPT) - 1 : -1]
    chance = np.asarray(jax.nn.softmax(Sampler(**controls).shaped(logits), axis=-1), np.float64)
    return np.prod(np.take_along_axis(chance, triples()[..., None], -1)[..., 0], axis=1)


def counted(tokens: np.ndarray) -> np.ndarray:
    """Returns how often each triple occurs among (n, 3) tokens."""
    return np.bincount(tokens @ SMALL ** np.arange(FIRST)[::-1], minlength=SMALL**FIRST)


def p_value(tokens: np.ndarray, joint: np.ndarray) -> float:
    """Chi-square of counted triples against their probabilities; rare triples share a cell."""
    from scipy import stats

    counts, expected = counted(tokens), joint * len(tokens)
    rare = expected < 5
    assert counts[joint == 0].sum() == 0, "a token that truncation removed was drawn"
    pool = lambda x: np.append(x[~rare], x[rare].sum()) if expected[rare].sum() > 0 else x[~rare]
    observed, expected = pool(counts), pool(expected)
    return float(stats.chi2.sf(np.sum((observed - expected) ** 2 / expected), len(observed) - 1))


def distance(tokens: np.ndarray, joint: np.ndarray) -> float:
    """Returns the total variation distance of counted triples from their probabilities."""
    return float(np.abs(counted(tokens) / len(tokens) - joint).sum() / 2)


def draw(model, params, decoder, samples: int = SAMPLES):
    """Returns (samples, 3) first tokens of as many answers."""
    out = generate(model, params, [PROMPT] * samples, decoder, max_new_tokens=FIRST + 1, seed=11, batch_size=12_800)
    return np.stack([tokens[:FIRST] for tokens in out.tokens])
