"""Loading holds less than two tensors of host memory above the result, measured in a process of its own."""

import json
import subprocess
import sys
import tempfile

import pytest

from tests.conftest import ROOT

PROGRAM = """
import json, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from dlm_jax.io import hf, names, tensor_files
from dlm_jax.models.config import TransformerConfig

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def write(folder, config):
    # one tensor at a time, of random bits that are finite numbers
    make = lambda shape: np.random.default_rng(0).integers(0, 2**14, shape, np.uint16).view(jnp.bfloat16)
    tensor_files.write_folder(folder, [
        tensor_files.Pending(name, p.stored_shape, jnp.bfloat16, lambda p=p: make(p.stored_shape))
        for p in names.parameters(config) for name in p.names], 10**10)

folder, dtype, spread = Path(sys.argv[1]), jnp.dtype(sys.argv[2]), sys.argv[3] == "spread"
# the large tensors exceed 32 MiB, beyond which malloc always returns memory to the system
config = TransformerConfig(vocab_size=36864, hidden_size=1024, intermediate_size=18432, num_layers=3, num_heads=8,
                           num_kv_heads=4, head_dim=64, tie_word_embeddings=True)
small = config.replace(vocab_size=32, hidden_size=16, intermediate_size=32)
for name, c in (("big", config), ("small", small)):
    (folder / name).mkdir()
    write(folder / name, c)
sharding = None
if spread:
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P())
    cut = lambda p: jax.sharding.NamedSharding(sharding.mesh, jax.P(*[None] * (len(p.shape) - 1), "x"))
    tree = {}
    for p in names.parameters(config):
        parent = tree
        for key in p.path[:-1]:
            parent = parent.setdefault(key, {})
        parent[p.path[-1]] = cut(p)
    sharding = tree
hf.load_params(folder / "small", small, sharding, dtype)  # starts the compiler and everything else
start, peak, done = anonymous(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
params = jax.block_until_ready(hf.load_params(folder / "big", config, sharding, dtype))
done.set()
watcher.join()
result = sum(x.nbytes for x in jax.tree.leaves(params))
largest = max(x.size for x in tensor_files.read_folder(folder / "big").values()) * dtype.itemsize
print(json.dumps(dict(above=max(peak[0], anonymous()) - start - result, result=result, largest=largest,
                      grown=anonymous() - start)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype, where", [("bfloat16", "single"), ("bfloat16", "spread"), ("float32", "single")])
def test_host_memory_stays_under_twice_the_largest_tensor(dtype, where):
    with tempfile.TemporaryDirectory() as folder:  # half a gigabyte that pytest's own folders would keep
        done = subprocess.run([sys.executable, "-c", PROGRAM, folder, dtype, where], cwd=ROOT, capture_output=True,
                              text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["result"] > 5 * seen["largest"] and seen["grown"] > 0.95 * seen["result"], "nothing was measured"
    assert seen["above"] < 2 * seen["largest"], seen
