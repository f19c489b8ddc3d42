"""Views of the network: whole rows, caches fed in pieces, and the two streams of training.

A piece of `logits_cached` that stores nothing is run on a copy of the cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.io import lora as adapters
from dlm_jax.models import lora
from dlm_jax.nn import visibility as vis
from dlm_jax.scoring import Pass
from tests.oracle.masked import Folder, Outcome, close

RTOL, LOSS_RTOL = 1e-4, 1e-4


def atol(folder: Folder) -> float:
    """Returns the tolerance recommended with the numbers: untrained models have logits of order 30."""
    return 3e-4 if folder.meta.get("trained_steps") else 5e-4


def rule_of(attention: str, tokens: np.ndarray, size: int | None) -> vis.Visibility:
    """Returns the visibility that a case names."""
    valid = jnp.ones(tokens.shape, bool)
    if attention == "block_causal_absolute":
        return vis.blocks(valid, size)
    return {"full": vis.bidirectional, "causal": vis.causal}[attention.split()[0]](valid)


def logits(folder: Folder, case: dict) -> Outcome:
    """Compares the outputs of whole rows, by the rule that the case names and, where it is the model's, by default."""
    if case.get("lora"):
        return adapted(folder, case)
    model, params = folder.model
    tokens, size = folder.array(case, "input_ids"), (case.get("params") or {}).get("block_size")
    positions, want = folder.array(case, "position_ids"), folder.array(case, "logits")
    rule = rule_of(case["attention"], tokens, size)
    outcome = close(dlm_jax.forward(model, params, tokens, positions, rule), want, RTOL, atol(folder))
    usual = {"block_causal_absolute": "block-causal"}.get(case["attention"], case["attention"])
    if outcome.problem or model.config.convention.prompt != usual or size != model.config.block_size:
        return outcome
    return close(dlm_jax.forward(model, params, tokens, positions), want, RTOL, atol(folder))


def with_adapter(folder: Folder) -> tuple:
    """Returns the model and its parameters, the folder's adapter among them."""
    model, params = folder.model
    return model, lora.attach(params, adapters.load(folder.path, model.config)[1])


def adapted(folder: Folder, case: dict) -> Outcome:
    """Compares the outputs of a model with its adapter on."""
    model, params = with_adapter(folder)
    tokens = jnp.asarray(folder.array(case, "input_ids"))
    rule = rule_of(case["attention"], tokens, None)
    got = jax.jit(lambda params: model.scorer(params).view("diffusion")(tokens, None, rule))(params)
    return close(got, folder.array(case, "logits"), RTOL, atol(folder))


def cached(folder: Folder, case: dict) -> Outcome:
    """Compares the outputs of pieces fed to a cache, and what it holds in the end."""
    model, params = folder.model
    size, start, worst = case["params"]["block_size"], 0, Outcome()
    capacity = sum(piece["length"] for piece in case["pieces"])
    cache = model.scorer(params).init_cache(1, capacity)
    for i, piece in enumerate(case["pieces"]):
        start = piece.get("start", start)
        at = start + (piece.get("replace_position") or 0)
        stores, inner = piece.get("store_kv"), piece.get("replace_position") is not None
        if stores is None:
            stores = piece["kind"] in ("prefill", "commit")
        kept = stores or inner or piece.get("kind") == "block_store"
        tokens = folder.array(case, f"ids{i}")
        out, fresh = _fed(model, params, cache, tokens, at, size, piece.get("view") or "grid")
        outcome = close(out, folder.array(case, f"logits{i}"), RTOL, atol(folder))
        if outcome.problem:
            return Outcome(f"piece {i}: {outcome.problem}", outcome.error)
        worst = max(worst, outcome, key=lambda o: o.error)
        cache, start = fresh if kept else cache, start + piece["length"] * stores
    for field, layer in (("keys", 0), ("values", -1)):
        want = folder.array(case, "keys_layer0" if layer == 0 else "values_last")
        if want is not None:
            place = model.config.num_layers - 1 if layer else 0
            held = getattr(cache.members[place % len(cache.members)], field)[place // len(cache.members)]
            got = held[:, :, : want.shape[2]]
            outcome = close(got, want, RTOL, atol(folder))
            if outcome.problem:
                return Outcome(f"{field}: {outcome.problem}", outcome.error)
    return worst


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _fed(model, params, cache, tokens, start, size, view):
    """Returns the logits of a piece, and the cache with it."""
    index = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    limit = {"grid": lambda: index // size * size + size - 1, "causal": lambda: index,
             "block": lambda: jnp.full_like(index, index[0, -1])}[view]()
    rank = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    score = model.scorer(params)
    seen = vis.by_rank(jnp.zeros_like(index), limit, jnp.where(rank < start + _seen(index, size, view), rank, vis.NONE))
    hidden, cache = score.hidden(tokens, Pass(index, seen, index), cache)
    return score.head(hidden), cache


def _seen(index, size, view):
    """Returns how many entries behind its start a piece may see: its own, and the block that it is a part of."""
    return max(index.shape[1], size) if view == "grid" else index.shape[1]


def train_view(folder: Folder, case: dict) -> Outcome:
    """Compares the two streams' outputs under the authors' mask, that mask with ours, and the loss."""
    model, params = folder.model
    clean, size = folder.array(case, "input_ids"), case["params"].get("block_size", case["params"].get("bd_size"))
    masked, both = folder.array(case, "masked"), folder.array(case, "two_stream_ids")
    noisy = folder.array(case, "noisy_ids")
    if noisy is None and both is None:
        noisy = np.where(masked, model.config.mask_token_id, clean)
    both = np.concatenate([noisy, clean], axis=1) if both is None else both
    T = both.shape[1] // 2
    ours, mask = two_streams(T, size, model.config.convention.prompt == "causal"), folder.array(case, "attention_mask")
    if mask is not None and (mask != ours).any():
        return Outcome("the authors' mask is another")
    got = np.asarray(dlm_jax.forward(model, params, both, np.tile(np.arange(T), (len(both), 2)), ours[None]))
    want = folder.array(case, "logits")
    outcome = close(got, want, RTOL, atol(folder)) if want is not None else close(
        got[:, :T], folder.array(case, "logits_noisy_half_raw"), RTOL, atol(folder))
    problems = [outcome.problem]
    problems += [f"{name}: {o.problem}" for name, o in _losses(folder, case, got, clean) if o.problem]
    return Outcome("; ".join(filter(None, problems)), outcome.error)


def two_streams(length: int, size: int, token_causal: bool) -> np.ndarray:
    """Returns the (2T, 2T) bool mask of [noisy | clean]."""
    dense = np.asarray(vis.two_stream(jnp.arange(length)[None] // size, token_causal=token_causal).dense())[0]
    return np.roll(dense, (length, length), axis=(0, 1))  # the library has the clean stream first


def _losses(folder: Folder, case: dict, logits: np.ndarray, clean: np.ndarray) -> list[tuple[str, Outcome]]:
    """Returns each loss of a case compared with the one that the logits give."""
    T = logits.shape[1] // 2
    nll = lambda rows, labels: -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(jnp.asarray(rows), axis=-1)), labels[..., None], axis=-1)[..., 0]
    found = {}
    if "two_stream_labels" in (key.split("/")[1] for key in folder.arrays):
        labels = folder.array(case, "two_stream_labels")
        found["loss"] = nll(logits[:, : T - 1], np.maximum(labels[:, 1:], 0))[labels[:, 1:] >= 0].mean()
    else:
        masked, p_mask = folder.array(case, "masked"), folder.array(case, "p_mask")
        each = nll(logits[:, :T], clean)
        if "loss_unweighted" in case:
            found["loss_unweighted"] = each[masked].mean()
        if "loss" in case:
            found["loss"] = (each / p_mask)[masked].sum() / (~folder.array(case, "prompt_mask")).sum()
        if "loss_sum" in case:
            found["diffusion_loss_sum"] = (each / p_mask)[masked].sum()
            found["ar_loss_sum"] = nll(logits[:, T:-1], clean[:, 1:]).sum()
            found["loss_sum"] = found["diffusion_loss_sum"] + case["params"]["ar_loss_weight"] * found["ar_loss_sum"]
    return [(name, close(value, case[name], LOSS_RTOL)) for name, value in found.items()]


RUNNERS = {
    "logits": logits, "logits_raw_unshifted": logits, "logits_cached": cached, "logits_cached_raw_unshifted": cached,
    "train_view": train_view}
