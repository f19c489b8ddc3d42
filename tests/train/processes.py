"""One of several processes that train together: python -m tests.train.processes RANK COUNT PORT RUN_DIR"""

import os
import sys

RANK, COUNT, PORT = (int(value) for value in sys.argv[1:4])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax

jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, RANK)

from dlm_jax.train.config import MeshConfig
from dlm_jax.train.loop import fit
from tests.train import toy

CONFIG = dict(objective=toy.REFUSION, mesh=MeshConfig(data=-1, fsdp=2))

if __name__ == "__main__":
    pipeline = toy.Counting(process=RANK, processes=COUNT)
    result = fit(toy.MODEL, toy.params(), pipeline, toy.config(**CONFIG), sys.argv[4], progress=False)
    print(result.step, jax.device_count(), result.history[-1]["loss"])
    jax.distributed.shutdown()
