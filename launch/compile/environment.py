"""What the TPU compiler must find in the environment before jax is imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# quiet, off the network, and able to run beside other compile-only processes; the type need not be that of the target
COMPILE_ONLY = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled",
    "JAX_ENABLE_COMPILATION_CACHE": "false", "XLA_FLAGS": ""}


def prepare(schedules: Path | None = None) -> None:
    """Makes this process one that compiles for absent TPUs; call it before jax is imported.

    Args:
      schedules: folder that gets the finished schedule of every fusion and kernel, which takes the compiler two to four
        times as long; None for none.

    Raises:
      ValueError: no TPU compiler.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("there is no TPU compiler here: pip install '.[aot]', or jax[tpu] of the version of jax; it "
                         "needs no TPU")
    os.environ.update(COMPILE_ONLY)
    if schedules is not None:
        flags = (f"--xla_jf_dump_to={schedules} --xla_jf_dump_llo_text=true "
                 "--xla_jf_dump_llo_pass_label_regex=final_bundles")
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
