"""A toy run: count upwards modulo 16. As a script it trains in a directory until it is done or killed."""

import sys
import time

import jax
import numpy as np

from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from dlm_jax.objectives import Autoregressive, ReFusion
from dlm_jax.train.config import MeshConfig, TrainConfig
from dlm_jax.train.loop import fit

MODEL = build.build(TransformerConfig(
    vocab_size=24, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8))
AR = Autoregressive()
REFUSION = ReFusion(mask_id=23, slot_sizes=(2, 4))


def params(seed: int = 0):
    return jax.jit(build.init_params, static_argnums=0)(MODEL, jax.random.key(seed))


def config(**changes) -> TrainConfig:
    # a constant rate, so that the compiled step does not hold the number of steps and runs of any length share it; a
    # large epsilon, without which the sign of a gradient near 0 decides Adam's update and no two programs train alike
    fields = dict(objective=AR, steps=6, batch_size=8, learning_rate=1e-2, warmup_steps=2, schedule="constant",
                  weight_decay=0.01, epsilon=1e-2, checkpoint_every=2, log_every=1, mesh=MeshConfig())
    return TrainConfig(**fields | changes)


class Counting:
    """Batches that depend on nothing but their number; each process gets its part."""

    def __init__(self, rows: int = 8, length: int = 16, delay: float = 0.0, process: int = 0, processes: int = 1):
        self.rows, self.length, self.delay, self.next = rows, length, delay, 0
        self.mine = slice(process * rows // processes, (process + 1) * rows // processes)

    def batch(self, number: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(number)
        start = draw.integers(0, 16, (self.rows, 1))
        length = draw.integers(6, self.length + 1, self.rows).astype(np.int32)
        index = np.arange(self.length)
        return {
            "tokens": np.where(index < length[:, None], (start + index) % 16, 16).astype(np.int32),
            "loss_mask": (index >= 3) & (index < length[:, None]), "prompt_length": np.full(self.rows, 3, np.int32),
            "length": length, "truncated": length == self.length, "empty": length < 9,
            "example_id": np.arange(self.rows, dtype=np.int32) + number * self.rows}

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(self.delay)
        self.next += 1
        return {name: rows[self.mine] for name, rows in self.batch(self.next - 1).items()}

    def state(self) -> dict:
        return {"next": self.next}

    def restore(self, state: dict) -> None:
        self.next = state["next"]


def run(run_dir, *, resume: bool = False, delay: float = 0.0, **changes):
    return fit(MODEL, params(), Counting(delay=delay), config(**changes), run_dir, resume=resume, progress=False,
               devices=jax.devices()[:1])


KILLED = dict(objective=REFUSION, steps=12, checkpoint_every=2, schedule="cosine")

if __name__ == "__main__":
    run(sys.argv[1], delay=float(sys.argv[2]), **KILLED)
