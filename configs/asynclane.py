"""AsyncLane: tasks, lengths and delimiters as the paper states them, and numbers of ours where it states none.

The paper names no block, budget, threshold, margin or refresh interval, and no difference between LLaDA and Dream but
their tokenizers; block and commit threshold are those of Fast-dLLM's scripts, the rest is ours. This sweep over a tiny
model (`launch/results/asynclane.md`) tells nothing between values of `rho_min`, prefers `tau_future` 0.9, and wants
keys refreshed every 2 iterations, not 12; 12 is kept for large models, unmeasured:

    python -m launch.benchmark lanes --model runs/quickstart-lanes/models/long --lengths 256 \\
        --sweep rho_min=0.25,0.5,0.75 --sweep cache.refresh_interval=2,4,12 --sweep tau_future=0.9,0.99

A boundary is a rule's name here; `launch.decode` and `launch.evaluate` read the model's tokenizer. Nothing is trained.
"""

from configs.decoding import Decoding
from dlm_jax import decode
from dlm_jax.decode import AsyncLane, asynclane

LENGTHS = (256, 512, 1024)  # answer lengths of Tables 1 and 2; the entries have the first, see --max-new-tokens
SHOTS = {"gsm8k_cot": 0, "gsm8k": 5, "math": 4, "mbpp": 3, "humaneval": 0}
_BOUNDARY = {"gsm8k_cot": "math", "gsm8k": "math", "math": "math", "mbpp": "code", "humaneval": "code"}
_SOURCE = "AsyncLane, Sec. 4.1 (task, length, delimiters); numbers of ours"
_OURS = dict(block_size=32, commit=decode.Threshold(0.9), rho_min=0.5, t_min=1, lookahead=32, tau_future=0.9,
             lane_capacity=8, cache=asynclane.Compact(margin=32, refresh_interval=12))


def _ablation(decoder: AsyncLane, table: int) -> Decoding:
    return Decoding(decoder=decoder, max_new_tokens=LENGTHS[0], source=f"AsyncLane, Table {table}; numbers of ours")


DECODING: dict[str, Decoding] = {
    task: Decoding(decoder=AsyncLane(boundary=rule, **_OURS), max_new_tokens=LENGTHS[0],
                   source=f"{_SOURCE}; {SHOTS[task]} shots")
    for task, rule in _BOUNDARY.items()
} | {
    "blockwise": _ablation(asynclane.blockwise(block_size=32), 3),
    "coupled": _ablation(asynclane.coupled("math", **_OURS), 3),
    "commit_and_advance": _ablation(asynclane.commit_and_advance("math", **_OURS), 3),
    "without_lookahead": _ablation(asynclane.without_lookahead("math", **_OURS), 5),
    "without_reuse": _ablation(asynclane.without_reuse("math", **_OURS), 5),
    "without_both": _ablation(asynclane.without_both("math", **_OURS), 5),
    "punctuation": _ablation(AsyncLane(boundary="punctuation", **_OURS), 6),
    "interval_16": _ablation(AsyncLane(boundary=asynclane.interval_boundary(16), **_OURS), 6),
}
