"""Masked-diffusion cases without a decoder: logits, Monte-Carlo likelihoods, and BD3-LM losses with gradient norms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.evals import likelihood
from dlm_jax.nn import visibility as vis
from dlm_jax.objectives import block_diffusion, losses, noise
from tests.oracle.masked import Folder, Outcome, close
from tests.oracle.refusion_train import as_stored

LOGIT_ATOL, LOGIT_RTOL, LOSS_RTOL = 3e-4, 1e-4, 1e-4
WEIGHTINGS = {"scheduler": "schedule", "uniform": "uniform"}


def logits(folder: Folder, case: dict, which: str = "model") -> Outcome:
    """Compares raw outputs; those of padding are undefined."""
    model, params = getattr(folder, which)
    tokens, mask = folder.array(case, "input_ids"), folder.array(case, "attention_mask")
    rule = None if mask is None else vis.bidirectional(jnp.asarray(mask, bool))
    got = np.asarray(dlm_jax.forward(model, params, tokens, folder.array(case, "position_ids"), rule))
    real = np.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    return close(got[real], folder.array(case, "logits")[real], LOGIT_RTOL, LOGIT_ATOL)


def log_likelihood(folder: Folder, case: dict) -> Outcome:
    """Compares the mean over the stored masks."""
    settings, flat = case["params"], lambda x: x.reshape(-1, x.shape[-1])
    noisy, p_mask = flat(folder.array(case, "noisy")), flat(folder.array(case, "p_mask"))[:, 0]
    tokens = np.broadcast_to(np.asarray(case["prompt_ids"] + case["answer_ids"], np.int32), noisy.shape)
    each = lambda size: np.full(len(noisy), size, np.int32)
    rows = tokens, noisy, p_mask, each(len(case["prompt_ids"])), each(tokens.shape[1])
    got = likelihood.compiled_bound(*folder.model, rows, settings["mask_id"], settings["cfg_scale"])
    return close(np.mean(np.asarray(got, np.float64)), case["expected_log_likelihood"], LOSS_RTOL)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _two_streams(model, params, rows, objective):
    """Returns the loss, its gradient, and the logits and dense mask of both streams."""
    loss = lambda params: objective.rows_loss(model.scorer(params), rows)[0]
    tokens, positions, rule = block_diffusion.streams(rows, objective)
    return *jax.value_and_grad(loss)(params), model.scorer(params)(tokens, positions, rule), rule.dense()


def bd3_loss(folder: Folder, case: dict) -> Outcome:
    """Compares what is masked, the two-stream mask and its logits, the loss and its gradient's norms."""
    (model, params), settings = folder.model, case["params"]
    objective = block_diffusion.BlockDiffusion(
        mask_id=settings["mask_id"], block_size=settings["block_size"], schedule=settings["scheduler"],
        weighting=WEIGHTINGS[settings["loss_weight_type"]], normalisation=settings["loss_norm_type"],
        interval=(settings["time_epsilon"], 1.0), time="sequence", padding="ignore")
    tokens = jnp.asarray(folder.array(case, "input_ids"))
    taught = jnp.asarray(folder.array(case, "labels") != losses.IGNORE)
    drawn = noise.Noise(jnp.broadcast_to(folder.array(case, "t")[:, None], tokens.shape),
                        jnp.asarray(folder.array(case, "mask_uniform")))
    block = jnp.broadcast_to(jnp.arange(tokens.shape[1]) // objective.block_size, tokens.shape)
    supervision = noise.Supervision(tokens, jnp.ones(tokens.shape, bool), taught)
    rows = block_diffusion.arrange(supervision, block, drawn, objective)
    value, gradient, got, mask = jax.device_get(_two_streams(model, params, rows, objective))
    gradient = as_stored(gradient, model.config)
    same = lambda what, a, b: Outcome("" if np.array_equal(a, b) else f"{what} differs")
    noisy_first = lambda x, *axes: np.roll(x, tokens.shape[1], axes)  # the authors' order of the two streams
    found = [
        same("masked", np.asarray(rows.labels) != losses.IGNORE, folder.array(case, "masked")),
        same("n_masked", np.sum(np.asarray(rows.labels) != losses.IGNORE), case["n_masked"]),
        same("attention_mask_2l", noisy_first(mask[0], 0, 1), folder.array(case, "attention_mask_2l")),
        close(noisy_first(got, 1), folder.array(case, "logits_2l"), LOGIT_RTOL, LOGIT_ATOL),
        close(value, case["expected_loss"], LOSS_RTOL),
    ] + [close(np.linalg.norm(gradient[name]), norm, LOSS_RTOL) for name, norm in case["grad_norms"].items()]
    return Outcome("; ".join(one.problem for one in found if one.problem), max(one.error for one in found))


RUNNERS = {
    "logits": logits, "logits_padded": logits, "logits_raw_unshifted": logits,
    "guider_logits": functools.partial(logits, which="guider"), "log_likelihood": log_likelihood, "bd3_loss": bd3_loss}
