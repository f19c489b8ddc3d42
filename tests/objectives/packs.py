"""Batches of documents for tests: packed, and the same documents one a row."""

import jax.numpy as jnp
import numpy as np

from dlm_jax.data import packing


def documents(sizes, vocabulary, seed=0):
    """Returns (prompt, response) ids of random documents of the given (prompt, response) sizes."""
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(2, vocabulary, size).tolist() for size in pair) for pair in sizes]


def packed(rows, length, most, align=1):
    """Returns a packed batch, on the device, of rows of (example id, (prompt, response))."""
    made = [packing.lay_out(row, length=length, most=most, align=align, pad_id=0) for row in rows]
    return {name: jnp.asarray(np.stack([row[name] for row in made])) for name in made[0]}


def alone(rows, length):
    """Returns the same documents as an unpacked batch, one a row."""
    batch = packed([[document] for row in rows for document in row], length, 1)
    return {name: value[:, 0] if name in packing.OF_DOCUMENTS else value for name, value in batch.items()
            if name not in packing.OF_PACKS}
