"""Decoding with the authors' random draws: each forward's tokens come from its own row of uniform numbers.

A token is the number of entries of the cumulated distribution (after temperature and truncation) that are at most u.
"""

from __future__ import annotations

import numpy as np
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from dlm_jax import decode
from dlm_jax.decode import Runner
from tests.oracle import zoo_decode
from tests.oracle.masked import Folder, Outcome
from tests.oracle.masked_decode import TIES


@struct.dataclass
class Given(decode.Sampler):
    """Draws by given numbers.

    Attributes:
      u: (K,) float32 in [0, 1), one a token of the block.
    """

    u: Array = 0.0

    def draw(self, logits: Array, keys: Array) -> Array:
        """See `Sampler.draw`."""
        mass = jnp.cumsum(jax.nn.softmax(self.shaped(logits), axis=-1), axis=-1)
        return jnp.minimum(jnp.sum(mass <= self.u[:, None], axis=-1), logits.shape[-1] - 1).astype(jnp.int32)


def run(folder: Folder, case: dict) -> Outcome:
    """Compares ids and forwards of one case; equal confidences come in any order, see `masked_decode`."""
    setting = zoo_decode.sdar(folder, case)
    decoder = setting.decoder.replace(confidence=decode.Tempered(decode.Probability()))
    wrong = compared(folder, case, decoder, 0)
    if wrong:
        noisy = decoder.replace(commit=decode.Noisy(decoder.commit, 1e-7))
        if any(not compared(folder, case, noisy, seed) for seed in range(100)):
            return Outcome(excused=TIES)
    return Outcome(wrong)


def compared(folder: Folder, case: dict, decoder: decode.BlockDiffusion, seed: int) -> str:
    """Returns what is wrong with a case, stepped by hand."""
    p, u, (prompt,) = case["params"], folder.array(case, "u"), case["prompt_ids"]
    setting = zoo_decode.sdar(folder, case)
    runner = Runner(*folder.model, decoder.replace(sampler=Given(
        p["temperature"], p["top_k"], p["top_p"], np.zeros(p["block_length"], np.float32))))
    limit, drawn = setting.limit(len(prompt)), 0
    rows = runner.start(runner.request([prompt], max_new_tokens=limit, eos_id=setting.eos, seed=seed,
                                       mask_id=folder.tokens["mask_token_id"], capacity=64))
    while not rows.done[0]:
        if not rows.state.due[0]:
            runner._traced = runner._traced.replace(sampler=runner._traced.sampler.replace(
                u=np.asarray(u[min(drawn, len(u) - 1)], np.float32)))
            drawn += 1
        rows = runner.step(rows)
    out = runner.read(rows, [0], limit)
    want, wrong = zoo_decode.expected(case, 0), []
    if (out.canvas[0] != want).any():
        wrong.append(f"ids {out.canvas[0].tolist()} are not {want.tolist()}")
    for name, kinds in setting.counts.items():
        count = sum(int(out.ledger.forwards[kind][0]) for kind in kinds)
        wrong += [] if count == case[name] else [f"{name}: {count} forwards are not {case[name]}"]
    return "; ".join(wrong)


RUNNERS = {"generate_sampled": run}
