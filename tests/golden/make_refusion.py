"""Makes `refusion_tiny`: ReFusion decoding cases of a small random model, by the plain reference of the tests.

    python -m tests.golden.make_refusion

The format is that of `tests/oracle/refusion_decode.py`. Decisions come from `tests/decode/refusion_reference.py`, which
runs the whole history in every forward; cases with a probability close to a threshold are left out.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.scoring import Pass
from tests.decode.decode_test import EOS, MASK, peaked, prompts
from tests.decode.refusion_reference import Reference

HERE = Path(__file__).parent / "refusion_tiny"
LENGTH = 96  # forwards are padded to one shape
SETTINGS = [(4, 2, 16), (4, 1, 15), (8, 2, 32), (2, 3, 24)]  # slot size, serial blocks, gen_length


def main() -> None:
    model, params = peaked(7)
    margins = []

    @jax.jit
    def forward(tokens, positions, mask):
        score = model.scorer(params)
        return jax.nn.softmax(score.head(score.hidden(tokens, Pass(positions, mask))[0]), axis=-1)

    def probabilities(tokens, positions, mask):
        size = len(tokens)
        ids, places, seen = np.zeros((1, LENGTH), int), np.zeros((1, LENGTH), int), np.eye(LENGTH, dtype=bool)[None]
        ids[0, :size], places[0, :size], seen[0, :size, :size] = tokens, positions, mask
        found = np.asarray(forward(jnp.array(ids), jnp.array(places), jnp.array(seen)))[0, :size]
        top = np.sort(found, axis=-1)
        margins.append(min((top[:, -1] - top[:, -2]).min(), np.abs(found - threshold).min()))
        return found

    cases = []
    for seed, (k, blocks, length) in enumerate(SETTINGS):
        for threshold in (0.15, 0.3):
            for prompt in prompts(40 + seed, 4):
                for eos in (EOS, 46):
                    margins.clear()
                    whole = -(-length // k) * k
                    reference = Reference(probabilities, prompt, k=k, block=whole // blocks, slot_threshold=threshold,
                                          token_threshold=threshold, length=whole // blocks * blocks, eos=eos,
                                          mask=MASK, compat=True)
                    reference.run()
                    start = len(prompt)
                    order = np.argsort(reference.positions, kind="stable")
                    if min(margins) < 1e-6:
                        continue
                    cases.append(dict(
                        prompt=prompt, gen_length=length, slot_size=k, serial_num_blocks=blocks,
                        slot_threshold=threshold, token_threshold=threshold, temperature=0.0, mask_id=MASK, eos_id=eos,
                        expected_ids=[reference.tokens[i] for i in order],
                        expected_positions=[reference.positions[i] for i in order],
                        commit_order_ids=reference.tokens[start:], commit_order_positions=reference.positions[start:],
                        expected_tpf=float(np.mean(reference.shares)), calls_total=reference.calls,
                        **{f"calls_{kind}": count for kind, count in reference.kinds.items()}))
    dlm_jax.save(HERE, model, params, overwrite=True)
    (HERE / "cases.json").write_text(json.dumps({"cases": cases}) + "\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
