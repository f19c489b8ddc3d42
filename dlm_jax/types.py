"""Names for what every room passes around."""

from __future__ import annotations

from typing import Any

import jax

Array = jax.Array
Params = Any  # nested dict of arrays, as Linen makes it
ROWS = ("data", "fsdp")  # mesh axes that see different rows
HEADS = "tensor"  # mesh axis that sees different heads, and parts of the vocabulary
