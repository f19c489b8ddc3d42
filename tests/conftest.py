"""Shared set-up: the CPU seen as 8 devices, a compilation cache on disk, and what many tests use."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# before jax is imported; 8 devices cost single-device tests nothing and let sharding be tested in the same process
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference numbers beside the checkout; tests that need it skip without."""
    folder = ROOT.parent / "shared" / "oracle"
    if not folder.is_dir():
        pytest.skip("no reference numbers: ../shared/oracle does not exist beside the checkout")
    return folder


def tiny_config(family: str = "qwen3", **changes):
    """Returns a configuration small enough to compile in a second, with no two sizes alike."""
    from dlm_jax.models.config import TransformerConfig

    fields = dict(family=family, vocab_size=97, hidden_size=32, intermediate_size=56, num_layers=3, num_heads=4,
                  num_kv_heads=2, head_dim=12, rope_theta=1e4, max_position_embeddings=512, bos_token_id=2,
                  eos_token_id=1, pad_token_id=0)
    return TransformerConfig(**{**fields, **changes})


def random_params(model, seed: int = 0, scale: float = 0.2):
    """Returns parameters in which nothing is zero or one, so that no term of the model goes untested."""
    from dlm_jax.models import build

    draw = np.random.default_rng(seed)
    fill = lambda path, x: (("norm" in str(path[-1])) + scale * draw.standard_normal(x.shape)).astype(np.float32)
    return jax.tree.map(jax.numpy.asarray, jax.tree_util.tree_map_with_path(fill, build.abstract_params(model)))


@pytest.fixture(scope="session")
def tiny():
    """(model, params) of a tiny random Qwen3 with an untied head."""
    from dlm_jax.models import build

    model = build.build(tiny_config())
    return model, random_params(model)


@pytest.fixture(scope="module", autouse=True)
def forget_executables():
    """Frees compiled code after each module: a process may hold only so many memory maps."""
    yield
    from dlm_jax.decode.executables import EXECUTABLES

    EXECUTABLES.clear()
    jax.clear_caches()
