"""Golden checks of the kernels for the oracle runner: folders of two-stream operators and of gated-delta unit cases.

A folder is recognised by what its files hold, not by its name. Each runner returns (passed, largest error, detail).
"""
from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Stream, short_conv, two_stream_gated_delta
from pallas_kernels.attention.visibility import two_stream

# the goldens check arithmetic, not speed; compiling is nearly all of the time
_JIT = dict(compiler_options={"xla_backend_optimization_level": 0}) if jax.default_backend() == "cpu" else {}
_FIELDS = ("q", "k", "v", "g", "beta")
# (dtype of inputs, operand precision, forward atol, gradient atol relative to the largest entry)
_PRECISIONS = ((np.float64, None, 1e-10, 1e-10), (np.float32, "float32", 1e-5, 1e-4))
# bfloat16 operands carry 8 bits: not the goldens' tolerance, but a bound of a few roundings
_ROUNDED = (np.float32, "bfloat16", 3e-2, 3e-2)
_FORMS = ("sequential", "folded", "route_i", "route_ii")


def is_flare(folder: Path) -> bool:
    """Whether the folder holds packed two-stream cases: .npz files with cu_seqlens, block_size and noisy arrays."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        return False
    with np.load(files[0]) as case:
        return {"cu_seqlens", "block_size", "q_noisy", "visibility"} <= set(case.files)


def is_gdn_units(folder: Path) -> bool:
    """Whether the folder holds single-stream unit cases: cases.json with delta and conv lists beside cases.npz."""
    index = folder / "cases.json"
    if not index.exists() or not (folder / "cases.npz").exists():
        return False
    cases = json.loads(index.read_text())
    return isinstance(cases, dict) and {"delta", "conv"} <= set(cases)


class _Tally:
    """Largest error, and the checks that failed."""

    def __init__(self):
        self.largest, self.checks, self.failures = 0.0, 0, []

    def close(self, label, got, want, atol, rtol=0.0, counts=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        self.checks += 1
        if got.shape != want.shape:
            self.failures.append(f"{label}: shape {got.shape}, expected {want.shape}")
            return
        error = np.abs(got - want)
        self.largest = max(self.largest, float(error.max(initial=0.0))) if counts else self.largest
        if not np.all(error <= atol + rtol * np.abs(want)):  # also false for NaN
            self.failures.append(f"{label}: error {error.max():.3g} over {atol:.3g}")

    def true(self, label, condition):
        self.checks += 1
        if not condition:
            self.failures.append(label)

    def result(self, what):
        detail = f"{what}: {self.checks} checks, {len(self.failures)} failed"
        return not self.failures, self.largest, detail + "".join(f"\n  {f}" for f in self.failures[:20])


def _relative(array):
    return max(1e-300, float(np.abs(array).max()))


def _flare_delta(tally, name, case, documents, form, precision):
    dtype, operand, forward_atol, gradient_atol = precision
    block = int(case["block_size"])
    clean = Stream(*(jnp.asarray(case[f][None], dtype) for f in _FIELDS))
    noisy = Stream(*(jnp.asarray(case[f + "_noisy"][None, None], dtype) for f in _FIELDS))
    cotangents = jnp.asarray(case["do"][None], dtype), jnp.asarray(case["do_noisy"][None, None], dtype)

    def run(clean, noisy):
        result = two_stream_gated_delta(clean, noisy, block_size=block, documents=documents, form=form,
                                        precision=operand)
        return result.out, result.noisy_out

    def both(clean, noisy, cotangents):
        outs, pullback = jax.vjp(run, clean, noisy)
        return outs, pullback(cotangents)
    (out, noisy_out), (d_clean, d_noisy) = jax.jit(both, **_JIT)(clean, noisy, cotangents)
    label = f"{name} {form} {np.dtype(dtype).name}/{operand or 'same'}"
    strict = operand != "bfloat16"
    tally.close(f"{label} o", out[0], case["o"], forward_atol, counts=strict)
    tally.close(f"{label} o_noisy", noisy_out[0, 0], case["o_noisy"], forward_atol, counts=strict)
    for suffix, grads in (("", d_clean), ("_noisy", d_noisy)):
        for field, grad in zip(_FIELDS, grads):
            want = case[f"d{field}{suffix}"]
            scale = _relative(want)
            tally.close(f"{label} d{field}{suffix}", grad.reshape(want.shape) / scale, want / scale, gradient_atol,
                        counts=strict)


def _flare_conv(tally, name, case, documents, dtype, forward_atol, gradient_atol):
    x, noisy, weight, dy, dy_noisy = (jnp.asarray(case[f], dtype) for f in
                                      ("conv_x", "conv_x_noisy", "conv_w", "conv_dy", "conv_dy_noisy"))

    def run(x, noisy, weight):
        out, noisy_out, _ = short_conv(x[None], weight, noisy[None, None], block_size=int(case["block_size"]),
                                       documents=documents)
        return out[0], noisy_out[0, 0]
    outs, pullback = jax.vjp(run, x, noisy, weight)
    for field, got in zip(("conv_y", "conv_y_noisy"), outs):
        tally.close(f"{name} {field}", got, case[field], forward_atol)
    for field, got in zip(("conv_dx", "conv_dx_noisy", "conv_dw"), pullback((dy, dy_noisy))):
        scale = _relative(case[field])
        tally.close(f"{name} {field}", got / scale, case[field] / scale, gradient_atol)


def run_flare(folder: Path, forms=_FORMS) -> tuple[bool, float, str]:
    """Checks outputs and gradients of every form and precision, the convolution, and the visibility bit for bit.

    Args:
      folder: holds packed two-stream cases (see `is_flare`).
      forms: forms of the gated delta rule to run.
    Returns:
      passed, largest absolute error (gradients relative to their largest entry; bfloat16 products apart), detail.
    """
    tally, before = _Tally(), jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        files = sorted(folder.glob("*.npz"))
        for path in files:
            with np.load(path) as stored:
                case = {key: stored[key] for key in stored.files}
            lengths = np.diff(case["cu_seqlens"])
            documents = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[None], jnp.int32)
            total = 3 * int(lengths.sum())
            want = np.unpackbits(case["visibility"])[:total * total].reshape(total, total).astype(bool)
            block = jnp.concatenate([jnp.arange(n) // int(case["block_size"]) for n in lengths])[None]
            got = two_stream(block, documents, views=2, token_causal=True).dense()[0]
            tally.true(f"{path.stem} visibility", np.array_equal(got, want))
            for precision in _PRECISIONS:
                _flare_conv(tally, path.stem, case, documents, precision[0], *precision[2:])
                for form in forms:
                    _flare_delta(tally, path.stem, case, documents, form, precision)
            _flare_delta(tally, path.stem, case, documents, "folded", _ROUNDED)
        return tally.result(f"{len(files)} two-stream cases x {len(forms)} forms")
    finally:
        jax.clear_caches()  # dozens of one-off programs, a gigabyte or two
        jax.config.update("jax_enable_x64", before)


def _unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def run_gdn_units(folder: Path) -> tuple[bool, float, str]:
    """Checks single-stream delta-rule and convolution unit cases, and gradients against the token-by-token form.

    The unit files hold no gradients; those of the folded form are compared with autodiff of the recurrence in float64.

    Args:
      folder: holds cases.json and cases.npz (see `is_gdn_units`).
    Returns:
      passed, largest absolute error, detail.
    """
    tally, before = _Tally(), jax.config.jax_enable_x64
    cases = json.loads((folder / "cases.json").read_text())
    atol, rtol = 1e-5, 1e-4
    jax.config.update("jax_enable_x64", True)
    try:
        with np.load(folder / "cases.npz") as stored:
            arrays = {key: stored[key] for key in stored.files}
        for info in cases["delta"]:
            at = lambda field: arrays[f"delta{info['index']}__{field}"]
            initial = jnp.asarray(at("initial_state")) if info["has_initial_state"] else None
            prepare = _unit if info["use_qk_l2norm"] else (lambda x: x)
            clean = Stream(prepare(jnp.asarray(at("q"))), prepare(jnp.asarray(at("k"))),
                           *(jnp.asarray(at(f)) for f in ("v", "g", "beta")))
            for form in ("sequential", "folded", "route_i"):
                run = jax.jit(lambda c, s, form=form: two_stream_gated_delta(c, initial_state=s, form=form), **_JIT)
                result = run(clean, initial)
                for suffix in ("chunk", "recurrent"):
                    label = f"delta{info['index']} {form} against {suffix}"
                    tally.close(f"{label} out", result.out, at(f"out_{suffix}"), atol, rtol)
                    tally.close(f"{label} state", result.final_state, at(f"state_{suffix}"), atol, rtol)

            def gradients(form, dtype):
                cast = lambda a: jnp.asarray(a, dtype)
                def loss(c, s):
                    result = two_stream_gated_delta(c, initial_state=s, form=form)
                    return jnp.sum(jnp.sin(result.out)) + jnp.sum(jnp.cos(result.final_state))
                start = jnp.zeros_like(at("state_chunk")) if initial is None else initial
                return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)), **_JIT)(jax.tree.map(cast, clean), cast(start)))
            for field, got, want in zip((*_FIELDS, "initial_state"), gradients("folded", jnp.float32),
                                        gradients("sequential", jnp.float64)):
                tally.close(f"delta{info['index']} d{field}", got, want, 1e-5 * max(1.0, _relative(want)), 1e-3)
        for info in cases["conv"]:
            at = lambda field: arrays[f"conv{info['index']}__{field}"]
            act = jax.nn.silu if info["activation"] == "silu" else (lambda y: y)
            weight = jnp.asarray(at("weight"))[:, ::-1]  # stored oldest lag first; the operator counts lags backwards
            tokens = lambda a: jnp.moveaxis(jnp.asarray(a), 1, 2)
            out, _, state = short_conv(tokens(at("x")), weight)
            tally.close(f"conv{info['index']} y", act(out), np.moveaxis(at("y"), 1, 2), atol, rtol)
            lags = weight.shape[1]
            after = lambda states: np.moveaxis(states, 1, 2)[:, 1 - lags:]
            tally.close(f"conv{info['index']} state", state, after(at("state_after_prefill")), atol, rtol)
            for step in range(at("x_new").shape[2]):
                out, _, state = short_conv(tokens(at("x_new"))[:, step:step + 1], weight, state=state)
                tally.close(f"conv{info['index']} y_new{step}", act(out)[:, 0], at("y_new")[:, :, step], atol, rtol)
                tally.close(f"conv{info['index']} state{step}", state, after(at("states_new")[step]), atol, rtol)
        return tally.result(f"{len(cases['delta'])} delta and {len(cases['conv'])} convolution cases")
    finally:
        jax.clear_caches()  # dozens of one-off programs, a gigabyte or two
        jax.config.update("jax_enable_x64", before)
