"""The first study: every kind of system from one autoregressive seed. A further system is one more entry here."""

from __future__ import annotations

from dlm_jax import decode, objectives
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.data import word_problems
from launch.quickstart.plan import Plan, System, Training, budgets

MASK_ID, END_ID = map(tokenizers.SPECIAL.index, (tokenizers.MASK, tokenizers.END))
BLOCK, FLARE_BLOCK = 8, 4  # tokens

TRAININGS = (
    Training(name="seed", title="AR seed", family="AR", start=None, objective=objectives.Autoregressive()),
    # these answers are a few slots long: floor(tK) of them would never mask all, which is how decoding begins
    Training(name="refusion", title="ReFusion", family="ReFusion",
             objective=objectives.ReFusion(mask_id=MASK_ID, slot_sizes=(BLOCK,), masking="released")),
    Training(name="orthrus", title="Orthrus", family="Orthrus", body="orthrus",
             objective=objectives.Orthrus(mask_id=MASK_ID, block_size=BLOCK, blocks=8, anchors="response")),
    Training(name="flare", title="FLARE", family="FLARE",
             objective=objectives.Flare(mask_id=MASK_ID, block_size=FLARE_BLOCK), learning_rate=1e-3),
    # which already predicts masks; slowly, for at the seed's own rate few steps lose its arithmetic and do not find it
    Training(name="masked", title="Masked diffusion", family="Masked diffusion", start="flare", body="a2d-qwen3",
             logit_shift=1, learning_rate=1e-3,
             objective=objectives.MaskedDiffusion(mask_id=MASK_ID, eos_id=END_ID, antithetic=True, eps=0.05,
                                               block_length=BLOCK)),
)


def _refusion(name: str, block_length: int, headline: bool = False) -> System:
    decoder = decode.ReFusion(slot_size=BLOCK, block_length=block_length, slot_threshold=0.6, token_threshold=0.6)
    return System(name=f"ReFusion, {name}", label=name, family="ReFusion", training="refusion", decoder=decoder,
                  headline=headline)


def _masked(name: str, **parts) -> System:
    return System(name=f"Masked diffusion, {name}", label=name, family="Masked diffusion", training="masked",
                  decoder=decode.MaskedDiffusion(schedule=decode.Blocks(BLOCK), **parts))


_SURE = {"commit": decode.Threshold(0.95)}
# a frozen block keeps the keys and values its last tokens had as masks, which costs so small a model most answers:
# `Delayed` freezes it when it is finished. Answers are short, so a guide reads all drafts of a round at once
_GUIDED = decode.Guided(cache=decode.Delayed(block_length=BLOCK), verify_batch_size=0)
# a model that has seen one block at a time guesses where it reads masks before a block, or keys made when they were
_LANES = decode.AsyncLane(boundary="math", block_size=BLOCK, lookahead=0, cache=decode.NoCache(), **_SURE)
SYSTEMS = (
    System(name="AR", label="AR", family="AR", training="seed", decoder=decode.Autoregressive(), headline=True),
    # a worked answer wants its lines in order: slots of a wider block are planned before the numbers that they need
    _refusion("a slot at a time", BLOCK, headline=True), _refusion("two slots open", 2 * BLOCK),
    System(name="Orthrus", label="Orthrus", family="Orthrus", training="orthrus",
           decoder=decode.Orthrus(block_size=BLOCK), lossless=True, headline=True),
    System(name="FLARE, AR-Trust", label="AR-Trust", family="FLARE", training="flare",
           decoder=decode.ARTrust(horizon=FLARE_BLOCK), lossless=True, headline=True),
    System(name="FLARE, Diffusion-Trust", label="Diffusion-Trust", family="FLARE", training="flare",
           decoder=decode.DiffusionTrust(block_size=FLARE_BLOCK)),
    _masked("vanilla", commit=decode.Quota(), stop=decode.Never()),
    _masked("threshold", **_SURE),
    _masked("dual cache", cache=decode.Dual(), **_SURE),
    _masked("FreeCache, delayed, refreshed", cache=decode.Delayed(refresh_every=4), **_SURE),
    System(name="Masked diffusion, FreeCache, delayed, and guide", label="FreeCache, delayed, and guide",
           family="Masked diffusion", training="masked", guide="seed", decoder=_GUIDED, headline=True),
    System(name="AsyncLane", label="lanes", family="Masked diffusion", training="masked", decoder=_LANES,
           headline=True),
)

PLAN = Plan(title="dlm_jax quickstart", trainings=TRAININGS, systems=SYSTEMS, stories=word_problems.SHORT,
            budgets=budgets({"seed": 800, "refusion": 2500, "orthrus": 300, "flare": 300, "masked": 2200},
                            batch_tokens=1152))
