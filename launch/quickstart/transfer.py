"""The transfer study: one hybrid autoregressive seed, and what each ingredient of FLARE makes of it.

All continue the same seed for the same number of steps on the same rows. AR says what became of the clean stream;
Diffusion-Trust what the noisy one is worth, AR-Trust (where its outputs are shifted) what both are together.

Source: FLARE, Tables 12 to 14; row (b), block diffusion, has no schedule for recurrent layers and needs a dense seed.
"""

from __future__ import annotations

from dlm_jax import decode
from dlm_jax.objectives import Autoregressive, flare
from launch.quickstart.plan import Plan, System, Training, budgets
from launch.quickstart.systems import MASK_ID

BODY, BLOCK, RATE = "qwen3_5_text", 4, 1e-3  # of every training after the seed
TITLES = {
    "ar_sft": "AR-SFT", "causal_context": "causal context", "ntp_loss": "+ NTP loss", "flare": "FLARE",
    "am_causal": "AM-Causal", "am_bidir": "AM-Bidir", "masked_fillers": "FLARE, fillers masked",
    "longer": "the same, five times the steps"}
# what fills a last block is masked when decoding; trained so, too, noisy rows are not told where the answer ends
MASKED = flare.variant("flare", mask_id=MASK_ID, block_size=BLOCK, filler="masked")
OBJECTIVES = {name: flare.variant(name, mask_id=MASK_ID, block_size=BLOCK) for name in flare.VARIANTS} | {
    "masked_fillers": MASKED, "longer": MASKED}
TRAININGS = (
    Training(name="seed", title="AR seed", family="AR", start=None, body=BODY, objective=Autoregressive()),
    *(Training(name=name, title=title, family=title, body=BODY, learning_rate=RATE, objective=OBJECTIVES[name])
      for name, title in TITLES.items()))


def _answers(training: str, how: str, decoder: decode.Decoder, **facts) -> System:
    title = TITLES.get(training, "AR seed")
    return System(name=f"{title}, {how}", label=how, family=title if training != "seed" else "AR", training=training,
                  decoder=decoder, **facts)


def _both(training: str) -> tuple[System, ...]:
    return (_answers(training, "AR-Trust", decode.ARTrust(horizon=BLOCK), lossless=True, headline=training == "flare"),
            _answers(training, "Diffusion-Trust", decode.DiffusionTrust(block_size=BLOCK)))


# their outputs are not shifted: a block's first token is a mask like the others
def _unshifted(training: str) -> tuple[System, ...]:
    return (_answers(training, "AR", decode.Autoregressive()),
            _answers(training, "Diffusion-Trust", decode.DiffusionTrust(block_size=BLOCK, first="judged")))


SYSTEMS = (
    _answers("seed", "AR", decode.Autoregressive(), headline=True),
    _answers("ar_sft", "AR", decode.Autoregressive(), headline=True),
    *_unshifted("causal_context"), *_unshifted("ntp_loss"),
    *_both("flare"), *_both("am_causal"), *_both("am_bidir"), *_both("masked_fillers"),
    *_both("longer"))
PLAN = Plan(title="dlm_jax: what each ingredient of FLARE does to a seed", trainings=TRAININGS, systems=SYSTEMS,
            budgets=budgets({"seed": 600} | dict.fromkeys(TITLES, 240) | {"longer": 1200}))
