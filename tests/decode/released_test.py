"""Every released family with its own default decoding: ragged rows together are the rows one by one."""

import pytest

from configs.checkpoints import CHECKPOINTS
from dlm_jax import decode
from dlm_jax.models import build
from tests.conftest import random_params, tiny_config
from tests.models import mixtures

PROMPTS = [[5, 9, 11], [7, 3, 8, 12, 20, 31, 44, 50], [2], [60, 61, 62, 63, 64]]
LIMITS = [9, 8, 11, 6]
CASES = list({(c.model.family, c.decoding.source): c for c in CHECKPOINTS}.values())
FAST = ("llada2_moe", "nemotron_labs_diffusion")


def model_of(released):
    """Returns a tiny model of a released one's family and conventions."""
    told = dict(mask_token_id=96, conventions=released.conventions, block_size=4)
    config = mixtures.mixture_config if released.family in mixtures.KINDS else tiny_config
    return build.build(config(released.family, **told))


def short(decoder):
    """Returns a decoder for short answers: blocks of 4, a step a token where steps are planned."""
    if isinstance(decoder, decode.BlockDiffusion):
        return decoder.replace(block_size=4, sub_block=decoder.sub_block and 2)
    if isinstance(decoder, decode.Orthrus):
        return decoder.replace(block_size=4)
    if hasattr(decoder.commit, "steps"):
        decoder = decoder.replace(commit=decoder.commit.replace(steps=0))
    blocks = isinstance(decoder.schedule, decode.Blocks)
    return decoder.replace(schedule=decode.Blocks(4, decoder.schedule.ahead)) if blocks else decoder


@pytest.mark.parametrize("checkpoint", [
    pytest.param(c, id=f"{c.model.family}-{type(c.decoding.decoder).__name__}-{i}",
                 marks=() if c.model.family in FAST else pytest.mark.slow) for i, c in enumerate(CASES)])
def test_rows_together_are_the_rows_one_by_one(checkpoint):
    model = model_of(checkpoint.model)
    runner = decode.Runner(model, random_params(model, scale=0.4), short(checkpoint.decoding.decoder))
    room = dict(prompt_capacity=max(map(len, PROMPTS)), capacity=max(LIMITS))

    def answers(prompts, limits, first):
        asked = runner.request(prompts, max_new_tokens=limits, first_row=first, **room)
        return runner.read(runner.run(runner.start(asked)), range(len(prompts)))

    together = answers(PROMPTS, LIMITS, 0)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        alone = answers([prompt], limit, row)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert {kind: int(n[row]) for kind, n in together.ledger.forwards.items()} == {
            kind: int(n[0]) for kind, n in alone.ledger.forwards.items()}
