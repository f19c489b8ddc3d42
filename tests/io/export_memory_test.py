"""Exporting a run holds a few tensors of host memory, not the model, measured in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from tests.conftest import ROOT

# malloc returns what is freed to the system, so that what is measured is what is held
SETTINGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=262144"}
SHARED = """
import dataclasses, json, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from dlm_jax.io import names
from dlm_jax.models.config import TransformerConfig

config = TransformerConfig(vocab_size=9216, hidden_size=512, intermediate_size=9216, num_layers=4, num_heads=8,
                           num_kv_heads=4, head_dim=64, tie_word_embeddings=True)
small = config.replace(vocab_size=32, hidden_size=16, intermediate_size=32)
folder, layout = Path(sys.argv[1]), sys.argv[2]
"""
WRITER = SHARED + """
import orbax.checkpoint as ocp
from flax import traverse_util
from dlm_jax.io import checkpoints

if layout == "whole":
    checkpoints.layer_chunks = lambda tree: None
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
for name, c in (("big", config), ("small", small)):
    cut = lambda p: jax.sharding.NamedSharding(mesh, jax.P(*[None] * (len(p.shape) - 1), "x"))
    make = lambda p: jax.jit(lambda: (jnp.arange(np.prod(p.shape)) % 251).astype(jnp.float32).reshape(p.shape),
                             out_shardings=cut(p))()
    params = traverse_util.unflatten_dict({p.path: make(p) for p in names.parameters(c)})
    run = checkpoints.Checkpoints(folder / name / "checkpoints")
    run.save(1, {"trainable": params, "frozen": {}, "step": jnp.int32(1)}, {})
    run.wait()
    (folder / name / "config.json").write_text(json.dumps({"model": dataclasses.asdict(c)}))
"""
READER = SHARED + """
from launch import convert_weights

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

export = lambda name: convert_weights.main(["to-hf", str(folder / name), str(folder / (name + "_hf"))])
export("small")  # imports and starts everything
start, peak, done = anonymous(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
assert export("big") == 0
done.set()
watcher.join()
from dlm_jax.io import tensor_files
tensors = tensor_files.read_folder(folder / "big_hf")
wrong = [p.path for p in names.parameters(config) for i, name in enumerate(p.names)
         if not np.array_equal(p.from_stored(tensors[name]).reshape(-1), (
             np.arange(i * tensors[name].size, (i + 1) * tensors[name].size) % 251).astype(np.float32))]
print(json.dumps(dict(above=peak[0] - start, model=sum(x.nbytes for x in tensors.values()), wrong=wrong,
                      largest=max(x.nbytes for x in tensors.values()))))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("layout, stacked", [("layers", 1), pytest.param("whole", 4, marks=pytest.mark.slow)])
def test_host_memory_stays_under_a_few_tensors(layout, stacked):
    """As `io.checkpoints` stores layers; and where chunks span them all, a stack of them at a time."""
    with tempfile.TemporaryDirectory() as folder:  # half a gigabyte that pytest's own folders would keep
        for program in (WRITER, READER):
            done = subprocess.run([sys.executable, "-c", program, folder, layout], cwd=ROOT, capture_output=True,
                                  text=True, env={**os.environ, **SETTINGS})
            assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["wrong"] == [] and seen["model"] > 12 * seen["largest"], "nothing was measured"
    # a chunk, what was asked of it, and one tensor as the file has it
    assert seen["above"] < (2 * stacked + 2) * seen["largest"], seen
