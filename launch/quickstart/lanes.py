"""The study of lanes: a masked model that has seen canvases much longer than its answers, as published ones have.

`python -m launch.benchmark lanes --model runs/quickstart-lanes/models/long` measures on it what AsyncLane does at
generation lengths of 128, 256 and 512 tokens.

Source: AsyncLane, Tables 1 to 6.
"""

from __future__ import annotations

from dlm_jax import decode
from dlm_jax.objectives import MaskedDiffusion
from launch.quickstart import systems
from launch.quickstart.plan import Plan, System, Training, budgets

BLOCK, LENGTH = 16, 608  # tokens; a question and 512 of an answer's
FACTS = {"family": "Masked diffusion", "body": "a2d-qwen3", "logit_shift": 1}
NOISE = {"mask_id": systems.MASK_ID, "eos_id": systems.END_ID, "antithetic": True, "eps": 0.05}
SEED = next(t for t in systems.TRAININGS if t.name == "seed")
MASKED = Training(name="masked", title="Masked diffusion", learning_rate=1e-3,
                  objective=MaskedDiffusion(block_length=8, **NOISE), **FACTS)
WIDE = Training(name="wide", title="the same, wide blocks", start="masked", learning_rate=1e-3,
                objective=MaskedDiffusion(block_length=2 * BLOCK, **NOISE), **FACTS)
# lanes and lookahead read masks anywhere before them: blocks, which have all before them clean, teach to guess there
WHOLE = Training(name="whole", title="the same, whole answers", start="wide", learning_rate=1e-3,
                 objective=MaskedDiffusion(**NOISE), **FACTS)
LONG = Training(name="long", title="the same, long canvases", start="whole", learning_rate=5e-4, length=LENGTH,
                objective=MaskedDiffusion(random_canvas=0.75, **NOISE), **FACTS)


def _answers(name: str, decoder: decode.Decoder, **facts) -> System:
    return System(name=name, label=name, family=LONG.family, training="long", decoder=decoder, **facts)


# so small a model minds stale keys: launch/results/asynclane.md
LANES = {"block_size": BLOCK, "lookahead": BLOCK, "commit": decode.Threshold(0.9), "tau_future": 0.9,
         "cache": decode.asynclane.Compact(margin=BLOCK, refresh_interval=2)}
SYSTEMS = (
    System(name="AR", label="AR", family="AR", training="seed", decoder=decode.Autoregressive(), headline=True),
    _answers("block-wise", decode.asynclane.blockwise(block_size=BLOCK), headline=True),
    _answers("coupled", decode.asynclane.coupled("math", **LANES)),
    _answers("commit and advance", decode.asynclane.commit_and_advance("math", **LANES)),
    _answers("AsyncLane", decode.AsyncLane(boundary="math", **LANES), headline=True))
PLAN = Plan(title="dlm_jax: lanes", trainings=(SEED, MASKED, WIDE, WHOLE, LONG), systems=SYSTEMS,
            budgets=budgets({"seed": 800, "masked": 1200, "wide": 3000, "whole": 1500, "long": 900}))
