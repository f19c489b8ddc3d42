"""The first study: every kind of system from one autoregressive seed. A further system is one more entry here."""

from __future__ import annotations

from dlm_jax import decode, objectives
from dlm_jax.data import tokenizer as tokenizers
from launch.quickstart.plan import Plan, System, Training, budgets

MASK_ID, END_ID = map(tokenizers.SPECIAL.index, (tokenizers.MASK, tokenizers.END))
BLOCK, FLARE_BLOCK = 8, 4  # tokens

TRAININGS = (
    Training(name="seed", title="AR seed", family="AR", start=None, objective=objectives.Autoregressive()),
    # these answers are a few slots long: floor(tK) of them would never mask all, which is how decoding begins
    Training(name="refusion", title="ReFusion", family="ReFusion",
             objective=objectives.ReFusion(mask_id=MASK_ID, slot_sizes=(8,), masking="released")),
    Training(name="orthrus", title="Orthrus", family="Orthrus", body="orthrus",
             objective=objectives.Orthrus(mask_id=MASK_ID, block_size=BLOCK, blocks=8, anchors="response")),
    # slowly: at the seed's own rate, so few steps lose its arithmetic and do not find it again
    Training(name="masked", title="Masked diffusion", family="Masked diffusion", body="a2d-qwen3", logit_shift=1,
             objective=objectives.MaskedDiffusion(mask_id=MASK_ID, eos_id=END_ID, antithetic=True, eps=0.05,
                                               block_length=BLOCK),
             learning_rate=1e-3),
    Training(name="block", title="Block diffusion", family="Block diffusion", body="a2d-qwen3",
             objective=objectives.BlockDiffusion(mask_id=MASK_ID, eos_id=END_ID, block_size=BLOCK, antithetic=True),
             learning_rate=1e-3),
    Training(name="flare", title="FLARE", family="FLARE",
             objective=objectives.Flare(mask_id=MASK_ID, block_size=FLARE_BLOCK), learning_rate=1e-3),
    Training(name="guide", title="Weak guide", family="AR", start=None, objective=objectives.Autoregressive()),
)


def _refusion(tau: float, headline: bool = False) -> System:
    decoder = decode.ReFusion(slot_size=8, block_length=16, slot_threshold=tau, token_threshold=tau)
    return System(name=f"ReFusion τ {tau}", label=f"τ {tau}", family="ReFusion", training="refusion", decoder=decoder,
                  headline=headline)


def _masked(name: str, training: str = "masked", headline: bool = False, **parts) -> System:
    family = next(t.family for t in TRAININGS if t.name == training)
    return System(name=f"{family}, {name}", label=name, family=family, training=training, headline=headline,
                  decoder=decode.MaskedDiffusion(schedule=decode.Blocks(BLOCK), **parts))


# a frozen block of 8 keeps the keys and values its last tokens had as masks, which costs so small a model most answers:
# `Delayed` freezes it when it is finished. Answers are short, so a guide reads all drafts of a round at once
def _guided(name: str, guide: str, headline: bool = False, **parts) -> System:
    decoder = decode.Guided(cache=decode.Delayed(block_length=BLOCK), verify_batch_size=0, **parts)
    return System(name=f"Masked diffusion, {name}", label=name, family="Masked diffusion", training="masked",
                  guide=guide, headline=headline, decoder=decoder)


_SURE = dict(commit=decode.Threshold(0.95))
_BLOCKS = dict(training="block", cache=decode.BlockCausal(), stop=decode.AfterBlock())
# a model that has seen one block at a time guesses where it reads masks before a block, or keys made when they were
_LANES = decode.AsyncLane(boundary="math", block_size=BLOCK, lookahead=0, cache=decode.NoCache(), **_SURE)
SYSTEMS = (
    System(name="AR", label="AR", family="AR", training="seed", decoder=decode.Autoregressive(), headline=True),
    _refusion(0.6, headline=True), _refusion(0.8),
    System(name="Orthrus", label="Orthrus", family="Orthrus", training="orthrus",
           decoder=decode.Orthrus(block_size=BLOCK), lossless=True, headline=True),
    _masked("vanilla", commit=decode.Quota(), stop=decode.Never()),
    _masked("threshold", **_SURE),
    _masked("dual cache", cache=decode.Dual(), **_SURE),
    _masked("FreeCache", cache=decode.Free(), **_SURE),
    _masked("FreeCache, delayed, refreshed", cache=decode.Delayed(refresh_every=4), **_SURE),
    _guided("FreeCache, delayed, and guide", guide="seed", headline=True),
    _guided("weak guide", guide="guide"),
    _guided("weak guide, draft threshold", guide="guide", accept=decode.guided.Sure(threshold=0.9)),
    System(name="AsyncLane", label="lanes", family="Masked diffusion", training="masked", decoder=_LANES,
           headline=True),
    System(name="AR, the weak guide", label="weak guide", family="AR", training="guide",
           decoder=decode.Autoregressive()),
    _masked("vanilla", commit=decode.Quota(), **_BLOCKS),
    _masked("threshold", headline=True, **_SURE, **_BLOCKS),
    System(name="FLARE, AR-Trust", label="AR-Trust", family="FLARE", training="flare",
           decoder=decode.ARTrust(horizon=FLARE_BLOCK), lossless=True, headline=True),
    System(name="FLARE, Diffusion-Trust", label="Diffusion-Trust", family="FLARE", training="flare",
           decoder=decode.DiffusionTrust(block_size=FLARE_BLOCK)),
)

PLAN = Plan(title="dlm_jax quickstart", trainings=TRAININGS, systems=SYSTEMS, budgets=budgets(
    {"seed": 800, "refusion": 2000, "orthrus": 300, "masked": 1200, "block": 450, "flare": 200, "guide": 80}))
